"""What the argument ``draft`` means: names, backends, drafters, or several of them."""

from collections.abc import Sequence
from typing import Any

from specdec.backend import ModelBackend
from specdec.composite import CompositeDrafter
from specdec.drafters import Drafter
from specdec.lookup import PromptLookupDrafter
from specdec.suffix import SuffixDrafter
from specdec.translate import model_drafter

__all__ = ["LOOKUPS", "drafter_for", "named_draft", "named_lookups", "what_lacks"]

LOOKUPS: dict[str, type[PromptLookupDrafter | SuffixDrafter]] = {
    "lookup": PromptLookupDrafter,
    "suffix": SuffixDrafter,
}


def drafter_for(
    target: ModelBackend,
    draft: ModelBackend | Drafter | str | Sequence[ModelBackend | Drafter | str],
    *,
    keep_caches: int,
) -> Drafter:
    """What was given as a draft, as one drafter.

    Args:
        target: The model that it drafts for.
        draft: See ``SpeculativeDecoder``.
        keep_caches: Of how many of the latest texts models keep the caches.

    Raises:
        TypeError: It is none of these.
        ValueError: Nothing is called so.
        VocabularyMismatchError: A model's vocabulary has too little in common with the target's.
    """
    several = draft if isinstance(draft, list | tuple) else [draft]
    drafters = [each for one in several for each in _drafters(target, one, keep_caches)]
    # A lookup costs nothing to ask: a composite does in every round, and takes what pays.
    if len(drafters) == 1 and not isinstance(drafters[0], tuple(LOOKUPS.values())):
        return drafters[0]
    return CompositeDrafter(drafters)


def _drafters(target: ModelBackend, draft: object, keep_caches: int) -> list[Drafter]:
    """What was given as a draft, made one or several."""
    lookups: list[Drafter] = []
    if isinstance(draft, str):
        lookups, name = named_lookups(draft)
        if name is None:
            return lookups
        draft = named_draft(target, name)
    if isinstance(draft, ModelBackend):
        return [*lookups, model_drafter(draft, target.vocab, keep_caches=keep_caches)]
    if isinstance(draft, type) or not isinstance(draft, Drafter):
        raise TypeError(
            'draft must be "self", "lookup", "suffix", a backend, a Drafter or a list of them, '
            f"but {what_lacks(draft)}"
        )
    return [draft]


def named_lookups(name: str) -> tuple[list[Drafter], str | None]:
    """The lookups that a name begins with, and the rest of it if there is one.

    ``"suffix"`` and ``"lookup"`` are alone; ``"suffix+self"`` and so on go with a model.

    Raises:
        ValueError: Nothing follows a plus.
    """
    lookups: list[Drafter] = []
    rest: str | None = name
    while rest is not None and (first := rest.partition("+")[0]) in LOOKUPS:
        lookups.append(LOOKUPS[first]())
        _, plus, rest = rest.partition("+")
        if plus and not rest:
            raise ValueError(f"{name!r} ends with a plus: name a model behind it, or leave it out")
        rest = rest or None
    return lookups, rest


def named_draft(target: ModelBackend, name: str, **options: Any) -> ModelBackend:
    """The draft called ``"self"``, or ``"self:q8_0"`` and so on for another quantisation.

    ``options`` are for the target's backend, which makes it.

    Raises:
        ValueError: No draft is called so, or the target's backend can't make one of itself.
    """
    kind, colon, quantization = name.partition(":")
    if kind != "self" or (colon and not quantization):
        raise ValueError(
            f'no draft is called {name!r}: give "self", "self:q8_0" or the like, "lookup", '
            '"suffix", a backend, or several in a list, such as '
            '["suffix", LlamaCppBackend("small.gguf")]'
        )
    make = getattr(target, "self_draft", None)  # what a backend has that can copy its own model
    if make is None:
        raise ValueError(
            f"{type(target).__name__} can't make a draft of itself: give a smaller model of the "
            "same vocabulary"
        )
    draft: ModelBackend = make(*[quantization] * bool(quantization), **options)
    return draft


def what_lacks(thing: object) -> str:
    """Which members of a backend an object doesn't have, for a message."""
    if isinstance(thing, type):
        return f"{thing.__name__} is a class: make an instance of it"
    members = ("vocab", "max_context", "new_cache", "forward", "crop", "info")
    lacking = [member for member in members if not hasattr(thing, member)]
    return f"{type(thing).__name__} has no {', '.join(lacking)}"

"""What a model's ids mean: the table of tokens, prompts to ids, and which pairs go together."""

import operator
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, cast

from specdec.errors import VocabularyMismatchError

__all__ = ["Message", "Prompt", "Vocabulary", "encode_prompt", "odd_special", "shared_ids"]

Message: TypeAlias = Mapping[str, str]
Prompt: TypeAlias = str | Sequence[int] | Sequence[Message]


@dataclass(frozen=True, slots=True, eq=False)
class Vocabulary:
    """The ids of a model and what they spell.

    Attributes:
        size: Width of a row of logits. May exceed ``len(tokens)``: the rest is padding.
        tokens: The bytes of every id, special tokens by their literal text (``b"<|im_end|>"``).
            None, or an id past the end of the table, is no token: never proposed, never emitted.
        eos_ids: Every id that ends a text.
        special_ids: Ids that steer the model and are left out of texts.
        bos_id: The id that starts a text, if the model has one.
        encode: Text to ids, with BOS where the model wants one. None: the backend has no tokenizer.
        encode_chat: Messages to ids by the model's chat template, ready for the assistant's turn.
            None: the model has no template.
        num_tokens: One past the last real token; the rest of a row is padding.
        holes: Ids below ``num_tokens`` that are no tokens.
    """

    size: int
    tokens: Sequence[bytes | None]
    eos_ids: frozenset[int]
    special_ids: frozenset[int] = frozenset()
    bos_id: int | None = None
    encode: Callable[[str], list[int]] | None = None
    encode_chat: Callable[[Sequence[Message]], list[int]] | None = None
    num_tokens: int = field(init=False)
    holes: Sequence[int] = field(init=False)

    def __post_init__(self) -> None:
        if not 0 < len(self.tokens) <= self.size:
            raise ValueError(
                f"a vocabulary of size {self.size} can't have {len(self.tokens)} tokens: "
                f"give 1 to {self.size}"
            )
        if all(token is None for token in self.tokens):
            raise ValueError("a vocabulary needs at least one token that isn't None")
        num_tokens = len(self.tokens)
        while self.tokens[num_tokens - 1] is None:
            num_tokens -= 1
        holes = [i for i, token in enumerate(self.tokens[:num_tokens]) if token is None]
        object.__setattr__(self, "num_tokens", num_tokens)
        object.__setattr__(self, "holes", holes)

    def spell(self, token_id: int) -> bytes:
        """The bytes that an id adds to a text: none for special ids and padding."""
        if token_id in self.special_ids or token_id >= len(self.tokens):
            return b""
        return self.tokens[token_id] or b""


def encode_prompt(vocab: Vocabulary, prompt: Prompt) -> list[int]:
    """A prompt as ids: text and messages by the model's tokenizer, ids as they are.

    Raises:
        ValueError: No ids come out and the model has no BOS, or an id is outside the vocabulary.
        TypeError: The prompt is of no known kind, or the backend can't encode it.
    """
    if isinstance(prompt, str):
        ids = _encode_with(vocab.encode, "tokenizer", prompt, vocab.bos_id)
    elif isinstance(prompt, bytes | bytearray | Mapping) or not hasattr(prompt, "__iter__"):
        raise TypeError(f"a prompt is text, ids or chat messages, not {type(prompt).__name__}")
    else:
        items = list(prompt)
        if items and isinstance(items[0], Mapping):
            ids = _encode_with(vocab.encode_chat, "chat template", items, vocab.bos_id)
        else:
            ids = [operator.index(cast("int", token)) for token in items]
    if not ids:
        if vocab.bos_id is None:
            raise ValueError("the prompt is empty and the model has no BOS to start from")
        ids = [vocab.bos_id]
    for token in ids:
        if not 0 <= token < vocab.size:
            raise ValueError(f"prompt id {token} is outside the vocabulary of {vocab.size} ids")
    return ids


def _encode_with(
    encode: Callable[[Any], list[int]] | None, what: str, prompt: Any, bos_id: int | None
) -> list[int]:
    if encode is None:
        raise TypeError(f"this backend has no {what}: give the prompt in another form, such as ids")
    try:
        ids = list(encode(prompt))
    except UnicodeEncodeError as error:
        raise ValueError(f"the prompt isn't valid Unicode: {error}") from error
    if bos_id is not None and ids[:2] == [bos_id] * 2:
        del ids[0]  # the text or the template brought a BOS and the tokenizer added its own
    return ids


def shared_ids(target: Vocabulary, draft: Vocabulary) -> Container[int]:
    """The ids that mean the same in both models: all that a draft may propose.

    Sizes may differ by padding and a few ids by meaning; tables that agree on less than nine tenths
    of the smaller one are taken for different tokenizers.

    Raises:
        VocabularyMismatchError: They are different tokenizers.
    """
    count = min(target.num_tokens, draft.num_tokens)
    pairs = zip(target.tokens[:count], draft.tokens[:count], strict=True)
    odd = [i for i, (ours, theirs) in enumerate(pairs) if ours != theirs or ours is None]
    different = [i for i in odd if target.tokens[i] is not None and draft.tokens[i] is not None]
    if len(different) > count // 10 or len(odd) == count:
        first = next(iter(different), 0)
        raise VocabularyMismatchError(
            f"target and draft have different tokenizers: {len(different)} of {count} common ids "
            f"differ (tables of {target.num_tokens} and {draft.num_tokens} tokens). The first is "
            f"id {first}: {target.tokens[first]!r} in the target, {draft.tokens[first]!r} in the "
            "draft. Take a draft of the target's own family"
        )
    return range(count) if not odd else frozenset(range(count)).difference(odd)


def odd_special(target: Vocabulary, draft: Vocabulary) -> str | None:
    """The special ids that spell something else in the other model, in words; None if all agree.

    Such ids are never drafted, and where the text holds one the draft reads something else.
    """
    count = min(target.num_tokens, draft.num_tokens)
    odd = [
        f"id {i} is {target.tokens[i]!r} in the target and {draft.tokens[i]!r} in the draft"
        for i in sorted(target.special_ids | target.eos_ids | draft.special_ids | draft.eos_ids)
        if i < count
        and target.tokens[i] != draft.tokens[i]
        and None not in (target.tokens[i], draft.tokens[i])
    ]
    if not odd:
        return None
    more = f", and {len(odd) - 4} more" if len(odd) > 4 else ""
    return f"target and draft differ in special tokens: {'; '.join(odd[:4])}{more}"

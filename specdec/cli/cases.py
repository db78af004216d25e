"""The prompts that a command decodes, as ids of the target."""

import json
from collections.abc import Sequence
from typing import NamedTuple

from specdec.backend import ModelBackend
from specdec.cli.console import err
from specdec.prompts import KindedPrompt, shipped_prompts
from specdec.report import counted
from specdec.rounding import random_ids
from specdec.vocab import encode_prompt

__all__ = ["Case", "as_cases", "cases_of"]


class Case(NamedTuple):
    """A prompt as it is decoded."""

    number: int  # from 1
    kind: str
    text: str
    ids: Sequence[int]


def cases_of(
    target: ModelBackend, given: Sequence[KindedPrompt] | None, most: int | None
) -> list[Case]:
    """The prompts that a user gave; else so many of the shipped ones, if the target can read them.

    A model of another language, of a short context or without a tokenizer has random ids instead.
    Raises as ``as_cases`` does, for those that were given.
    """
    if given is not None:
        return as_cases(target, given)
    prompts = shipped_prompts()[:most]
    try:
        return as_cases(target, prompts)
    except Exception as error:  # of whatever kind a tokenizer has
        err.out(f"random ids stand in for the shipped prompts: {error}", style="yellow")
    length = min(12, max(1, target.max_context // 2))
    each = [random_ids(target.vocab, length, seed=seed) for seed in range(len(prompts))]
    return [Case(number, "random ids", json.dumps(ids), ids) for number, ids in enumerate(each, 1)]


def as_cases(target: ModelBackend, prompts: Sequence[KindedPrompt]) -> list[Case]:
    """Prompts as ids, texts by the target's chat template if it has one.

    Those that are longer than the target's context are left out.

    Raises:
        ValueError: None is left, or one can't be encoded.
    """
    vocab, cases = target.vocab, []
    for number, (kind, prompt) in enumerate(prompts, 1):
        text = prompt if isinstance(prompt, str) else json.dumps(prompt)
        if isinstance(prompt, str) and vocab.encode_chat:
            prompt = [{"role": "user", "content": prompt}]
        try:
            cases.append(Case(number, kind, text, encode_prompt(vocab, prompt)))
        except (TypeError, ValueError) as error:
            raise ValueError(f"prompt {number}: {error}") from error
    fitting = [case for case in cases if len(case.ids) <= target.max_context]
    limit = f"more tokens than the target's context of {target.max_context}"
    if not fitting:
        raise ValueError(f"all prompts have {limit}: give shorter ones by --prompts")
    if fitting != cases:
        missing = counted(len(cases) - len(fitting), "prompt")
        err.out(f"{missing} left out: {limit}", style="yellow")
    return fitting

"""Prompts to measure with: a set of several kinds that is shipped, and files of a user's own."""

import json
from collections import defaultdict
from importlib.resources import files
from itertools import chain, zip_longest
from pathlib import Path
from typing import NamedTuple, TypeGuard

from specdec.vocab import Prompt

__all__ = ["KindedPrompt", "load_prompts", "shipped_prompts"]

EXAMPLE = (
    '{"kind": "code", "prompt": "Write ..."}, the prompt being text, a list of ids, or a list of '
    'messages such as {"role": "user", "content": "Write ..."}'
)
MESSAGE = ("role", "content")


class KindedPrompt(NamedTuple):
    """A prompt and what kind of text it asks for."""

    kind: str
    prompt: Prompt


def shipped_prompts() -> list[KindedPrompt]:
    """Code, questions, stories, summaries, translations and extractions, four of each, in turn."""
    return parse_prompts(files("specdec").joinpath("prompts.jsonl").read_text(encoding="utf-8"))


def load_prompts(path: Path) -> list[KindedPrompt]:
    """The prompts of a file, one kind after the other in turn, so that any first few are varied.

    Args:
        path: A text file. Either every line is a JSON object with ``"prompt"`` (text, ids or chat
            messages) and, if wanted, ``"kind"``; or every line is a prompt. Which of them, the
            first line shows; a name that ends in .json or .jsonl says the former.

    Raises:
        ValueError: There is no prompt in it, or a line that isn't like the others.
        OSError: It can't be read.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
        return parse_prompts(text, as_json=path.suffix.lower() in (".json", ".jsonl"))
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no text in UTF-8: {error}") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def parse_prompts(text: str, *, as_json: bool = False) -> list[KindedPrompt]:
    """The prompts of a file's text."""
    lines = {number: line for number, line in enumerate(text.split("\n"), 1) if line.strip()}
    if not lines:
        raise ValueError("there is no prompt in it: write one per line")
    as_json = as_json or next(iter(lines.values())).lstrip().startswith("{")
    kinds: dict[str, list[KindedPrompt]] = defaultdict(list)
    for number, line in lines.items():
        prompt = parse_object(line, number) if as_json else KindedPrompt("prompt", line.strip())
        kinds[prompt.kind].append(prompt)
    return [prompt for prompt in chain(*zip_longest(*kinds.values())) if prompt is not None]


def parse_object(line: str, number: int) -> KindedPrompt:
    """A line of a file of JSON lines."""
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"line {number} is no JSON ({error}): write {EXAMPLE}") from error
    if isinstance(fields, dict):
        kind, prompt = fields.get("kind", "prompt"), fields.get("prompt")
        if isinstance(kind, str) and is_prompt(prompt):
            return KindedPrompt(kind, prompt)
    raise ValueError(f"line {number} is not like {EXAMPLE}: {line.strip()[:80]}")


def is_prompt(value: object) -> TypeGuard[Prompt]:
    """Whether it is text, ids or chat messages."""
    if not isinstance(value, list):
        return isinstance(value, str)
    ids = all(type(item) is int and item >= 0 for item in value)  # True is an int too
    messages = all(
        isinstance(item, dict) and all(isinstance(item.get(key), str) for key in MESSAGE)
        for item in value
    )
    return bool(value) and (ids or messages)

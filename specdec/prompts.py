"""Prompts to measure with: a set of several kinds that is shipped, and files of a user's own."""

import json
from collections import defaultdict
from importlib.resources import files
from itertools import chain, zip_longest
from pathlib import Path
from typing import NamedTuple

from specdec.vocab import Prompt

__all__ = ["KindedPrompt", "load_prompts", "shipped_prompts"]


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
            messages) and, if wanted, ``"kind"``; or every line is a prompt.

    Raises:
        ValueError: There is no prompt in it, or a line that isn't like the first.
        OSError: It can't be read.
    """
    try:
        return parse_prompts(path.read_text(encoding="utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no text in UTF-8: {error}") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def parse_prompts(text: str) -> list[KindedPrompt]:
    """The prompts of a file's text."""
    lines = {number: line for number, line in enumerate(text.split("\n"), 1) if line.strip()}
    if not lines:
        raise ValueError("there is no prompt in it: write one per line")
    as_json = next(iter(lines.values())).lstrip().startswith("{")
    kinds: dict[str, list[KindedPrompt]] = defaultdict(list)
    for number, line in lines.items():
        prompt = parse_object(line, number) if as_json else KindedPrompt("prompt", line.strip())
        kinds[prompt.kind].append(prompt)
    return [prompt for prompt in chain(*zip_longest(*kinds.values())) if prompt is not None]


def parse_object(line: str, number: int) -> KindedPrompt:
    """A line of a file of JSON lines."""
    try:
        fields = json.loads(line)
    except ValueError as error:
        raise ValueError(f"line {number} is no JSON: {error}") from error
    if not isinstance(fields, dict) or not isinstance(fields.get("prompt"), str | list):
        raise ValueError(
            f'line {number} is not like {{"kind": "code", "prompt": "Write ..."}}: {line.strip()}'
        )
    return KindedPrompt(str(fields.get("kind", "prompt")), fields["prompt"])

"""Reports as JSON."""

import json
import math
from collections.abc import Mapping
from typing import Any

import typer

from specdec.backend import ModelBackend
from specdec.composite import CompositeDrafter

__all__ = ["described", "plain", "print_json"]


def described(
    target: ModelBackend, draft: ModelBackend | CompositeDrafter | None
) -> dict[str, Any]:
    """What the models of a pair run on."""
    return {"target": dict(target.info()), "draft": draft and dict(draft.info())}


def print_json(fields: Mapping[str, Any]) -> None:
    """Print one object; an infinite number, which JSON doesn't have, as null."""
    typer.echo(json.dumps(plain(fields), default=str))


def plain(value: Any) -> Any:
    """A value as JSON can have it: an infinite number as null."""
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value

"""The options that several commands have, each said once, and what makes a function a command."""

import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import typer

from specdec.cli.console import err

__all__ = [
    "AsJson",
    "Limit",
    "MaxNewTokens",
    "ModelOptions",
    "NumDraftTokens",
    "Options",
    "Prompts",
    "Seed",
    "Temperature",
    "TrustRemoteCode",
    "as_num_draft_tokens",
    "command",
]

Options: TypeAlias = Mapping[str, Mapping[str, Any]]  # keyword arguments by a backend's name

MODEL = (
    "A hub id or folder (HF), or a GGUF (llama.cpp); hf:, llama-cpp: or the name of another "
    "installed backend in front forces one."
)
DRAFT = (
    f"{MODEL} 'self' is the target's own weights as q4_k_m, 'self:q8_0' and so on as another type "
    "(see specdec quantize), and what an HF target has if nothing is named; 'none' decodes "
    "plainly; 'suffix' and 'lookup' draft from the text itself, 'suffix+MODEL' with a model too."
)

AsJson: TypeAlias = Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")]
Limit: TypeAlias = Annotated[
    int | None, typer.Option(min=1, help="Only the first so many prompts.")
]
MaxNewTokens: TypeAlias = Annotated[int, typer.Option(help="The most tokens to put out.")]
NumDraftTokens: TypeAlias = Annotated[
    str,
    typer.Option(
        metavar="auto|K",
        help="The most tokens to draft per round; auto: as many as pay by measured times.",
    ),
]
Prompts: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        exists=True,
        dir_okay=False,
        help='A file with a prompt per line, or lines like {"kind": "code", "prompt": "..."}; '
        "without it some of six kinds. Texts go into the chat template, if there is one.",
    ),
]
Temperature: TypeAlias = Annotated[float, typer.Option(help="0: the best token; 1: as it is.")]
Seed: TypeAlias = Annotated[
    int | None, typer.Option(help="The same seed, the same text; one is drawn if none.")
]
TrustRemoteCode: TypeAlias = Annotated[
    bool,
    typer.Option("--trust-remote-code", help="Let code from an HF model's repository run."),
]
Debug: TypeAlias = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """The pair that a user names and how to load it; each field is an option."""

    target_model: Annotated[str | None, typer.Option(help=MODEL)] = None
    draft_model: Annotated[str | None, typer.Option(help=DRAFT)] = None
    device: Annotated[str | None, typer.Option(help="For HF models: cpu, cuda, cuda:1.")] = None
    dtype: Annotated[str, typer.Option(help="For HF models: float32, bfloat16, auto.")] = "auto"
    n_gpu_layers: Annotated[int, typer.Option(help="For GGUF models; -1: all.")] = 0
    n_ctx: Annotated[int | None, typer.Option(min=1, help="Context of GGUF models in tokens.")] = (
        None
    )
    n_threads: Annotated[int | None, typer.Option(min=1, help="Threads for GGUF models.")] = None
    trust_remote_code: TrustRemoteCode = False

    @property
    def by_backend(self) -> Options:
        """What they mean to each backend."""
        names = {
            "hf": ("device", "dtype", "trust_remote_code"),
            "llama-cpp": ("n_gpu_layers", "n_ctx", "n_threads"),
        }
        return {
            backend: {name: getattr(self, name) for name in its} for backend, its in names.items()
        }


def command(function: Callable[..., None]) -> Callable[..., None]:
    """Make a function a command for typer.

    A parameter called ``models`` becomes the options of ``ModelOptions``. ``--debug`` comes with
    it; without that an error is one line and exit code 2.
    """
    own = inspect.signature(function).parameters
    spread = inspect.signature(ModelOptions).parameters if "models" in own else {}

    @functools.wraps(function)
    def run(*, debug: bool, **given: Any) -> None:
        if spread:
            given["models"] = ModelOptions(**{name: given.pop(name) for name in spread})
        try:
            function(**given)
        except KeyboardInterrupt:
            err.out("\ninterrupted", style="yellow")
            sys.exit(130)
        except Exception as error:
            if debug:
                raise
            text = " ".join(str(error).split()) or type(error).__name__
            err.out(f"error: {text}", style="red")
            sys.exit(2)

    keyword = inspect.Parameter.KEYWORD_ONLY
    debugging = inspect.Parameter("debug", keyword, default=False, annotation=Debug)
    shown = [
        each.replace(kind=keyword)
        for name, mine in own.items()
        for each in (spread.values() if name == "models" else [mine])
    ]
    run.__signature__ = inspect.Signature([*shown, debugging])  # type: ignore[attr-defined]
    return run


def as_num_draft_tokens(text: str) -> int | Literal["auto"]:
    """What ``--num-draft-tokens`` says.

    Raises:
        ValueError: Neither a whole number from 0 on nor auto.
    """
    if text == "auto":
        return "auto"
    if not (text.isascii() and text.isdigit()):
        raise ValueError(f"--num-draft-tokens is auto or a whole number from 0 on, not {text!r}")
    return int(text)

"""The options that several commands have, each said once, and what makes a function a command."""

import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import typer

from specdec.cli.console import err
from specdec.sampling import SamplingParams

__all__ = [
    "AsJson",
    "Limit",
    "MaxNewTokens",
    "ModelOptions",
    "NumDraftTokens",
    "Options",
    "Prompts",
    "SamplingOptions",
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


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """How tokens are chosen; each field is an option."""

    temperature: Temperature = 0.0
    top_k: Annotated[int, typer.Option(help="Draw from the k best tokens; 0: all.")] = 0
    top_p: Annotated[float, typer.Option(help="Draw from this much probability.")] = 1.0
    min_p: Annotated[float, typer.Option(help="Least part of the best's probability.")] = 0.0
    repetition_penalty: Annotated[float, typer.Option(help="For ids seen; 1: none.")] = 1.0
    presence_penalty: Annotated[float, typer.Option(help="For ids in the output.")] = 0.0
    frequency_penalty: Annotated[float, typer.Option(help="For each time there.")] = 0.0
    logit_bias: Annotated[list[str] | None, typer.Option(help="ID=BIAS, repeatable.")] = None
    min_tokens: Annotated[int, typer.Option(help="No EOS before so many tokens.")] = 0
    seed: Seed = None

    @property
    def params(self) -> SamplingParams:
        """As the decoder takes them."""
        given = {each.name: getattr(self, each.name) for each in fields(self)}
        return SamplingParams(**given | {"logit_bias": biases(self.logit_bias or ())})


def biases(texts: Iterable[str]) -> dict[int, float]:
    """``ID=BIAS`` texts as a mapping."""
    try:
        pairs = [text.split("=") for text in texts]
        return {int(token): float(bias) for token, bias in pairs}
    except ValueError:
        raise ValueError(f"--logit-bias is ID=BIAS, such as 42=-1.5, not {texts}") from None


def command(function: Callable[..., None]) -> Callable[..., None]:
    """Make a function a command for typer.

    A parameter that is a dataclass, such as ``models: ModelOptions``, becomes the options that are
    its fields. ``--debug`` comes with it; without that an error is one line and exit code 2.
    """
    own = inspect.signature(function).parameters
    groups = {
        name: inspect.signature(each.annotation).parameters
        for name, each in own.items()
        if isinstance(each.annotation, type) and is_dataclass(each.annotation)
    }

    @functools.wraps(function)
    def run(*, debug: bool, **given: Any) -> None:
        for name, options in groups.items():
            given[name] = own[name].annotation(**{each: given.pop(each) for each in options})
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
        for each in (groups[name].values() if name in groups else [mine])
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

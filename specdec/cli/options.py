"""The options that several commands have, each said once."""

from typing import Annotated, Literal, TypeAlias

import typer

from specdec.cli.models import Options

__all__ = [
    "AsJson",
    "Debug",
    "Device",
    "DraftModel",
    "Dtype",
    "GpuLayers",
    "MaxNewTokens",
    "NumContext",
    "NumDraftTokens",
    "NumThreads",
    "TargetModel",
    "TrustRemoteCode",
    "as_num_draft_tokens",
    "backend_options",
]

MODEL = (
    "A hub id or folder (HF), or a GGUF (llama.cpp); hf:, llama-cpp: or the name of another "
    "installed backend in front forces one."
)

TargetModel: TypeAlias = Annotated[str | None, typer.Option(help=MODEL)]
DraftModel: TypeAlias = Annotated[
    str | None,
    typer.Option(
        help=f"{MODEL} 'self' is the target's own weights as q4_k_m, 'self:q8_0' and so on as "
        "another type (see specdec quantize), and what an HF target has if nothing is named; "
        "'none' decodes plainly."
    ),
]
NumDraftTokens: TypeAlias = Annotated[
    str,
    typer.Option(
        metavar="auto|K",
        help="The most tokens to draft per round; auto: as many as pay by measured times.",
    ),
]
MaxNewTokens: TypeAlias = Annotated[int, typer.Option(help="The most tokens to put out.")]
Device: TypeAlias = Annotated[str | None, typer.Option(help="For HF models: cpu, cuda, cuda:1.")]
Dtype: TypeAlias = Annotated[str, typer.Option(help="For HF models: float32, bfloat16, auto.")]
GpuLayers: TypeAlias = Annotated[int, typer.Option(help="For GGUF models; -1: all.")]
NumContext: TypeAlias = Annotated[
    int | None, typer.Option(help="Context of GGUF models in tokens.")
]
NumThreads: TypeAlias = Annotated[int | None, typer.Option(help="Threads for GGUF models.")]
TrustRemoteCode: TypeAlias = Annotated[
    bool,
    typer.Option("--trust-remote-code", help="Let code from an HF model's repository run."),
]
AsJson: TypeAlias = Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")]
Debug: TypeAlias = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


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


def backend_options(
    *,
    device: str | None,
    dtype: str,
    trust_remote_code: bool,
    n_gpu_layers: int,
    n_ctx: int | None,
    n_threads: int | None,
) -> Options:
    """What the commands' options mean to each backend."""
    return {
        "hf": {"device": device, "dtype": dtype, "trust_remote_code": trust_remote_code},
        "llama-cpp": {"n_gpu_layers": n_gpu_layers, "n_ctx": n_ctx, "n_threads": n_threads},
    }

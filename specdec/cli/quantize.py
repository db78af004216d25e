"""``specdec quantize``: a model's weights with fewer bits each, as a GGUF for llama.cpp."""

from pathlib import Path
from typing import Annotated

import typer
from rich.filesize import decimal

from specdec.cli.console import out
from specdec.cli.models import Quantization, open_model
from specdec.cli.options import TrustRemoteCode, command

__all__ = ["quantize"]


@command
def quantize(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A hub id or folder (HF).", show_default=False)
    ],
    path: Annotated[
        Path, typer.Argument(metavar="OUT.gguf", help="The file to write.", show_default=False)
    ],
    kind: Annotated[
        Quantization, typer.Option("--type", case_sensitive=False, help="Bits per weight.")
    ] = "q4_k_m",
    force: Annotated[
        bool, typer.Option("--force", help="Replace a file that is there already.")
    ] = False,
    device: Annotated[str | None, typer.Option(help="To load it on: cpu, cuda, cuda:1.")] = None,
    dtype: Annotated[str, typer.Option(help="To load it in: float32, bfloat16, auto.")] = "auto",
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Write a model as a quantised GGUF, which llama.cpp can run anywhere.

    What it writes is compared with the original before it is quantised. As a draft for the model
    itself no file is needed.
    """
    if path.is_dir():
        raise ValueError(f"{path} is a folder: give a file in it, such as {path / 'model.gguf'}")
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is no plain file: give another")
    if path.exists() and not force:
        raise ValueError(f"{path} is there already: --force replaces it")
    if not path.parent.is_dir():
        raise ValueError(f"there is no folder {path.parent}: make it first")
    options = {"device": device, "dtype": dtype, "trust_remote_code": trust_remote_code}
    loaded = open_model(model, {"hf": options})
    write_quantized = getattr(loaded, "write_quantized", None)
    if write_quantized is None:
        raise ValueError(
            f"{model!r} was loaded by {type(loaded).__name__}, which doesn't write GGUF files: "
            "put hf: in front of the model to load it in transformers"
        )
    missing = write_quantized(path.resolve(), kind)
    tokenizer = f"no tokenizer inside ({missing})" if missing else "tokenizer inside"
    out.out(f"{path}: {decimal(path.stat().st_size)}, {kind}, {tokenizer}")

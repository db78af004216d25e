"""The command line: ``specdec`` and ``python -m specdec``."""

import os
import warnings
from importlib.metadata import version
from typing import Annotated

import typer

from specdec.cli import batch, bench, check, generate, quantize, verify
from specdec.cli.console import out, warn_in_one_line

__all__ = ["app", "main"]

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(generate.generate)
app.command()(check.check)
app.command()(verify.verify)
app.command()(bench.bench)
app.command()(batch.batch)
app.command()(quantize.quantize)


def show_version(wanted: bool) -> None:
    """Print the version and end."""
    if wanted:
        out.out(version("specdec-llm"))
        raise typer.Exit


@app.callback()
def specdec(
    _version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Say which.")
    ] = False,
) -> None:
    """Lossless speculative decoding across runtimes."""


def main() -> None:
    """Run the command line."""
    # OpenMP's idle threads spin for long by default. Two runtimes take turns here, so each would
    # hold the cores that the other needs; on a busy machine that costs a factor of 10 and more.
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    warnings.showwarning = warn_in_one_line
    app()

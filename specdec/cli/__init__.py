"""The command line: ``specdec`` and ``python -m specdec``."""

import sys
import warnings

import typer

from specdec.cli.console import errors_as_lines, warn_in_one_line
from specdec.cli.generate import generate

__all__ = ["app", "main"]

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(generate)


@app.callback()
def specdec() -> None:
    """Lossless speculative decoding across runtimes."""


def main() -> None:
    """Run the command line; errors are one line and exit code 2, with ``--debug`` a traceback."""
    warnings.showwarning = warn_in_one_line
    with errors_as_lines(debug="--debug" in sys.argv):
        app()

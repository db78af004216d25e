"""What all commands share of the terminal: results on stdout, progress and errors on stderr."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from specdec.prefill import OnPrefill

__all__ = ["err", "errors_as_lines", "out", "prompt_progress", "warn_in_one_line"]

out = Console(highlight=False, soft_wrap=True)
err = Console(highlight=False, soft_wrap=True, stderr=True)


@contextmanager
def errors_as_lines(*, debug: bool) -> Iterator[None]:
    """Turn any error into one line and exit code 2, and Ctrl-C into exit code 130."""
    try:
        yield
    except KeyboardInterrupt:
        err.out("interrupted", style="yellow")
        sys.exit(130)
    except Exception as error:
        if debug:
            raise
        text = " ".join(str(error).split()) or type(error).__name__
        err.out(f"error: {text}", style="red")
        sys.exit(2)


def warn_in_one_line(message: Warning | str, *_: Any, **__: Any) -> None:
    """Stands in for ``warnings.showwarning``."""
    err.out(f"warning: {' '.join(str(message).split())}", style="yellow")


@contextmanager
def prompt_progress() -> Iterator[OnPrefill]:
    """A bar for reading a long prompt; it shows in a terminal only, and goes when it is done."""
    columns = (
        TextColumn("reading the prompt"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("tokens"),
    )
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as bar:
        task = bar.add_task("", visible=False)

        def show(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total, visible=done < total)

        yield show

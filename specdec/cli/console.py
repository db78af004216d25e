"""What all commands share of the terminal: results on stdout, everything else on stderr."""

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from specdec.prefill import OnPrefill

__all__ = ["err", "errors_as_lines", "out", "prompt_progress", "warn_in_one_line"]

P = ParamSpec("P")

out = Console(highlight=False, soft_wrap=True)
err = Console(highlight=False, soft_wrap=True, stderr=True)


def errors_as_lines(command: Callable[P, None]) -> Callable[P, None]:
    """Turn a command's errors into one line and exit code 2, unless it is given ``debug``."""

    @functools.wraps(command)
    def run(*args: P.args, **options: P.kwargs) -> None:
        try:
            command(*args, **options)
        except KeyboardInterrupt:
            err.out("\ninterrupted", style="yellow")
            sys.exit(130)
        except Exception as error:
            if options.get("debug"):
                raise
            text = " ".join(str(error).split()) or type(error).__name__
            err.out(f"error: {text}", style="red")
            sys.exit(2)

    return run


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
    bar = Progress(*columns, console=err, transient=True, disable=not err.is_terminal)
    task = bar.add_task("")

    def show(done: int, total: int) -> None:
        # A bar that is alive redraws its line, and the text will stand there: it ends before.
        if done < total:
            bar.start()
            bar.update(task, completed=done, total=total)
        else:
            bar.stop()

    try:
        yield show
    finally:
        bar.stop()

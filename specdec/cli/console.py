"""What all commands share of the terminal: results on stdout, everything else on stderr."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn

from specdec.prefill import OnPrefill

__all__ = ["EarlyEnd", "err", "out", "progress_bar", "prompt_progress", "warn_in_one_line"]

out = Console(highlight=False, soft_wrap=True)
err = Console(highlight=False, soft_wrap=True, stderr=True)


class EarlyEnd:
    """Holds back what ends its block early, an error or Ctrl-C, until there is a report.

    Attributes:
        error: What it was; None if nothing was.
    """

    error: BaseException | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> bool:
        self.error = error if isinstance(error, Exception | KeyboardInterrupt) else None
        return self.error is not None

    def reraise(self) -> None:
        """Raise what was held back, if anything was."""
        if self.error is not None:
            raise self.error


def warn_in_one_line(message: Warning | str, *_: Any, **__: Any) -> None:
    """Stands in for ``warnings.showwarning``."""
    err.out(f"warning: {' '.join(str(message).split())}", style="yellow")


def progress_bar(text: str, *unit: ProgressColumn) -> Progress:
    """A bar that shows in a terminal only, and goes when it is done."""
    columns = (TextColumn(text), BarColumn(), MofNCompleteColumn(), *unit)
    return Progress(*columns, console=err, transient=True, disable=not err.is_terminal)


@contextmanager
def prompt_progress() -> Iterator[OnPrefill]:
    """A bar for reading a long prompt."""
    bar = progress_bar("reading the prompt", TextColumn("tokens"))
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

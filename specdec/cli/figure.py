"""The figure of ``specdec bench --plot``."""

from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec.cli.contest import PLAIN, SPECULATIVE, SweepPoint, chances_by_position, seconds_of
from specdec.cli.results import Report
from specdec.errors import MissingRuntimeError
from specdec.stats import Stats

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["check_plot", "draw"]

BLACK, GREY, BLUE, GREEN = "#22303f", "#9aa3b2", "#4c6a92", "#2a9d6f"
ORANGE, RED = "#e9a03b", "#c8553d"
PALE = ("#7fb8a0", "#e2b26a", "#d08c7f", "#9a8fc4", "#7fa8d1", "#b5b36a", "#b8a393")
FEW = 5  # proposals at a position, below which it isn't drawn
COLOURS = {"verify": BLUE, "draft": GREEN, "rollback": ORANGE, "host": RED}


def check_plot(path: Path) -> None:
    """Raise what would go wrong after the measurement.

    Raises:
        MissingRuntimeError: matplotlib isn't installed.
        ValueError: The file can't be written there, or isn't of a kind that it writes.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise MissingRuntimeError(
            f"--plot needs the module {error.name!r}, which isn't installed: install specdec-llm "
            "with its extra [bench]"
        ) from error
    kinds = sorted(Figure().canvas.get_supported_filetypes())
    if path.suffix.lower().removeprefix(".") not in kinds:
        raise ValueError(f"--plot {path}: give a file that ends in .png or another of {kinds}")
    if path.is_dir() or not path.parent.is_dir():
        raise ValueError(f"--plot {path} can't be written: give a file in a folder that is there")
    was_there = path.exists()
    try:
        path.open("ab").close()
    except OSError as error:
        raise ValueError(f"--plot {path} can't be written: {error.strerror}") from error
    if not was_there:
        path.unlink()


def draw(report: Report, sweep: Sequence[SweepPoint], title: str, path: Path) -> None:
    """Write four panels: speed-ups, acceptance, time per round, and what was predicted.

    Args:
        report: With plain and speculative runs.
        sweep: May be empty.
        title: Stands over all.
        path: The file.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    style: dict[Any, Any] = {
        "font.size": 9,
        "text.parse_math": False,  # kinds and paths are plain text
        "axes.titlesize": 10,
        "axes.titleweight": "bold",
        "axes.titlelocation": "left",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.axisbelow": True,
        "legend.frameon": False,
        "svg.fonttype": "none",
    }
    with rc_context(style):
        figure = Figure(figsize=(10, 7), layout="constrained")
        panels = figure.subplots(2, 2)
        draw_speedups(panels[0, 0], report)
        draw_acceptance(panels[0, 1], report)
        draw_time(panels[1, 0], report)
        draw_sweep(panels[1, 1], sweep)
        figure.suptitle(title, fontsize=10)
        figure.savefig(path, dpi=150)


def draw_speedups(axes: "Axes", report: Report) -> None:
    """A bar per kind of prompt and a dot per prompt."""
    kinds = [result for result in report.kinds if PLAIN in result.speedup]
    speedups = [report.speedups(PLAIN, result.kind) for result in kinds]
    speedups.append(report.speedups(PLAIN))
    medians = [result.speedup[PLAIN].median for result in (*kinds, report.total)]
    names = [result.kind for result in (*kinds, report.total)]
    places = range(len(names))  # a kind may be called as another bar is
    colours = [GREEN] * len(kinds) + [BLUE]
    axes.barh(places, medians, tick_label=names, color=colours, alpha=0.75, height=0.65)
    for place, values in enumerate(speedups):
        axes.plot(values, [place] * len(values), "o", color=BLACK, markersize=2.5, alpha=0.6)
        label = f"{medians[place]:.2f}x"
        axes.text(0.02, place, label, va="center", color="white", fontweight="bold", fontsize=8)
    axes.axvline(1.0, color=BLACK, linewidth=0.8, linestyle=":")
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    axes.set_title("Speed-up by kind of prompt")
    axes.set_xlabel("times plain decoding, whole calls (bar: median; dots: prompts)")


def draw_acceptance(axes: "Axes", report: Report) -> None:
    """A line per kind of prompt, and one for all."""
    from matplotlib.ticker import MaxNLocator

    for result, colour in zip(report.kinds, cycle(PALE)):
        chances = often_proposed(report.stats(SPECULATIVE, result.kind))
        if not chances:
            continue
        positions = range(1, len(chances) + 1)
        axes.plot(positions, chances, ".-", color=colour, linewidth=1.0, label=result.kind)
    chances = often_proposed(report.stats(SPECULATIVE))
    if not chances:
        axes.text(0.5, 0.5, "nothing was drafted", transform=axes.transAxes, ha="center")
    positions = range(1, len(chances) + 1)
    axes.plot(positions, chances, "o-", color=BLUE, linewidth=2.2, markersize=4, label="all")
    axes.set_xlim(left=0.7, right=max(1.5, len(chances) + 0.3))
    axes.set_ylim(0, 1.03)
    axes.grid(axis="y", linewidth=0.4)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_title("Acceptance by position")
    axes.set_xlabel("position in the draft")
    axes.set_ylabel("part that stood, of those proposed")
    axes.legend(loc="lower left", ncols=2, fontsize=8)


def often_proposed(stats: Stats) -> list[float]:
    """The chances by position, as far as they are more than an accident."""
    proposed = stats.propose_histogram
    chances = enumerate(chances_by_position(stats), 1)
    return [chance for position, chance in chances if sum(proposed[position:]) >= FEW]


def draw_time(axes: "Axes", report: Report) -> None:
    """A bar for a plain step and one for the rounds of each kind of prompt, part by part."""
    plain = report.stats(PLAIN)
    bars = [("plain step", plain)]
    bars += [(result.kind, report.stats(SPECULATIVE, result.kind)) for result in report.kinds]
    bars.append(("all", report.stats(SPECULATIVE)))
    bars = [(name, stats) for name, stats in bars if stats.target_forward_ct]
    names, places, lefts = [name for name, _ in bars], range(len(bars)), [0.0] * len(bars)
    for part, colour in COLOURS.items():
        widths = [seconds_of(stats, part) * 1e3 / stats.target_forward_ct for _, stats in bars]
        axes.barh(places, widths, 0.65, lefts, tick_label=names, color=colour, label=part)
        lefts = [left + width for left, width in zip(lefts, widths, strict=True)]
    for place, (_, stats) in enumerate(bars):
        brought = stats.completion_tokens / stats.target_forward_ct
        label = f" {brought:.1f} token{'s' * (round(brought, 1) != 1)}"
        axes.text(lefts[place], place, label, va="center", fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.18)
    axes.set_xlim(left=0)
    axes.set_title("Time per round, and what it brings")
    axes.set_xlabel("ms per target forward")
    axes.legend(ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.16), columnspacing=1.0)


def draw_sweep(axes: "Axes", sweep: Sequence[SweepPoint]) -> None:
    """Measured and predicted speed-up by number of drafts."""
    lengths = [point.num_draft_tokens for point in sweep]
    predicted = [point.predicted for point in sweep]
    axes.plot(lengths, predicted, "--", color=GREY, label="predicted from costs and acceptance")
    axes.plot(lengths, [point.measured for point in sweep], "o-", color=GREEN, label="measured")
    axes.axhline(1.0, color=BLACK, linewidth=0.8, linestyle=":")
    axes.set_ylim(0, 1.1 * max([1.0, *predicted, *(point.measured for point in sweep)]))
    axes.set_xticks(lengths)
    axes.grid(axis="y", linewidth=0.4)
    axes.set_title("Fixed numbers of drafts, K")
    axes.set_xlabel("K")
    axes.set_ylabel("speed-up of decoding, without the prompt")
    axes.legend(loc="lower right")

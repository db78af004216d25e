"""``specdec bench``: plain and speculative decoding of varied prompts, in turn."""

import os
import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.progress import TextColumn, TimeRemainingColumn
from rich.table import Table

from specdec.backend import ModelBackend
from specdec.cli.as_json import described, print_json
from specdec.cli.cases import Case, cases_of
from specdec.cli.console import EarlyEnd, err, out, progress_bar
from specdec.cli.contest import (
    PLAIN,
    SPECULATIVE,
    Contestant,
    Run,
    SweepPoint,
    by_decoder,
    by_lengths,
    run_contest,
    sweep_points,
)
from specdec.cli.figure import check_plot, draw
from specdec.cli.models import open_pair
from specdec.cli.options import (
    AsJson,
    Limit,
    MaxNewTokens,
    ModelOptions,
    NumDraftTokens,
    Prompts,
    as_num_draft_tokens,
    command,
)
from specdec.cli.results import Report, Spread
from specdec.composite import CompositeDrafter
from specdec.decoder import SpeculativeDecoder
from specdec.prompts import load_prompts
from specdec.report import counted
from specdec.request import at_least

__all__ = ["bench"]

SWEEP_LENGTHS = (0, 1, 2, 4, 8)
SWEEP_PROMPTS = 6  # for --plot; one of each kind
NO_DRAFT = "--plot shows what a draft brings, and there is none: name a --draft-model"


@command
def bench(
    models: ModelOptions,
    prompts: Prompts = None,
    limit: Limit = None,
    max_new_tokens: MaxNewTokens = 64,
    repeats: Annotated[int, typer.Option(min=1, help="Run everything so many times.")] = 1,
    num_draft_tokens: NumDraftTokens = "auto",
    compare: Annotated[
        Literal["transformers"] | None,
        typer.Option(
            help="Also its own assisted generation, or prompt lookup without an HF draft."
        ),
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the results into this PNG.")] = None,
    as_json: AsJson = False,
) -> None:
    """Measure what a draft brings: plain and speculative decoding of varied prompts, in turn.

    Times are those of whole calls, with the prompt read by all models; each starts with empty
    caches. Ctrl-C reports what was measured so far.
    """
    at_least(1, max_new_tokens=max_new_tokens)
    length = as_num_draft_tokens(num_draft_tokens)
    if plot:
        check_plot(plot)
    if plot and models.draft_model == "none":
        raise ValueError(NO_DRAFT)
    given = load_prompts(prompts)[:limit] if prompts else None
    target, draft = open_pair(models)
    if plot and draft is None:
        raise ValueError(NO_DRAFT)
    cases = cases_of(target, given, limit)
    decoder = SpeculativeDecoder(target, draft, num_draft_tokens=length)
    contestants: dict[str, Contestant] = {}
    if compare:
        contestants |= [rival(target, draft)]
    contestants[PLAIN] = by_decoder(SpeculativeDecoder(target))
    if draft is not None:
        contestants[SPECULATIVE] = by_decoder(decoder)

    runs: list[Run] = []
    points: list[SweepPoint] = []
    with EarlyEnd() as end:  # what was measured by then is worth a report
        count = len(contestants) * len(cases) * repeats
        with bar("measuring", count) as advance:
            for run in run_contest(
                contestants, cases, max_new_tokens=max_new_tokens, repeats=repeats
            ):
                runs.append(run)
                advance()
        if plot:
            points = sweep(decoder, cases, max_new_tokens)
    if not runs:
        end.reraise()
    report = Report(runs, cases, contestants)
    size = f"{counted(len(cases), 'prompt')}, up to {counted(max_new_tokens, 'token')}"
    heading = title(models, target, draft, f"{size}, K = {length}, greedy.")
    if as_json:
        about: dict[str, object] = {
            "machine": machine(),
            **described(target, draft),
            "num_draft_tokens": length,
            "max_new_tokens": max_new_tokens,
            "complete": end.error is None,
        }
        if points:
            about["lengths"] = [asdict(point) for point in points]
        print_json(about | report.as_dict())
    else:
        # What reads a pipe has no width.
        page = Console(highlight=False, width=None if out.is_terminal else 120)
        page.print(heading, style="dim", markup=False)
        page.print(table(report))
        for finding in report.findings():
            page.print(finding, markup=False, soft_wrap=not out.is_terminal)
    if plot and PLAIN in report.total.speedup:
        draw(report, points, heading, plot)
        err.out(f"drawn: {plot}", style="dim")
    end.reraise()


def rival(
    target: ModelBackend, draft: ModelBackend | CompositeDrafter | None
) -> tuple[str, Contestant]:
    """Transformers' own speculation with the same models, and what to call it."""
    from specdec.backends import HFBackend

    if not isinstance(target, HFBackend):
        raise ValueError(
            f"--compare transformers needs a target in transformers, not {type(target).__name__}"
        )
    from specdec_hf.assisted import assisted_generation

    assistant = draft if isinstance(draft, HFBackend) else None
    generate = assisted_generation(target, assistant)
    name = "transformers, assisted" if assistant else "transformers, prompt lookup"
    return name, lambda ids, max_new_tokens: (generate(ids, max_new_tokens), None)


def sweep(
    decoder: SpeculativeDecoder, cases: Sequence[Case], max_new_tokens: int
) -> list[SweepPoint]:
    """What fixed numbers of drafts bring on a prompt of each kind."""
    chosen = list({case.kind: case for case in reversed(cases)}.values())[-SWEEP_PROMPTS:][::-1]
    contestants = by_lengths(decoder, SWEEP_LENGTHS)
    widths = [length + 1 for length in SWEEP_LENGTHS]
    runs: list[Run] = []
    with bar("comparing lengths", len(contestants) * len(chosen)) as advance:
        for run in run_contest(contestants, chosen, max_new_tokens=max_new_tokens):
            runs.append(run)
            if len(runs) % len(contestants) == 0:  # in between, so that both see the same machine
                decoder.calibrate(chosen[len(runs) // len(contestants) - 1].ids, widths=widths)
            advance()
    return sweep_points(runs, decoder.costs)


@contextmanager
def bar(text: str, total: int) -> Iterator[Callable[[], None]]:
    """A progress bar; gives what moves it on by one."""
    with progress_bar(text, TextColumn("runs, left"), TimeRemainingColumn()) as progress:
        task = progress.add_task("", total=total)
        yield lambda: progress.advance(task)


def title(
    models: ModelOptions,
    target: ModelBackend,
    draft: ModelBackend | CompositeDrafter | None,
    measured: str,
) -> str:
    """What was measured, in two lines."""
    embedded = "SmolLM2-135M-Instruct"
    text = f"Target: {spelled(models.target_model or embedded, target)}. Draft: "
    if draft is None:
        return f"{text}none.\n{measured}"
    name = models.draft_model or ("self" if models.target_model else embedded)
    return f"{text}{spelled(name, draft)}.\n{measured}"


def spelled(name: str, backend: ModelBackend | CompositeDrafter) -> str:
    """A model and what it runs on."""
    info = backend.info()
    keys = ("runtime", "dtype", "quantization", "device")
    what = ", ".join(str(info[key]) for key in keys if info.get(key))
    return f"{Path(name).name if Path(name).exists() else name} ({what})"


def table(report: Report) -> Table:
    """A row per kind of prompt, and one for all."""
    rivals = [name for name in report.contestants if name != report.main]
    result = Table("prompts", box=SIMPLE_HEAD, pad_edge=False)
    headers = [f"{name}\nms/token" for name in report.contestants]
    headers += [f"speed-up over\n{name}" for name in rivals]
    if report.main == SPECULATIVE:
        headers += ["accept_\nlength", "accept_\nrate"]
    for header in headers:
        result.add_column(header.replace(", ", ",\n"), justify="right")
    if rivals:
        result.add_column("same\noutput")
    for row in (*report.kinds, report.total):
        cells = [figure(row.ms_per_token.get(name), ".1f") for name in report.contestants]
        cells += [spread(row.speedup.get(name)) for name in rivals]
        if report.main == SPECULATIVE:
            cells += [figure(row.accept_length, ".2f"), figure(row.accept_rate, ".2f")]
        if rivals:
            cells.append("yes" if row.same_output else "no")
        if row is report.total:
            result.add_section()
        result.add_row(escape(row.kind), *cells)
    return result


def figure(value: float | None, form: str) -> str:
    """A number, or a dash where there is none."""
    return "-" if value is None else format(value, form)


def spread(values: Spread | None) -> str:
    """A median with what it lies between."""
    if values is None:
        return "-"
    if values.low == values.high:
        return f"{values.median:.2f}x"
    return f"{values.median:.2f}x ({values.low:.2f}-{values.high:.2f})"


def machine() -> dict[str, object]:
    """What the figures were made on."""
    processor = platform.processor() or platform.machine()
    listing = Path("/proc/cpuinfo")
    if listing.exists():
        lines = listing.read_text(encoding="utf-8").splitlines()
        processor = next((x.partition(": ")[2] for x in lines if x[:10] == "model name"), processor)
    return {
        "processor": processor,
        "cores": os.cpu_count(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "specdec": version("specdec-llm"),
    }

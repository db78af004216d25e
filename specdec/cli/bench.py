"""``specdec bench``: plain and speculative decoding of varied prompts, in turn."""

import json
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
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from specdec.backend import ModelBackend
from specdec.cli.as_json import print_json
from specdec.cli.console import err, errors_as_lines, out
from specdec.cli.contest import (
    PLAIN,
    SPECULATIVE,
    Case,
    Contestant,
    Report,
    Run,
    Spread,
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
    Debug,
    Device,
    DraftModel,
    Dtype,
    GpuLayers,
    MaxNewTokens,
    NumContext,
    NumDraftTokens,
    NumThreads,
    TargetModel,
    TrustRemoteCode,
    as_num_draft_tokens,
    backend_options,
)
from specdec.decoder import SpeculativeDecoder
from specdec.prompts import KindedPrompt, load_prompts, shipped_prompts
from specdec.request import at_least
from specdec.vocab import Vocabulary, encode_prompt

__all__ = ["as_cases", "bench"]

SWEEP_LENGTHS = (0, 1, 2, 4, 8)
SWEEP_PROMPTS = 6  # for --plot; one of each kind


@errors_as_lines
def bench(
    target_model: TargetModel = None,
    draft_model: DraftModel = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            help='A file with a prompt per line, or lines like {"kind": "code", "prompt": "..."}. '
            "Without it 24 prompts of six kinds.",
        ),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Only the first so many prompts.")
    ] = None,
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
    device: Device = None,
    dtype: Dtype = "auto",
    n_gpu_layers: GpuLayers = 0,
    n_ctx: NumContext = None,
    n_threads: NumThreads = None,
    trust_remote_code: TrustRemoteCode = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Measure what a draft brings: plain and speculative decoding of varied prompts, in turn.

    Times are those of whole calls, with the prompt read by all models; each starts with empty
    caches. Ctrl-C reports what was measured so far.
    """
    at_least(1, max_new_tokens=max_new_tokens)
    length = as_num_draft_tokens(num_draft_tokens)
    if plot:
        check_plot(plot)
    wanted = (load_prompts(prompts) if prompts else shipped_prompts())[:limit]
    options = backend_options(
        device=device,
        dtype=dtype,
        trust_remote_code=trust_remote_code,
        n_gpu_layers=n_gpu_layers,
        n_ctx=n_ctx,
        n_threads=n_threads,
    )
    target, draft = open_pair(target_model, draft_model, options)
    if plot and draft is None:
        raise ValueError(
            "--plot shows what a draft brings, and there is none: name a --draft-model"
        )
    cases = as_cases(target, wanted)
    decoder = SpeculativeDecoder(target, draft, num_draft_tokens=length)
    contestants: dict[str, Contestant] = {}
    if compare:
        name, contestant = rival(target, draft)
        contestants[name] = contestant
    contestants[PLAIN] = by_decoder(SpeculativeDecoder(target))
    if draft is not None:
        contestants[SPECULATIVE] = by_decoder(decoder)

    runs: list[Run] = []
    points: list[SweepPoint] = []
    stopped: BaseException | None = None
    try:
        count = len(contestants) * len(cases) * repeats
        with bar("measuring", count) as advance:
            contest = run_contest(
                contestants, cases, max_new_tokens=max_new_tokens, repeats=repeats
            )
            for run in contest:
                runs.append(run)
                advance()
        if plot:
            points = sweep(decoder, cases, max_new_tokens)
    except (Exception, KeyboardInterrupt) as error:  # what was measured is worth a report
        if not runs:
            raise
        stopped = error
    report = Report(runs, cases)
    measured = f"{len(cases)} prompts, up to {max_new_tokens} tokens, K = {length}, greedy."
    heading = title((target_model, draft_model), target, draft, measured)
    if as_json:
        about: dict[str, object] = {
            "machine": machine(),
            "target": dict(target.info()),
            "draft": draft and dict(draft.info()),
            "num_draft_tokens": length,
            "max_new_tokens": max_new_tokens,
            "complete": stopped is None,
        }
        lengths = {"lengths": [asdict(point) for point in points]} if points else {}
        print_json(about | report.as_dict() | lengths)
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
    if stopped is not None:
        raise stopped


def as_cases(target: ModelBackend, prompts: Sequence[KindedPrompt]) -> list[Case]:
    """Prompts as ids, texts by the target's chat template if it has one.

    Those that are longer than the target's context are left out.

    Raises:
        ValueError: None is left, or one can't be encoded.
    """
    cases = [
        Case(
            number,
            kind,
            prompt if isinstance(prompt, str) else json.dumps(prompt),
            ids_of(target.vocab, prompt, number),
        )
        for number, (kind, prompt) in enumerate(prompts, 1)
    ]
    fitting = [case for case in cases if len(case.ids) <= target.max_context]
    limit = f"more tokens than the target's context of {target.max_context}"
    if not fitting:
        raise ValueError(f"all prompts have {limit}: give shorter ones by --prompts")
    if fitting != cases:
        err.out(f"{len(cases) - len(fitting)} prompts left out: {limit}", style="yellow")
    return fitting


def ids_of(vocab: Vocabulary, prompt: object, number: int) -> list[int]:
    """A prompt of a file as ids."""
    if isinstance(prompt, str) and vocab.encode_chat:
        prompt = [{"role": "user", "content": prompt}]
    try:
        return encode_prompt(vocab, prompt)  # type: ignore[arg-type]  # what it is, it finds out
    except (TypeError, ValueError) as error:
        raise ValueError(f"prompt {number}: {error}") from error


def rival(target: ModelBackend, draft: ModelBackend | None) -> tuple[str, Contestant]:
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
    """A progress bar in a terminal; gives what moves it on by one."""
    columns = (
        TextColumn(text),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("runs, left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as progress:
        task = progress.add_task("", total=total)
        yield lambda: progress.advance(task)


def title(
    names: tuple[str | None, str | None],
    target: ModelBackend,
    draft: ModelBackend | None,
    measured: str,
) -> str:
    """What was measured, in two lines."""
    embedded = "SmolLM2-135M-Instruct"
    text = f"Target: {described(names[0] or embedded, target)}. Draft: "
    if draft is None:
        return f"{text}none.\n{measured}"
    name = names[1] or ("self" if names[0] else embedded)
    return f"{text}{described(name, draft)}.\n{measured}"


def described(name: str, backend: ModelBackend) -> str:
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

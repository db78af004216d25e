"""``specdec check``: may a pair work, what does it cost, and when does it pay?"""

import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import cast

from rich.box import SIMPLE
from rich.filesize import decimal
from rich.markup import escape
from rich.table import Table

from specdec.backend import ModelBackend
from specdec.cli.as_json import print_json
from specdec.cli.console import EarlyEnd, err, out
from specdec.cli.models import open_pair
from specdec.cli.options import AsJson, ModelOptions, command
from specdec.named import named_lookups
from specdec.report import ModelFacts, PairCosts, PairReport, counted, examine

__all__ = ["check"]


@command
def check(
    models: ModelOptions,
    as_json: AsJson = False,
) -> None:
    """Say in a few seconds whether a pair works, what it costs, and when it pays.

    Ends with 1 if the pair can't work.
    """
    before = resident_bytes()
    if models.draft_model and named_lookups(models.draft_model)[0]:
        raise ValueError(
            f"specdec check looks at pairs of models, and --draft-model {models.draft_model} looks "
            "the text up as well: name the model alone, or see specdec bench"
        )
    pair = open_pair(models)
    target, draft = cast("tuple[ModelBackend, ModelBackend | None]", pair)
    reports = examine(target, draft)
    report = next(reports)
    with EarlyEnd() as end, err.status("measuring"):  # what was found by then is worth a report
        for report in reports:  # noqa: B007 - the last one counts
            pass
    after = resident_bytes()
    if as_json:
        memory = {"resident_bytes": after, "resident_bytes_before": before}
        more = {"verdict": report.verdict, "interrupted": end.error is not None}
        print_json(asdict(report) | memory | more)
    else:
        show(report)
        if before is not None and after is not None:
            out.out(
                f"memory: the process holds {decimal(after)} of the host's; before the models and "
                f"their runtimes came it was {decimal(before)}"
            )
        for line in report.verdict:
            out.out(line, style="red" if report.problem else "bold")
    end.reraise()
    if report.problem:
        sys.exit(1)


def show(report: PairReport) -> None:
    """Print what was found as tables."""
    models = {"target": report.target, "draft": report.draft}
    known = {name: of_model(facts) for name, facts in models.items() if facts}
    keys = [key for key in known["target"] if any(facts[key] for facts in known.values())]
    print_table(["", *known], [[key, *(facts[key] for facts in known.values())] for key in keys])
    if report.draft is not None and report.vocabularies is not None:
        out.out(f"vocabularies: {report.vocabularies}")
        if report.draft.max_context < report.target.max_context:
            tokens = counted(report.draft.max_context, "token")
            out.out(f"contexts: drafting ends after {tokens} of a text")
    if report.stability:
        rows = [
            [
                f"{one.width}",
                f"{one.difference:.3g} ({one.relative:.2g} of the spread)",
                f"{one.flips} of {one.num_rows}",
            ]
            for one in report.stability
        ]
        print_table(["rows by width", "largest difference", "best token changed"], rows)
    if report.costs is not None:
        print_table(["", "ms", "plain steps"], list(of_costs(report.costs)))
    if report.expectations:
        rows = [
            [f"{100 * one.acceptance:.0f} %", str(one.num_draft_tokens), f"{one.speedup:.2f}x"]
            for one in report.expectations
        ]
        print_table(["acceptance", "best number of drafts", "speed-up"], rows)


def of_model(facts: ModelFacts) -> dict[str, str]:
    """What the first table says of a model."""
    info = facts.info
    size = counted(facts.num_tokens, "token")
    if facts.size > facts.num_tokens:
        size += f", rows padded to {facts.size}"
    named = {key: str(info.get(key) or "") for key in ("runtime", "device", "dtype", "threads")}
    weights = "" if facts.weight_bytes is None else decimal(facts.weight_bytes)
    return named | {
        "vocabulary": size,
        "context": counted(facts.max_context, "token"),
        "weights": weights,
    }


def of_costs(costs: PairCosts) -> Iterator[list[str]]:
    """The lines of the table of costs."""
    parts: dict[str, float | None] = {
        "plain step": costs.plain_ms,
        "draft token": costs.draft_ms,
        **{
            f"check {counted(width - 1, 'draft')}": each
            for width, each in costs.verify_ms.items()
            if width > 1
        },
        "rest of a round": costs.rest_ms,
        "draft reads a prompt's token": costs.read_ms,
    }
    for name, each in parts.items():
        if each is not None:
            yield [name, f"{each:.3g}", f"{each / costs.plain_ms:.2g}"]


def print_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table whose cells are taken as they are."""
    table = Table(box=SIMPLE, show_edge=False, pad_edge=False)
    for number, header in enumerate(headers):
        table.add_column(header, justify="left" if number == 0 else "right")
    for row in rows:
        table.add_row(*map(escape, row))
    out.print(table, soft_wrap=False)
    out.out()


def resident_bytes() -> int | None:
    """What this process holds of the host's memory, where the system tells (Linux)."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except OSError:
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")

"""``specdec batch``: a file of prompts into a file of results, which a killed run goes on from."""

from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any, Literal

import typer
from rich.progress import TextColumn, TimeRemainingColumn

from specdec.cli import on_ray
from specdec.cli.console import err, progress_bar
from specdec.cli.jsonl import Job, Results, pending, results
from specdec.cli.models import open_pair
from specdec.cli.options import (
    MaxNewTokens,
    ModelOptions,
    NumDraftTokens,
    SamplingOptions,
    as_num_draft_tokens,
    command,
)
from specdec.decoder import SpeculativeDecoder
from specdec.report import counted
from specdec.request import at_least

__all__ = ["batch"]


@command
def batch(
    input_path: Annotated[
        Path,
        typer.Option(
            "--input",
            exists=True,
            dir_okay=False,
            help='A JSON object per line: {"prompt": "..."} or {"messages": [...]}, with an id and '
            "options of its own, such as max_new_tokens or temperature, if it needs them.",
        ),
    ],
    output_path: Annotated[
        Path, typer.Option("--output", dir_okay=False, help="Results, a JSON object per line.")
    ],
    models: ModelOptions,
    sampling: SamplingOptions,
    max_new_tokens: MaxNewTokens = 256,
    stop: Annotated[list[str] | None, typer.Option(help="Text that ends an output.")] = None,
    num_draft_tokens: NumDraftTokens = "auto",
    max_batch: Annotated[int, typer.Option(help="The most sequences in one forward.")] = 8,
    engine: Annotated[
        Literal["local", "ray"], typer.Option(help="ray: on the machines of a Ray cluster.")
    ] = "local",
    num_actors: Annotated[
        int, typer.Option(min=1, help="With ray: how many processes, each with its own models.")
    ] = 1,
    cpus_per_actor: Annotated[float, typer.Option(help="With ray: cores of each.")] = 1,
    gpus_per_actor: Annotated[float, typer.Option(help="With ray: GPUs of each.")] = 0,
) -> None:
    """Continue every prompt of a file, many at once.

    Each result is written when it is done, with the number of its line. A run that was stopped, or
    killed, goes on where it was if it is started again. A line that can't be decoded has an error
    for a result, and the run goes on. With a seed, that of a line is the seed plus its number.
    """
    length = as_num_draft_tokens(num_draft_tokens)
    at_least(0, max_new_tokens=max_new_tokens)
    at_least(1, max_batch=max_batch)
    if "" in (stop or ()):
        raise ValueError("--stop is a text of at least one character")
    if not input_path.is_file():
        raise ValueError(f"--input {input_path} is no file: it is read twice, so put it into one")
    if output_path.exists() and output_path.samefile(input_path):
        raise ValueError(f"--input and --output are the same file, {input_path}")
    job = Job(
        f"{models.target_model} {models.dtype} {models.n_ctx}",
        sampling.params,
        {"max_new_tokens": max_new_tokens, "stop": stop or []},
    )
    with Results(output_path) as file:
        total = sum(1 for _ in pending(input_path, job, file.done))
        if not total:
            err.out(f"nothing to do: {output_path} has every result", style="dim")
            return
        if file.done:
            err.out(f"going on behind {counted(len(file.done), 'result')}", style="dim")
        todo = pending(input_path, job, file.done)
        load = partial(new_decoder, models, length)
        if engine == "ray":
            records = on_ray.results(
                todo,
                job,
                load,
                max_batch=max_batch,
                num_actors=num_actors,
                num_cpus=cpus_per_actor,
                num_gpus=gpus_per_actor,
            )
        else:
            records = results(load(), todo, job, max_batch=max_batch)
        write(records, file, total)


def new_decoder(
    models: ModelOptions, num_draft_tokens: int | Literal["auto"]
) -> SpeculativeDecoder:
    """Load a pair; prompts of a file have no beginnings in common worth keeping."""
    return SpeculativeDecoder(*open_pair(models), num_draft_tokens=num_draft_tokens, keep_caches=0)


def write(records: Iterable[Mapping[str, Any]], file: Results, total: int) -> None:
    """Write records as they come, under a bar, and say what came of all."""
    tally = Tally()
    bar = progress_bar("decoding", TimeRemainingColumn(), TextColumn("{task.description}"))
    with bar:
        task = bar.add_task("", total=total)
        try:
            for record in records:
                file.add(record)
                tally.count(record)
                bar.update(task, advance=1, description=str(tally))
        except KeyboardInterrupt:
            err.out(f"{tally}; run it again to go on", style="yellow")
            raise
    err.out(str(tally), style="dim")


class Tally:
    """What a run has done so far."""

    def __init__(self) -> None:
        self.started = perf_counter()
        self.results = self.failed = self.tokens = self.proposed = self.correct = 0

    def count(self, record: Mapping[str, Any]) -> None:
        """Enter a record."""
        stats = record["stats"]
        self.results += 1
        self.failed += "error" in record
        self.tokens += stats["completion_tokens"]
        self.proposed += stats["num_proposed_drafts"]
        self.correct += stats["num_correct_drafts"]

    def __str__(self) -> str:
        seconds = perf_counter() - self.started
        parts = [counted(self.results, "result"), f"tokens/s {self.tokens / seconds:.1f}"]
        if self.failed:
            parts.insert(1, f"errors {self.failed}")
        if self.proposed:
            parts.append(f"accept_rate {self.correct / self.proposed:.2f}")
        return " | ".join(parts)

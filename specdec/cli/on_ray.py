"""The same job on Ray Data: a decoder in every actor, on as many machines as the cluster has."""

import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from specdec.cli import jsonl
from specdec.cli.jsonl import Job, Line
from specdec.decoder import SpeculativeDecoder
from specdec.errors import MissingRuntimeError

__all__ = ["results"]

PER_CALL = 4  # batches of lines: more wait longer for the last, fewer lose less with an actor


class Worker:
    """A decoder in an actor of Ray."""

    def __init__(self, load: Callable[[], SpeculativeDecoder], job: Job, max_batch: int) -> None:
        self.decoder = load()
        self.job = job
        self.max_batch = max_batch

    def __call__(self, lines: Mapping[str, Any]) -> dict[str, list[str]]:
        """Decode some lines."""
        pairs = zip(lines["number"], lines["text"], strict=True)
        todo = [Line(int(number), bytes(text)) for number, text in pairs]
        records = jsonl.results(self.decoder, todo, self.job, max_batch=self.max_batch)
        return {"record": [json.dumps(record) for record in records]}


def results(
    lines: Iterable[Line],
    job: Job,
    load: Callable[[], SpeculativeDecoder],
    *,
    max_batch: int,
    num_actors: int,
    num_cpus: float,
    num_gpus: float,
) -> Iterator[dict[str, Any]]:
    """As ``specdec.cli.jsonl.results``, by actors; Ray starts those that die again.

    Args:
        lines: What to decode.
        job: What they are decoded with.
        load: Loads the models, in every actor; their files must be on every machine.
        max_batch: The most sequences in one forward.
        num_actors: How many.
        num_cpus: Cores of each.
        num_gpus: GPUs of each.

    Raises:
        MissingRuntimeError: Ray isn't installed.
        RuntimeError: An actor failed as Ray can't mend, over a model that isn't there, say.
    """
    try:
        import ray
        import ray.data
    except ImportError as error:
        raise MissingRuntimeError(
            "--engine ray needs Ray: pip install 'specdec-llm[ray]'"
        ) from error
    if not ray.is_initialized():
        spin = os.environ.get("GOMP_SPINCOUNT", "1000")
        ray.init(runtime_env={"env_vars": {"GOMP_SPINCOUNT": spin}}, logging_level=logging.ERROR)
    logging.getLogger("ray.data").setLevel(logging.ERROR)  # the bar shows how it goes
    ray.data.DataContext.get_current().enable_progress_bars = False
    rows = [line._asdict() for line in lines]
    data = ray.data.from_items(rows).map_batches(
        Worker,
        fn_constructor_args=(load, job, max_batch),
        batch_size=min(PER_CALL * max_batch, -(-len(rows) // num_actors)),
        compute=ray.data.ActorPoolStrategy(size=num_actors),
        num_cpus=num_cpus,
        num_gpus=num_gpus,
    )
    try:
        for row in data.iter_rows():
            yield json.loads(row["record"])
    except ray.exceptions.RayError as error:
        *_, last = str(error).strip().splitlines() or [type(error).__name__]
        raise RuntimeError(f"an actor failed: {last}") from error

"""A file of prompts and the file of their results, which a killed run can be resumed from."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self, cast, get_type_hints

from specdec.cli.as_json import plain
from specdec.decoder import SpeculativeDecoder
from specdec.request import BatchItem, BatchOptions, GenerationResult
from specdec.sampling import SamplingParams
from specdec.vocab import Prompt

try:
    import fcntl
except ImportError:  # on Windows two runs on one file aren't told apart
    fcntl = None  # type: ignore[assignment]

__all__ = ["Job", "Line", "Results", "pending", "results"]

SAMPLING = tuple(each.name for each in fields(SamplingParams) if each.name != "processors")
OPTIONS = tuple(get_type_hints(BatchOptions))
BEGINNING = b'{"line": '  # of every record
MOST = 500  # characters of an error
KNOWN = ("id", "prompt", "messages", *OPTIONS, *SAMPLING)


@dataclass(frozen=True, slots=True)
class Job:
    """What holds for every line that doesn't say otherwise.

    Attributes:
        target: The name of the target model.
        sampling: How to choose tokens. With a seed, that of a line is the seed plus its number.
        options: Such as ``max_new_tokens``.
    """

    target: str
    sampling: SamplingParams
    options: BatchOptions

    def key(self, text: bytes) -> str:
        """What tells the results of a line from those of another, or of another job."""
        settings = repr((self.target, self.sampling, sorted(self.options.items())))
        return hashlib.sha256(settings.encode() + b"\n" + text).hexdigest()[:16]


class Line(NamedTuple):
    """A line of the input: its number, from 1 on, and its JSON."""

    number: int
    text: bytes


def lines(path: Path) -> Iterator[Line]:
    """All lines that aren't blank."""
    with path.open("rb") as file:
        for number, text in enumerate(file, start=1):
            text = text.removeprefix(b"\xef\xbb\xbf").strip()
            if text:
                yield Line(number, text)


def pending(path: Path, job: Job, done: Mapping[int, str]) -> Iterator[Line]:
    """The lines that have no result yet.

    Args:
        path: The input.
        job: What they are decoded with.
        done: The keys of the results that are there, by the number of their line.

    Raises:
        ValueError: A result that is there belongs to another input, or another job.
    """
    left = dict(done)
    for line in lines(path):
        key = left.pop(line.number, None)
        if key is None:
            yield line
        elif key != job.key(line.text):
            raise ValueError(
                f"there is a result for line {line.number}, but of another text or with other "
                "options: give the same input and options again, or another output"
            )
    if left:
        raise ValueError(
            f"there is a result for line {min(left)}, which {path} doesn't have: "
            "give the same input again, or another output"
        )


def results(
    decoder: SpeculativeDecoder, lines: Iterable[Line], job: Job, *, max_batch: int
) -> Iterator[dict[str, Any]]:
    """Decode lines; yields one record for each, as they are done.

    A record has the number of its ``line``, its ``key``, the ``id`` that the line gave itself, and
    the fields of a ``GenerationResult``; where something was wrong, the ``error`` in words.
    """
    taken: dict[int, tuple[Line, dict[str, Any], Exception | None]] = {}

    def items() -> Iterator[BatchItem]:
        for number, line in enumerate(lines):
            given: dict[str, Any] = {}
            item, wrong = BatchItem(cast("Prompt", None)), None  # which can't be decoded either
            try:
                given = parsed(line.text)
                item = as_item(given, line.number, job)
            except (ValueError, TypeError, RecursionError) as error:
                wrong = error
            taken[number] = line, given, wrong
            yield item

    for number, result in decoder.as_completed(items(), max_batch=max_batch, **job.options):
        line, given, wrong = taken.pop(number)
        yield record(line, given, replace(result, error=wrong or result.error), job)


def parsed(text: bytes) -> dict[str, Any]:
    """The JSON object of a line."""
    try:
        given = json.loads(text)
    except ValueError as error:
        raise ValueError(f"it is no JSON: {error}") from error
    if not isinstance(given, dict):
        raise ValueError(f"a line is a JSON object, not {type(given).__name__}")
    if isinstance(given.get("id"), list | dict):
        raise TypeError(f"an id is a text or a number, not {type(given.pop('id')).__name__}")
    return given


def as_item(given: Mapping[str, Any], number: int, job: Job) -> BatchItem:
    """What a line asks for.

    Raises:
        ValueError, TypeError: It has a field that isn't known, or that has a wrong value.
    """
    if unknown := [name for name in given if name not in KNOWN]:
        raise ValueError(f"there is no field {unknown[0]!r}; there are {', '.join(KNOWN)}")
    if ("prompt" in given) == ("messages" in given):
        raise ValueError("a line has a prompt or messages, and not both")
    messages = given.get("messages", [{}])
    if not isinstance(messages, list) or not messages or not isinstance(messages[0], dict):
        raise TypeError('messages are a list such as [{"role": "user", "content": "..."}]')
    mine = {name: given[name] for name in SAMPLING if name in given}
    if "logit_bias" in mine and isinstance(mine["logit_bias"], dict):
        mine["logit_bias"] = {int(token): bias for token, bias in mine["logit_bias"].items()}
    if mine.get("seed") is None and job.sampling.seed is not None:
        mine["seed"] = job.sampling.seed + number
    options = {name: given[name] for name in OPTIONS if name in given}
    prompt = given["prompt"] if "prompt" in given else given["messages"]
    return BatchItem(prompt, sampling=replace(job.sampling, **mine), **options)


def record(
    line: Line, given: Mapping[str, Any], result: GenerationResult, job: Job
) -> dict[str, Any]:
    """What is written about a line."""
    head: dict[str, Any] = {"line": line.number, "key": job.key(line.text)}
    if "id" in given:
        head["id"] = given["id"]
    if result.error is not None:
        words = " ".join(str(result.error).split())[:MOST] or type(result.error).__name__
        head["error"] = f"line {line.number}: {words}"
    body: dict[str, Any] = {
        "text": result.text,
        "token_ids": result.token_ids,
        "finish_reason": result.finish_reason,
        "seed": result.seed,
    }
    if result.logprobs is not None:
        body["logprobs"] = [asdict(each) for each in result.logprobs]
    written: dict[str, Any] = plain(head | body | {"stats": result.stats.as_dict()})
    return written


class Results:
    """The file of results: one JSON object per line, each written at once.

    What a killed run has left of a last line is cut off. Close it, or use it in a ``with``.

    Args:
        path: Where it is, or is to be.

    Attributes:
        done: The keys of the results that are there, by the number of their line.

    Raises:
        ValueError: It holds something else than results.
        RuntimeError: Another run is writing it.
        OSError: It can't be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.done: dict[int, str] = {}
        self._whole: int | None = None  # bytes that are whole records, until the first is added
        self._file = path.open("a+b")
        try:
            self._lock()
            self._read()
        except BaseException:
            self._file.close()
            raise

    def _lock(self) -> None:
        if fcntl is not None:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise RuntimeError(
                    f"another run is writing {self.path}: wait for it, or give another output"
                ) from None

    def _read(self) -> None:
        self._file.seek(0)
        whole = 0
        for number, text in enumerate(self._file, start=1):
            if not text.endswith(b"\n") and text.startswith(BEGINNING[: len(text)]):
                break  # as a killed run left it
            with suppress(ValueError, TypeError, KeyError):
                found = json.loads(text)
                self.done[int(found["line"])] = str(found["key"])
                whole += len(text)
                continue
            raise ValueError(
                f"line {number} of {self.path} is no result of such a run: give another output"
            )
        self._whole = whole

    def add(self, record: Mapping[str, Any]) -> None:
        """Write one record."""
        if self._whole is not None:
            self._file.truncate(self._whole)
            self._whole = None
        self._file.write(json.dumps(record).encode() + b"\n")
        self._file.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _: TracebackType | None,
    ) -> None:
        self._file.close()

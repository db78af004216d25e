"""Several threads on one decoder and on one backend, and many calls in a row."""

import gc
import tracemalloc
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, Event, Lock
from time import sleep
from typing import Any

import pytest
from typing_extensions import override

from specdec import ModelBackend, SpeculativeDecoder, backends
from specdec.backend import Logits, Span
from specdec.testing import TableBackend

PROMPTS = [[n % 5 + 1, n % 3 + 1, 2] for n in range(8)]


def texts(decoder: SpeculativeDecoder, prompts: list[list[int]]) -> list[list[int]]:
    return [decoder.generate(prompt, max_new_tokens=24).token_ids for prompt in prompts]


@pytest.fixture(params=["table", "hf", "llama_cpp"])
def backend(request: pytest.FixtureRequest, tiny_llama: Any) -> ModelBackend:
    if request.param == "table":
        return TableBackend.random(9, seed=3, max_context=256)
    if request.param == "hf":
        return backends.HFBackend(tiny_llama.folder)
    return backends.LlamaCppBackend(tiny_llama.gguf, n_threads=1)


class OneAtATime(TableBackend):
    """Says so where a second thread comes in."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.inside = Lock()

    @override
    def forward(self, batch: Sequence[Span]) -> list[Logits]:
        assert self.inside.acquire(blocking=False), "two threads in one backend"
        try:
            sleep(0.0005)
            return super().forward(batch)
        finally:
            self.inside.release()


def test_threads_take_turns_on_one_decoder() -> None:
    target = OneAtATime(TableBackend.random(9, seed=3).table)
    decoder = SpeculativeDecoder(target, target, num_draft_tokens=3)
    expected = texts(SpeculativeDecoder(target, keep_caches=0), PROMPTS)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda prompt: texts(decoder, [prompt])[0], PROMPTS))
    assert found == expected


def test_decoders_in_threads_share_a_backend(backend: ModelBackend) -> None:
    expected = texts(SpeculativeDecoder(backend, keep_caches=0), PROMPTS)
    start = Barrier(4)

    def decode(number: int) -> list[list[int]]:
        decoder = SpeculativeDecoder(backend, backend, num_draft_tokens=number)
        start.wait()
        return texts(decoder, PROMPTS)

    with ThreadPoolExecutor(4) as pool:
        assert all(found == expected for found in pool.map(decode, range(4)))


def test_a_stream_that_waits_holds_nobody_up() -> None:
    target = TableBackend.random(9, seed=3)
    decoder = SpeculativeDecoder(target, target, num_draft_tokens=3)
    expected = texts(decoder, PROMPTS[:1])[0]
    read_on = Event()

    def slowly() -> list[int]:
        stream = decoder.stream(PROMPTS[0], max_new_tokens=24)
        first = next(stream).token_id
        assert read_on.wait(20)
        return [first, *(event.token_id for event in stream)]

    with ThreadPoolExecutor(2) as pool:
        slow = pool.submit(slowly)
        assert texts(decoder, PROMPTS[:1])[0] == expected
        read_on.set()
        assert slow.result(20) == expected


def test_two_hundred_calls_dont_grow_memory() -> None:
    target = TableBackend.random(9, seed=3)
    decoder = SpeculativeDecoder(target, target.sibling(0.3))

    def decode(count: int) -> int:
        for number in range(count):
            decoder.generate([number % 7, 1, 2], max_new_tokens=12)
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        before = decode(40)
        assert decode(200) - before < 50_000
    finally:
        tracemalloc.stop()

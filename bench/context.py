"""What a step costs behind long texts: time, and memory allocated, by kind of cache.

A tiny Llama, whose own work is small, so that what is done with the past shows. A cache that copies
itself at each step allocates all of its past each time.
"""

import argparse
import os
import statistics
from collections.abc import Callable
from time import perf_counter

os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import torch
from embedded import machine
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch.profiler import ProfilerActivity, profile
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from specdec.backend import Span
from specdec.backends import HFBackend
from specdec.prefill import prefill
from specdec.vocab import Vocabulary

IDS = 64


def model(max_context: int) -> LlamaForCausalLM:
    """Two layers with 4 MB of keys and values per 1,000 tokens."""
    config = LlamaConfig(
        vocab_size=IDS,
        hidden_size=256,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=max_context,
    )
    return LlamaForCausalLM(config).eval()


def ours(backend: HFBackend, length: int) -> Callable[[], object]:
    """One step of a backend behind a text."""
    cache = backend.new_cache()
    prefill(backend.forward, cache, [i % IDS for i in range(length)])
    return lambda: backend.forward([Span(cache, [1], 1)])


def theirs(llama: LlamaForCausalLM, length: int) -> Callable[[], object]:
    """The same by transformers alone."""
    cache = DynamicCache(config=llama.config)

    def feed(ids: list[int]) -> object:
        with torch.inference_mode():
            return llama(torch.tensor([ids]), past_key_values=cache, logits_to_keep=1)

    for start in range(0, length, 512):
        feed([i % IDS for i in range(start, min(start + 512, length))])
    return lambda: feed([1])


def allocated(step: Callable[[], object]) -> int:
    """Bytes that a step asks for."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        step()
    return sum(max(0, event.self_cpu_memory_usage) for event in profiled.key_averages())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", nargs="+", type=int, default=[1000, 4000, 16000])
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    llama = model(2 * max(options.lengths))
    vocab = Vocabulary(IDS, [bytes([65 + i]) for i in range(IDS)], frozenset())
    kinds = {
        f"HFBackend(cache={kind!r})": HFBackend(model=llama, vocab=vocab, cache=kind)
        for kind in ("packed", "dynamic", "static")
    }
    table = Table("a step with", *(f"{length} tokens" for length in options.lengths))
    for name in track([*kinds, "transformers' DynamicCache"], description="measuring"):
        cells = []
        for length in options.lengths:
            step = ours(kinds[name], length) if name in kinds else theirs(llama, length)
            for _ in range(3):
                step()
            seconds = []
            for _ in range(options.steps):
                started = perf_counter()
                step()
                seconds.append(perf_counter() - started)
            cells.append(
                f"{1e3 * statistics.median(seconds):.2f} ms, {allocated(step) / 1e6:.2f} MB"
            )
        table.add_row(name, *cells)
    console = Console()
    console.width = max(110, console.width)
    console.print(f"{machine()}; median of {options.steps} steps, and memory allocated by one")
    console.print(table)


if __name__ == "__main__":
    main()

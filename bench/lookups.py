"""Lookups on texts that repeat their input: summaries with quotes, edits of code, extraction.

First what a lookup itself takes in a text of 100,000 ids; then tokens per target forward of
``suffix`` and ``lookup`` beside transformers' prompt lookup; then whole calls of ``suffix`` with a
draft model beside the model alone. All contestants decode the same prompts in one process, in
rotating order, and must put out the same ids.
"""

import argparse
import os
import statistics
import tracemalloc
from collections.abc import Callable
from time import perf_counter

os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import numpy as np
from embedded import machine
from rich.console import Console
from rich.progress import track
from rich.table import Table

from specdec import (
    Drafter,
    DraftRequest,
    PromptLookupDrafter,
    SamplingParams,
    SpeculativeDecoder,
    SuffixDrafter,
)
from specdec.backends import HFBackend, LlamaCppBackend
from specdec.embedded import embedded_gguf
from specdec.sampling import Sampler
from specdec.vocab import Vocabulary, encode_prompt
from specdec_hf.assisted import assisted_generation

BRIDGE = (
    "The old stone bridge at Harrow Mill was closed on Monday after engineers found a crack in its "
    "second arch. The council said that the bridge would stay closed for at least six weeks while "
    "divers inspect the foundations. Lorries will be sent round by the coast road, which adds "
    "twenty minutes to the trip. Shop owners in the village fear for their trade. 'We lived "
    "through the flood of 1998, and we will live through this,' said Mary Oldfield, the baker."
)
STACK = """class Stack:
    def __init__(self):
        self.items = []

    def push(self, item):
        self.items.append(item)

    def pop(self):
        if not self.items:
            raise IndexError("pop from an empty stack")
        return self.items.pop()

    def peek(self):
        if not self.items:
            raise IndexError("peek at an empty stack")
        return self.items[-1]
"""
MAIN = """def read_numbers(path):
    numbers = []
    with open(path) as file:
        for line in file:
            line = line.strip()
            if line:
                numbers.append(float(line))
    return numbers

def mean(numbers):
    total = 0
    for number in numbers:
        total = total + number
    return total / len(numbers)
"""
ORDERS = (
    "Order 1041: Ada Smith, 3 lamps, 45.00 EUR, shipped on 3 March. "
    "Order 1042: Brian Jones, 1 desk, 210.00 EUR, shipped on 5 March. "
    "Order 1043: Carla Gomez, 6 chairs, 330.00 EUR, not shipped. "
    "Order 1044: David Okafor, 2 shelves, 98.50 EUR, shipped on 9 March."
)
PROMPTS = (
    f"Summarise this article in four sentences and quote it word for word where you can:\n{BRIDGE}",
    f"List the three most important sentences of this text, word for word:\n{BRIDGE}",
    f"Add a method called size to this class and print the whole class again:\n{STACK}",
    f"Rename total to result in this code and print all of it again:\n{MAIN}",
    f"Write these orders as a list, one order per line, with all details:\n{ORDERS}",
    f"Copy the orders that were shipped, word for word:\n{ORDERS}",
)
ROUND = 3  # ids that a round brings, for the times of a lookup alone


def lookup_costs(drafter: Drafter, ids: list[int], num_rounds: int) -> tuple[float, float, float]:
    """Seconds to read all but the last ids, bytes for each, and microseconds of a median round."""
    text = ids[: len(ids) - ROUND * num_rounds]
    tracemalloc.start()
    state = drafter.open(text)
    drafter.catch_up(state, text)
    taken = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    drafter.close(state)
    state, start = drafter.open(text), perf_counter()
    drafter.catch_up(state, text)
    reading = perf_counter() - start
    sampler = Sampler(SamplingParams(), Vocabulary(1, [b""], frozenset()), 0)
    rounds = []
    for begin in range(len(text), len(ids), ROUND):
        text.extend(ids[begin : begin + ROUND])
        start = perf_counter()
        drafter.propose([DraftRequest(state, text, 10, sampler)])
        drafter.commit(state, text)
        rounds.append(perf_counter() - start)
    return reading, taken / len(text), statistics.median(rounds) * 1e6


def a_text(target: HFBackend, length: int) -> list[int]:
    """Ids of the prompts' words in changing order, with passages that come again."""
    rng, words = np.random.default_rng(0), " ".join(PROMPTS).split(" ")
    ids: list[int] = []
    while len(ids) < length:
        if ids and rng.random() < 0.3:
            start = int(rng.integers(len(ids)))
            ids += ids[start : start + int(rng.integers(3, 60))]
        else:
            some = rng.choice(words, int(rng.integers(5, 50)))
            ids += encode_prompt(target.vocab, " " + " ".join(map(str, some)))
    return ids[:length]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--context", type=int, default=100_000)
    parser.add_argument("--prompts", type=int, default=len(PROMPTS))
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=1)
    options = parser.parse_args()
    console = Console()
    console.width = max(100, console.width)

    target, draft = HFBackend(embedded_gguf(), dtype="float32"), LlamaCppBackend(embedded_gguf())
    ids = a_text(target, options.context + 1000 * ROUND)
    table = Table(
        *("", "reading, s", "bytes per id", "us per round"),
        title=f"a lookup alone, {options.context} ids\n{machine()}",
    )
    for name, drafter in (("lookup", PromptLookupDrafter()), ("suffix", SuffixDrafter())):
        reading, size, round_us = lookup_costs(drafter, ids, 1000)
        table.add_row(name, f"{reading:.2f}", f"{size:.0f}", f"{round_us:.0f}")
    console.print(table)

    decoders = {
        "plain": SpeculativeDecoder(target, keep_caches=0),
        "lookup, K = 10": SpeculativeDecoder(
            target, PromptLookupDrafter(), num_draft_tokens=10, keep_caches=0
        ),
        "suffix, K = 10": SpeculativeDecoder(
            target, SuffixDrafter(), num_draft_tokens=10, keep_caches=0
        ),
        "lookup": SpeculativeDecoder(target, PromptLookupDrafter(), keep_caches=0),
        "suffix": SpeculativeDecoder(target, SuffixDrafter(), keep_caches=0),
        "draft": SpeculativeDecoder(target, draft, keep_caches=0),
        "suffix + draft": SpeculativeDecoder(target, [SuffixDrafter(), draft], keep_caches=0),
    }
    forwards = dict.fromkeys(["transformers' lookup", *decoders], 0)
    generate = assisted_generation(target, None)

    def by_transformers(prompt: list[int]) -> list[int]:
        count = 0

        def counted(*_: object) -> None:
            nonlocal count
            count += 1

        handle = target.model.register_forward_pre_hook(counted)
        try:
            return generate(prompt, options.max_new_tokens)
        finally:
            handle.remove()
            forwards["transformers' lookup"] += count

    def by_decoder(name: str) -> Callable[[list[int]], list[int]]:
        def decode(prompt: list[int]) -> list[int]:
            result = decoders[name].generate(prompt, max_new_tokens=options.max_new_tokens)
            forwards[name] += result.stats.target_forward_ct
            return result.token_ids

        return decode

    contestants: dict[str, Callable[[list[int]], list[int]]]
    contestants = {"transformers' lookup": by_transformers}
    contestants |= {name: by_decoder(name) for name in decoders}
    prompts = [
        encode_prompt(target.vocab, [{"role": "user", "content": prompt}])
        for prompt in PROMPTS[: options.prompts]
    ]
    for decoder in decoders.values():  # first calls allocate, calibrate and choose kernels
        decoder.generate(prompts[0], max_new_tokens=32)
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    names, texts, num_tokens = list(contestants), dict[int, list[int]](), 0
    for run in track(range(options.repeats * len(prompts)), description="measuring"):
        number = run % len(prompts)
        for name in names[run % len(names) :] + names[: run % len(names)]:
            start = perf_counter()
            new = contestants[name](prompts[number])
            seconds[name].append(perf_counter() - start)
            if texts.setdefault(number, new) != new:
                raise SystemExit(f"{name} puts out another text for prompt {number}")
        num_tokens += len(texts[number])
    table = Table(
        *(
            "",
            "s in all",
            "tokens per forward",
            "speed-up, all",
            "worst",
            "over draft, all",
            "worst",
        ),
        title="SmolLM2-135M fp32 in torch; draft: its Q4_1 in llama.cpp; "
        f"{len(prompts)} prompts, up to {options.max_new_tokens} tokens, whole calls",
    )
    for name, mine in seconds.items():
        row = [name, f"{sum(mine):.1f}", f"{num_tokens / forwards[name]:.2f}"]
        for rival in ("plain", "draft"):
            worst = min(other / own for other, own in zip(seconds[rival], mine, strict=True))
            row += [f"{sum(seconds[rival]) / sum(mine):.2f}x", f"{worst:.2f}x"]
        table.add_row(*row)
    console.print(table)


if __name__ == "__main__":
    main()

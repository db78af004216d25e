"""A whole backend of one's own: a bigram model of words, counted from a text."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from specdec import Logits, Span, SpeculativeDecoder, Vocabulary
from specdec.backend import check_crop, check_forward


class BigramCache(list[int]):
    """The ids so far; all that this model has to remember."""

    def close(self) -> None:
        self.clear()


class BigramBackend:
    max_context = 4096

    def __init__(self, corpus: str) -> None:
        words = corpus.split()
        known = sorted(set(words))
        ids = [known.index(word) for word in words]
        counts = np.zeros((len(known), len(known)), np.float32)
        np.add.at(counts, (ids[:-1], ids[1:]), 1)
        self.scores = np.log(counts + 0.01)
        self.vocab = Vocabulary(
            size=len(known),
            tokens=[f" {word}".encode() for word in known],
            eos_ids=frozenset({known.index(".")}),
            encode=lambda text: [known.index(word) for word in text.split()],
        )

    def new_cache(self) -> BigramCache:
        return BigramCache()

    def forward(self, batch: Sequence[Span]) -> list[Logits]:
        check_forward(self, batch)  # C4: refuse before anything changes
        for span in batch:
            span.cache.extend(span.tokens)
        return [self.scores[span.cache[len(span.cache) - span.num_logits :]] for span in batch]

    def crop(self, cache: Any, length: int) -> None:
        check_crop(cache, length)
        del cache[length:]

    def info(self) -> Mapping[str, object]:
        return {"runtime": "bigram", "device": "cpu"}


def main() -> None:
    corpus = "the cat sat on the mat and the cat saw the rat and the rat ran to the cat ."
    target, draft = BigramBackend(corpus), BigramBackend(corpus + " on the rat" * 4)
    result = SpeculativeDecoder(target, draft).generate("the rat ran", max_new_tokens=12)
    print(result.text, result.stats.accept_rate)


if __name__ == "__main__":
    main()

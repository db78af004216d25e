"""Host time of the loop itself, on the reference backend: a round less its backend calls."""

from time import perf_counter
from typing import Any

from specdec import SpeculativeDecoder
from specdec.testing import TableBackend


class Timed(TableBackend):
    """Adds up the time spent inside the backend."""

    seconds = 0.0

    def forward(self, batch: Any) -> Any:
        start = perf_counter()
        rows = super().forward(batch)
        self.seconds += perf_counter() - start
        return rows

    def crop(self, cache: Any, length: int) -> None:
        start = perf_counter()
        super().crop(cache, length)
        self.seconds += perf_counter() - start


def main() -> None:
    for batch in (1, 8):
        figures = []
        for _ in range(15):
            model = Timed.random(16, seed=1)
            decoder = SpeculativeDecoder(model, model, num_draft_tokens=4)
            start = perf_counter()
            results = decoder.generate_batch([[1, 2]] * batch, max_new_tokens=2000)
            seconds = perf_counter() - start - model.seconds
            figures.append(seconds / sum(result.stats.verify_ct for result in results))
        best = min(figures) * 1e6
        print(f"batch {batch}, K = 4: {best:.1f} us per sequence and round (least of 15)")


if __name__ == "__main__":
    main()

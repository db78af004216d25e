"""A drafter of one's own: proposes what followed the last two ids when they came before."""

from collections.abc import Sequence

from specdec import Draft, Drafter, DraftRequest, SpeculativeDecoder
from specdec.testing import TableBackend


class BigramLookup(Drafter):
    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        return [Draft(self.after(request.ids, request.num_tokens)) for request in requests]

    def after(self, ids: Sequence[int], num_tokens: int) -> Sequence[int]:
        for start in range(len(ids) - 3, -1, -1):
            if list(ids[start : start + 2]) == list(ids[-2:]):
                return ids[start + 2 : start + 2 + num_tokens]
        return []


def main() -> None:
    decoder = SpeculativeDecoder(TableBackend.random(8, seed=1), BigramLookup())
    result = decoder.generate("cab", max_new_tokens=60)
    print(result.text, result.stats.accept_rate)


if __name__ == "__main__":
    main()

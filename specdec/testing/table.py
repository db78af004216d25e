"""The reference backend: a language model that is a table."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Self

import numpy as np
from numpy.typing import NDArray

from specdec.backend import Cache, Span, check_crop, check_forward
from specdec.errors import RuntimeFailure
from specdec.vocab import Vocabulary

__all__ = ["TableBackend", "VirtualClock"]

LETTERS = b"abcdefghijklmnopqrstuvwxyz"


class VirtualClock:
    """A clock that moves when it is told to.

    Attributes:
        seconds: The time.
    """

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        """Now."""
        return self.seconds


class TableCache:
    """A cache that is just the ids, so that a wrong rollback shows in the very next row."""

    def __init__(self, owner: "TableBackend") -> None:
        self.ids: list[int] = []
        self.closed = False
        self.owner = owner
        owner.open_caches += 1

    def __len__(self) -> int:
        return len(self.ids)

    def close(self) -> None:
        """Give the memory back."""
        if not self.closed:
            self.closed = True
            self.owner.open_caches -= 1


class TableBackend:
    """A model whose next-token logits are a table over the last two ids.

    It obeys every clause exactly, and counts what it is made to do.

    Args:
        table: ``(n, n, size)`` logits: ``table[i, j]`` scores the token after ``..., i, j``, and
            ``table[j, j]`` the one after a lone ``j``. Columns past ``n`` are padding.
        tokens: What the ids spell; letters by default.
        eos_ids: The ids that end a text.
        bos_id: The id that starts one.
        max_context: The most tokens of one cache.
        fail_at: Raise at this call of ``new_cache``, ``forward`` or ``crop``, counted from 0.
        fault: What to raise there; a ``RuntimeFailure`` by default.
        clock: A clock to move on, for a decoder that is given the same.
        cost: The seconds that a forward over so many tokens takes by that clock.

    Attributes:
        fed_ct: Ids fed.
        forward_ct: Forwards.
        row_ct: Rows returned.
        call_ct: Calls of ``new_cache``, ``forward`` and ``crop``.
        open_caches: Caches made and not closed.
    """

    def __init__(
        self,
        table: NDArray[np.floating],
        *,
        tokens: Sequence[bytes | None] | None = None,
        eos_ids: Collection[int] = (),
        bos_id: int | None = None,
        max_context: int = 4096,
        fail_at: int | None = None,
        fault: BaseException | None = None,
        clock: "VirtualClock | None" = None,
        cost: Callable[[int], float] = float,
    ) -> None:
        num_tokens = len(table)
        if table.ndim != 3 or table.shape[1] != num_tokens or table.shape[2] < num_tokens:
            raise ValueError(f"a table is of shape (n, n, size >= n), not {table.shape}")
        self.table = np.asarray(table, np.float32)
        self.vocab = Vocabulary(
            size=table.shape[2],
            tokens=tokens or [LETTERS[i : i + 1] or b"<%d>" % i for i in range(num_tokens)],
            eos_ids=frozenset(eos_ids),
            bos_id=bos_id,
            encode=self._encode,
        )
        self.max_context = max_context
        self.fail_at = fail_at
        self.clock = clock or VirtualClock()
        self.cost = cost
        self.fault = fault or RuntimeFailure("the fault that was asked for")
        self.fed_ct = self.forward_ct = self.row_ct = self.call_ct = self.open_caches = 0

    @classmethod
    def random(
        cls,
        num_tokens: int = 8,
        *,
        seed: int = 0,
        padding: int = 0,
        eos_ids: Collection[int] = (),
        max_context: int = 4096,
    ) -> Self:
        """A model of random logits; ``padding`` ids beyond the tokens have the highest of all."""
        rng = np.random.default_rng(seed)
        table = rng.standard_normal((num_tokens, num_tokens, num_tokens + padding))
        table[..., num_tokens:] += 10
        return cls(table, eos_ids=eos_ids, max_context=max_context)

    def sibling(self, noise: float, *, seed: int = 0, max_context: int | None = None) -> Self:
        """A model that mostly agrees with this one: its table with Gaussian noise added."""
        rng = np.random.default_rng(seed)
        return type(self)(
            self.table + noise * rng.standard_normal(self.table.shape),
            tokens=self.vocab.tokens,
            eos_ids=self.vocab.eos_ids,
            bos_id=self.vocab.bos_id,
            max_context=max_context or self.max_context,
        )

    def new_cache(self) -> TableCache:
        """An empty cache."""
        self._count_call()
        return TableCache(self)

    def forward(self, batch: Sequence[Span]) -> list[NDArray[np.float32]]:
        """Feed every span; return its rows."""
        texts = [self._ids(span.cache) for span in batch]
        check_forward(self, batch)
        self._count_call()
        self.forward_ct += 1
        self.clock.seconds += self.cost(sum(len(span.tokens) for span in batch))
        rows = []
        for ids, (_, tokens, num_logits) in zip(texts, batch, strict=True):
            ids.extend(tokens)
            self.fed_ct += len(tokens)
            self.row_ct += num_logits
            known = len(self.table)  # padding ids are fed as if they were the first tokens again
            ends = range(len(ids) - num_logits, len(ids))
            before = [ids[max(0, end - 1)] % known for end in ends]
            rows.append(self.table[before, [ids[end] % known for end in ends]])
        return rows

    def crop(self, cache: Cache, length: int) -> None:
        """Cut a cache back."""
        ids = self._ids(cache)
        check_crop(cache, length)
        self._count_call()
        del ids[length:]

    def info(self) -> Mapping[str, object]:
        """What it runs on."""
        return {"runtime": "table", "device": "cpu", "context": self.max_context}

    def _encode(self, text: str) -> list[int]:
        tokens = list(self.vocab.tokens)
        try:
            return [tokens.index(bytes([byte])) for byte in text.encode()]
        except ValueError:
            raise ValueError(f"no tokens of this model spell {text!r}") from None

    def _count_call(self) -> None:
        self.call_ct += 1
        if self.fail_at == self.call_ct - 1:
            raise self.fault

    def _ids(self, cache: Cache) -> list[int]:
        if not isinstance(cache, TableCache) or cache.owner is not self or cache.closed:
            raise ValueError("the cache is closed, or another backend's")
        return cache.ids

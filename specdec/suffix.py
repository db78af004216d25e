"""Drafts by the statistics of all that came before: a suffix automaton that grows with the text."""

from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul
from threading import Lock
from typing import NamedTuple

from typing_extensions import override

from specdec.drafters import Draft, Drafter, DraftRequest
from specdec.request import at_least

__all__ = ["SuffixDrafter", "SuffixIndex"]

NOTHING, BORDER = -2, -1  # no continuation at all; the end of an earlier text
DEPTH = 8  # of them are counted at each id: the longest, which are all unless a text loops
FIELDS = 6
LINK = 1  # after the length of the longest substring: the state of its longest suffix elsewhere
COUNT = 2
LATEST = 3  # where it ended last, in ids from the start
BEST, NEXT = 4, 5  # the id that followed most often, and the state that it leads to
REMEMBERED = 64  # ids of a text that are looked for in the memory when it has changed
DOUBT = 1.5  # occurrences of something else, over the length of the match, to be expected


class Match(NamedTuple):
    """Where the end of a text came before: a state of an index, and how many ids match."""

    state: int
    length: int


NO_MATCH = Match(0, 0)


class SuffixIndex:
    """A suffix automaton with counts (Blumer et al. 1985): every substring of a text, by state.

    A state stands for substrings that end at the same places. It knows how often they came, where
    last, and what followed most often: the latest of those that tie. Growing takes amortised
    constant time per id.
    """

    def __init__(self) -> None:
        self.size = 0  # ids read
        self._last = 0  # the state of the whole text
        # A state is where its fields are in the table, side by side as memory is slow.
        self._table = array("i", [0, -1, 0, 0, NOTHING, 0])
        self._others: dict[int, dict[int, int]] = {}  # all that followed, where it was several ids

    def extend(self, ids: Iterable[int]) -> None:
        """Read on."""
        for token in ids:
            self._append(token)

    @property
    def match(self) -> Match:
        """The longest end of the text that came before."""
        return self.shorter(Match(self._last, self.size))

    def shorter(self, match: Match) -> Match:
        """The longest end of a match that came elsewhere too; of no length at last."""
        state = max(0, self._table[match.state + LINK])
        return Match(state, self._table[state])

    def follow(self, match: Match, token: int) -> Match:
        """A match with the end of another text, one id further."""
        state, length = self.valid(match)
        while (found := self._after(state, token)) is None:
            state = self._table[state + LINK]
            if state < 0:
                return NO_MATCH
            length = self._table[state]
        return Match(found, length + 1)

    def valid(self, match: Match) -> Match:
        """The same match after the index has grown, which may have split its state."""
        state, length = match
        while state and length <= self._table[link := self._table[state + LINK]]:
            state = link
        return Match(state, length)

    def continuation(
        self, match: Match, num_tokens: int, min_chance: float, num_ids: int
    ) -> tuple[list[int], list[float]]:
        """The most frequent ids behind a match, and each one's chance if those before it stand.

        It ends where the chance that all stand falls below ``min_chance``, and before an id that
        isn't below ``num_ids``.
        """
        table, size = self._table, self.size
        tokens: list[int] = []
        chances: list[float] = []
        (state, length), together = match, 1.0
        while length and len(tokens) < num_tokens:
            token = table[state + BEST]
            if token == NOTHING:  # the end of the text goes on as its own suffix did
                state, length = self.shorter(Match(state, length))
                continue
            after = table[state + NEXT]
            seen = table[state + COUNT] - (table[state + LATEST] == size)  # with a continuation
            chance = min(table[after + COUNT], seen) / (seen + DOUBT / length)
            together *= chance
            if not 0 <= token < num_ids or together < min_chance:
                break
            tokens.append(token)
            chances.append(chance)
            state, length = after, length + 1
        return tokens, chances

    def num_seen(self, ids: Sequence[int]) -> int:
        """How often a substring came."""
        state: int | None = 0
        for token in ids:
            state = None if state is None else self._after(state, token)
        return self._table[state + COUNT] if state else 0

    def _after(self, state: int, token: int) -> int | None:
        if self._table[state + BEST] == token:
            return self._table[state + NEXT]
        others = self._others.get(state)
        return others.get(token) if others else None

    def _append(self, token: int) -> None:
        table, others = self._table, self._others
        state, whole = self._last, len(table)
        self.size = size = self.size + 1
        self._last = whole
        table.extend((size, 0, 1, size, NOTHING, 0))
        found = None
        while state >= 0:  # behind these the id is new
            best = table[state + BEST]
            if best == NOTHING:
                table[state + BEST], table[state + NEXT] = token, whole
            elif best == token:
                found = table[state + NEXT]
                break
            else:
                known = others.get(state)
                if known is None:
                    others[state] = {best: table[state + NEXT], token: whole}
                elif token in known:
                    found = known[token]
                    break
                else:
                    known[token] = whole
                if table[table[state + NEXT] + COUNT] == 1:
                    table[state + BEST], table[state + NEXT] = token, whole
            state = table[state + LINK]
        if found is None:
            return
        if table[found] > table[state] + 1:  # its shorter substrings come at more places now
            found = self._split(found, state, token)
        table[whole + LINK] = found
        counted = 0
        for _ in range(DEPTH):
            is_best = table[state + BEST] == token
            here = table[state + NEXT] if is_best else others[state][token]
            if here != counted:
                table[here + COUNT] += 1
                table[here + LATEST] = size
                counted = here
            if not is_best and table[here + COUNT] >= table[table[state + NEXT] + COUNT]:
                table[state + BEST], table[state + NEXT] = token, here
            state = table[state + LINK]
            if state < 0:
                break

    def _split(self, state: int, above: int, token: int) -> int:
        """A new state for the substrings that ``token`` makes of those of ``above`` and shorter."""
        table, others = self._table, self._others
        twin = len(table)
        table.extend(table[state : state + FIELDS])
        table[twin], table[state + LINK] = table[above] + 1, twin
        if state in others:
            others[twin] = dict(others[state])
        while above >= 0 and self._after(above, token) == state:
            if table[above + BEST] == token:
                table[above + NEXT] = twin
            if above in others:
                others[above][token] = twin
            above = table[above + LINK]
        return twin


@dataclass(slots=True)
class _State:
    num_prompt: int
    index: SuffixIndex = field(default_factory=SuffixIndex)
    output: list[int] = field(default_factory=list)  # kept for the memory only
    memory: SuffixIndex | None = None  # what was matched so far, and where it stands there
    num_matched: int = 0
    match: Match = NO_MATCH


class SuffixDrafter(Drafter):
    """Proposes the continuation that promises the most by what followed the same ids so far.

    The longest end of the text that came before, in it or in what is remembered, is continued by
    what followed most often; what should bring the most ids that stand is proposed, as long as the
    match makes it likely (after SuffixDecoding, Oliaro et al., arXiv 2411.04975).

    A round takes some tens of microseconds in a text of any length, up to about 100 in an endless
    loop; but the first id after a loop goes with the loop's length, 0.7 microseconds for each of
    its ids. A text takes 110 to 150 bytes per id, as measured; 300 if it is random bits, and 370
    once it has left a loop.

    Args:
        memory_tokens: How many ids of earlier outputs to remember beside the text at hand. 0: none
            of any text, once it is closed. When there are more, the oldest are forgotten until half
            is left. Prompts aren't remembered; ``clear`` forgets all. Decoders in several threads
            may share it.
        min_chance: Propose no further than all stand with this chance.

    Raises:
        ValueError: A value is out of range.
    """

    def __init__(self, *, memory_tokens: int = 0, min_chance: float = 0.02) -> None:
        if not 0 < min_chance <= 1:
            raise ValueError(f"min_chance must be above 0 and at most 1, not {min_chance}")
        self._min_chance = min_chance
        self._room = at_least(0, memory_tokens=memory_tokens)
        self._remembered: list[int] = []
        self._memory = SuffixIndex()
        self._closed = deque[list[int]]()  # outputs that the memory lacks yet
        self._lock = Lock()  # of the memory

    @property
    def remembered(self) -> Sequence[int]:
        """The ids that are held of earlier outputs, the oldest first, each output closed by -1."""
        with self._lock:
            self._remember()
            return tuple(self._remembered)

    @override
    def open(self, prompt_ids: Sequence[int]) -> _State:
        """An empty index."""
        return _State(len(prompt_ids))

    @override
    def lag(self, state: _State, ids: Sequence[int]) -> int:
        """What isn't indexed yet."""
        return max(0, len(ids) - state.index.size)

    @override
    def catch_up(self, state: _State, ids: Sequence[int]) -> None:
        """Index it, and match it with what is remembered."""
        state.index.extend(ids[state.index.size :])
        with self._lock:
            self._match(state, ids)

    def _match(self, state: _State, ids: Sequence[int]) -> None:
        """Follow a text in the memory."""
        self._remember()
        if not self._remembered:
            return
        if state.memory is not self._memory:
            state.memory, state.match = self._memory, NO_MATCH
            state.num_matched = max(0, len(ids) - REMEMBERED)
        for token in ids[state.num_matched :]:
            state.match = self._memory.follow(state.match, token)
        state.num_matched = len(ids)

    @override
    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """Continue every text by its own statistics."""
        return [Draft(self._after(request)) for request in requests]

    def _after(self, request: DraftRequest) -> list[int]:
        state: _State = request.state
        limits = request.num_tokens, self._min_chance, request.num_ids
        state.index.extend(request.ids[state.index.size :])
        drafts = [state.index.continuation(state.index.match, *limits)]
        with self._lock:
            self._match(state, request.ids)
            if self._remembered:
                match = self._memory.valid(state.match)
                drafts.append(self._memory.continuation(match, *limits))
        tokens, chances = max(drafts, key=lambda draft: sum(accumulate(draft[1], mul)))
        if request.go_on is not None:
            for number, chance in enumerate(chances, 1):
                if not request.go_on(chance):
                    return tokens[:number]
        return tokens

    @override
    def commit(self, state: _State, ids: Sequence[int]) -> None:
        """Hold the output ready for the memory, if there is one."""
        if self._room:
            state.output.extend(ids[state.num_prompt + len(state.output) :])

    @override
    def close(self, state: _State) -> None:
        """Remember the output, and forget the oldest."""
        if not (self._room and state.output):
            return
        self._closed.append([*state.output, BORDER])
        # The garbage collector may close a text while this thread has the lock.
        if self._lock.acquire(blocking=False):
            try:
                self._remember()
            finally:
                self._lock.release()

    def _remember(self) -> None:
        while self._closed:
            new = self._closed.popleft()
            self._remembered += new
            if len(self._remembered) > self._room:
                self._remembered = new = self._remembered[-max(1, self._room // 2) :]
                self._memory = SuffixIndex()
            self._memory.extend(new)

    @override
    def clear(self) -> None:
        """Forget all outputs."""
        with self._lock:
            self._closed.clear()
            self._remembered, self._memory = [], SuffixIndex()

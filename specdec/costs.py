"""What the parts of a round take, as measured, and what follows for whole rounds."""

import math
from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Sequence
from statistics import median

__all__ = ["READ_TOKENS", "Costs"]

PROBE_SHARE = 0.012  # of the time may go into drafts that are not expected to pay
SURE = 3  # samples that are believed against what is hoped for
BUDGET_TOKENS = 512  # of which that share may be saved up
READ_TOKENS = 16  # that a drafter lags behind: fewer are read with its next draft
SHORTEST, LONGEST = 1e-9, 1e9  # seconds
STALE = 128  # target forwards after which a width or drafts not seen since lose a sample


class Costs:
    """Seconds that the parts of a round take, as measured: medians of the latest.

    What was measured in a bad moment and never again is forgotten.

    What goes into drafts that aren't expected to pay is kept here too, so that short texts add up.
    """

    def __init__(self) -> None:
        self._budget = 0.0  # plain steps that may be lost
        self._forward_ct = 0
        self._seen: dict[int, int] = {}  # when a width was, in forwards
        self._verify: dict[int, deque[float]] = defaultdict(lambda: deque(maxlen=9))
        self._medians: dict[int, float] = {}  # by width
        self._widths: list[tuple[int, float]] = []  # the same, the smallest first
        self._draft: dict[int, deque[tuple[int, float]]] = defaultdict(lambda: deque(maxlen=24))
        self._lines: dict[int, tuple[float, float]] = {}  # seconds at 0 drafts, and for each more
        self._only_tried = False  # since they were forgotten
        self._forgotten_width = 0.0  # seconds, of the last that was
        self._drafted_in = 0  # the last of these, STALE forwards each
        self._rest = {drafting: deque[float](maxlen=15) for drafting in (False, True)}
        self._read: deque[float] = deque(maxlen=5)

    def count_verify(self, width: int, seconds: float) -> None:
        """Enter a target forward over ``width`` tokens."""
        width = rounded(width)
        self._verify[width].append(positive(seconds))
        self._seen[width] = self._forward_ct = self._forward_ct + 1
        if self._forward_ct % STALE == 0:
            self._forget()
        self.forget_drafts()
        self._medians[width] = median(self._verify[width])
        self._widths = sorted(self._medians.items())

    def _forget(self) -> None:
        for width, seen in list(self._seen.items()):
            if width > 1 and self._forward_ct - seen >= STALE:
                self._forgotten_width = self._verify[width].popleft()
                if samples := self._verify[width]:
                    self._medians[width] = median(samples)
                else:
                    del self._verify[width], self._seen[width], self._medians[width]

    @property
    def forward_ct(self) -> int:
        """Target forwards so far."""
        return self._forward_ct

    def forget_drafts(self) -> None:
        """Drafts lose a sample after so many target forwards without one."""
        if (era := self.forward_ct // STALE) > self._drafted_in:
            self._drafted_in = era
            for num_sequences, samples in list(self._draft.items()):
                samples.popleft()
                self._fit(num_sequences)

    def count_draft(self, seconds: float, num_tokens: int, num_sequences: int = 1) -> None:
        """Enter drafts of up to ``num_tokens`` for several sequences in step."""
        if self.forgot_drafts:
            self._lines.clear()
        self._only_tried = False
        self._draft[num_sequences].append((num_tokens, positive(seconds)))
        self._drafted_in = math.ceil(self.forward_ct / STALE)
        self._fit(num_sequences)

    def _fit(self, num_sequences: int) -> None:
        if samples := self._draft[num_sequences]:
            self._lines[num_sequences] = line_through(samples)
            return
        del self._draft[num_sequences]
        if self._draft:
            del self._lines[num_sequences]

    @property
    def forgot_drafts(self) -> bool:
        """Whether all that is known of drafts is so old that it should be measured again."""
        return bool(self._lines) and not self._draft

    def count_rest(self, seconds: float, *, drafting: bool) -> None:
        """Enter the loop's own time in a round, rollback included."""
        self._rest[drafting].append(positive(seconds))

    def count_read(self, seconds: float, num_tokens: int) -> None:
        """Enter the reading of ``num_tokens`` by the drafter; a few tell nothing of each."""
        if num_tokens >= READ_TOKENS or not self._read:
            self._read.append(positive(seconds) / num_tokens)

    @property
    def known(self) -> bool:
        """Whether a plain step was ever measured."""
        return 1 in self._verify

    def is_plain_stale(self, num_sequences: int = 1) -> bool:
        """Whether the last plain step is so long ago that one more is worth it."""
        seen = self._seen.get(rounded(num_sequences), self._forward_ct)
        return self._forward_ct - seen >= 4 * STALE

    def count_tokens(self, num_tokens: int, lost: float) -> None:
        """Enter what a round brought, and the plain steps that it lost if it was a probe."""
        saved = self._budget + PROBE_SHARE * num_tokens
        self._budget = min(saved, PROBE_SHARE * BUDGET_TOKENS) - lost

    def count_trial(self, lost: float) -> None:
        """Enter the plain steps that it took to measure drafts anew, behind a short text."""
        self._only_tried = True
        self.count_tokens(0, lost)

    def may_lose(self, steps: float) -> bool:
        """Whether drafts that lose so many plain steps are within what may go into probes."""
        return steps <= self._budget

    @property
    def widths(self) -> tuple[int, ...]:
        """The widths that were measured, the smallest first."""
        return tuple(width for width, _ in self._widths)

    @property
    def draft(self) -> float:
        """One more draft token; a quarter of a plain step until one was measured."""
        _, step = self._drafting(1)
        return step

    def drafts(self, num_tokens: int, num_sequences: int = 1) -> float:
        """Drafts of so many tokens for each of some sequences in step, or for about so many.

        A line through what was measured: a round's first draft takes longer, since it feeds what
        the target has put out. More sequences than were measured take as much more as they do in
        the target.
        """
        base, step = self._drafting(num_sequences)
        return base + step * num_tokens if num_tokens else 0.0

    def _drafting(self, num_sequences: int) -> tuple[float, float]:
        """That line: seconds at 0 drafts, and for each more."""
        if not self._lines:
            return 0.0, self.verify(num_sequences) / 4
        if num_sequences in self._lines:
            return self._lines[num_sequences]
        nearest = min(self._lines, key=lambda n: abs(n - num_sequences))
        base, step = self._lines[nearest]
        more = self.verify(num_sequences) / self.verify(nearest) if num_sequences > nearest else 1.0
        return more * base, more * step

    def at_stake(self, num_tokens: int, width: int) -> float:
        """Seconds that drafts of so many tokens, and a forward to check them, may take beside hope.

        0 where drafts were seen since they were forgotten, and such a width, or a wider one, too.
        """
        drafts = self.drafts(num_tokens) if self._only_tried else 0.0
        known = not self._widths or rounded(width) <= self._widths[-1][0]
        return drafts + (0.0 if known else self._forgotten_width)

    def rest(self, *, drafting: bool) -> float:
        """The loop's own work in a round; a rollback may have its price."""
        plain, drafted = (median(self._rest[kind] or [0.0]) for kind in (False, True))
        return max(plain, drafted) if drafting else plain

    @property
    def read(self) -> float:
        """One token that the drafter has to catch up with; 0 until it was measured."""
        return median(self._read) if self._read else 0.0

    def reading(self, num_tokens: int) -> float:
        """The drafter's catching up with so many tokens.

        Until that was measured, each takes as much less than a draft as one of many does in the
        target.
        """
        if self._read or num_tokens == 0:
            return num_tokens * self.read
        among_many = (self.verify(1024) - self.verify(512)) / 512
        return num_tokens * self.draft * among_many / self.verify(1)

    def verify(self, width: int, *, hopeful: bool = True) -> float:
        """A target forward over ``width`` tokens.

        A width that was never measured costs what the next smaller one does, so that what may be
        good is tried; if not ``hopeful``, it lies on a line between its neighbours. One that was
        measured once or twice costs no more than that line. Widths beyond all that were measured
        lie on a line with the first and the last.
        """
        widths, width = self._widths, rounded(width)
        if not widths:
            return 1.0
        (first, least), (last, most) = widths[0], widths[-1]
        if width <= first:
            return least
        if width >= last:
            return most + max(0.0, most - least) / max(1, last - first) * (width - last)
        at = bisect_left(widths, (width, 0.0))
        here = widths[at][0] == width
        if here and len(self._verify[width]) >= SURE:
            return widths[at][1]
        (left, low), (right, high) = widths[at - 1], widths[at + here]
        line = low + (high - low) * (width - left) / (right - left)
        if here:
            return min(line, widths[at][1])
        return min(line, low) if hopeful else line

    def rounds(
        self, max_draft_tokens: int, num_sequences: int = 1, num_drafting: int | None = None
    ) -> list[float]:
        """Whole rounds in which some of the sequences, else all, get 0, 1, ... drafts each."""
        drafting = num_sequences if num_drafting is None else num_drafting
        plain, rest = self.verify(num_sequences), self.rest(drafting=True)
        seconds = [plain + self.rest(drafting=False)]
        hopeful = num_sequences == 1  # else a vain try costs all of them, and widths are many
        base, step = self._drafting(drafting)
        for count in range(1, max_draft_tokens + 1):
            # A wider forward is never cheaper, only noise is.
            width = num_sequences + drafting * count
            checking = max(plain, self.verify(width, hopeful=hopeful))
            seconds.append(base + step * count + checking + rest)
        return seconds

    def round(self, num_drafts: int) -> float:
        """A whole round of one sequence."""
        return self.rounds(num_drafts)[num_drafts]


def rounded(width: int) -> int:
    """Forwards wider than one sequence makes them are told apart by an eighth of their width."""
    shift = width.bit_length() - 4 if width >= 32 else 0
    return width >> shift << shift


def positive(seconds: float) -> float:
    """A time that can be divided by, whatever a clock says."""
    return min(seconds, LONGEST) if seconds > SHORTEST else SHORTEST


def line_through(samples: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Seconds at 0 and per token, through ``(tokens, seconds)`` and two samples at ``(0, 0)``."""
    each = [seconds / count for count, seconds in samples]
    if len(samples) < SURE:
        return 0.0, min(each)
    most, weight = 2 * median(each), len(samples) + 2  # what is slower is an outlier
    clipped = [(count, min(seconds, most * count)) for count, seconds in samples]
    count = sum(n for n, _ in clipped) / weight
    seconds = sum(s for _, s in clipped) / weight
    spread = sum((n - count) ** 2 for n, _ in clipped) + 2 * count**2
    joint = sum((n - count) * (s - seconds) for n, s in clipped) + 2 * count * seconds
    step = min(max(0.0, joint / spread), seconds / count)
    return seconds - step * count, step

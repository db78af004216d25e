"""Where a text ends: EOS ids, stop ids, stop strings, limits; and its text, token by token."""

import codecs
from collections.abc import Collection
from dataclasses import dataclass
from itertools import repeat
from typing import Literal, TypeAlias

from specdec.vocab import Vocabulary

__all__ = ["FinishReason", "Output", "TokenEvent", "TokenLogprobs"]

FinishReason: TypeAlias = Literal["eos", "stop", "length", "context", "error"]


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One token of a stream.

    Attributes:
        token_id: The id.
        text: What it adds to the text; empty for special tokens and inside a character.
        from_draft: Whether the draft had proposed it.
        logprob: Its log-probability, if ``logprobs`` was asked for.
    """

    token_id: int
    text: str
    from_draft: bool
    logprob: float | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """What the model itself thought of a token, before penalties, temperature and filters.

    Attributes:
        logprob: Natural logarithm of the token's probability.
        top: The best ids and theirs, best first.
    """

    logprob: float
    top: dict[int, float]


class Output:
    """What one sequence has put out so far.

    Ids, text and events end at the same place. A token is *final* once no stop string can take it
    back; only final tokens become events, so at most a stop string's length is held back.
    """

    def __init__(
        self,
        vocab: Vocabulary,
        max_new_tokens: int,
        *,
        stop: Collection[str] = (),
        stop_token_ids: Collection[int] = (),
    ) -> None:
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []  # of every token, or of none
        self.text = ""
        self.finish_reason: FinishReason | None = None if max_new_tokens else "length"
        self._vocab = vocab
        self._max_new_tokens = max_new_tokens
        self._stop = tuple(stop)
        self._stop_token_ids = frozenset(stop_token_ids)
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held: list[tuple[int, bool, int]] = []  # id, from_draft, where its text starts

    @property
    def remaining(self) -> int:
        """How many tokens are still wanted."""
        return self._max_new_tokens - len(self.token_ids)

    def add(
        self, token_id: int, *, from_draft: bool, logprobs: TokenLogprobs | None = None
    ) -> bool:
        """Append one token; True if more are wanted."""
        start = len(self.text)
        self.token_ids.append(token_id)
        if logprobs is not None:
            self.logprobs.append(logprobs)
        self._held.append((token_id, from_draft, start))
        if token_id in self._vocab.eos_ids:
            self.finish("eos")
        elif token_id in self._stop_token_ids:
            self.finish("stop")
        else:
            self.text += self._decoder.decode(self._vocab.spell(token_id))
            if (cut := self._find_stop(start)) is not None:
                self._cut(cut)
            elif len(self.token_ids) >= self._max_new_tokens:
                self.finish("length")
        return self.finish_reason is None

    def finish(self, reason: FinishReason) -> None:
        """End the text here. A character that is still incomplete becomes U+FFFD."""
        start = len(self.text)
        self.text += self._decoder.decode(b"", final=True)
        cut = self._find_stop(start)
        if cut is None:
            self.finish_reason = reason
        else:
            self._cut(cut)

    def take(self) -> list[TokenEvent]:
        """The tokens that have become final since the last call."""
        ends = [start for _, _, start in self._held[1:]] + [len(self.text)]
        count = len(self._held)
        if self._stop and self.finish_reason is None:
            safe = len(self.text) - self._num_held_back()
            count = sum(
                start < safe and end <= safe
                for (_, _, start), end in zip(self._held, ends, strict=False)
            )
        scores = self.logprobs[len(self.token_ids) - len(self._held) :]
        events = [
            TokenEvent(token_id, self.text[start:end], from_draft, score.logprob if score else None)
            for (token_id, from_draft, start), end, score in zip(
                self._held[:count], ends, scores or repeat(None), strict=False
            )
        ]
        del self._held[:count]
        return events

    def _find_stop(self, start: int) -> int | None:
        """Where the earliest stop string begins that text from ``start`` on completes."""
        if not self._stop:
            return None
        found = [self.text.find(stop, max(0, start - len(stop) + 1)) for stop in self._stop]
        return min((at for at in found if at >= 0), default=None)

    def _cut(self, at: int) -> None:
        """Let the text end at ``at``, with the token that reaches it."""
        self.text = self.text[:at]
        dropped = sum(start >= at for _, _, start in self._held)
        if dropped:
            del self._held[-dropped:], self.token_ids[-dropped:], self.logprobs[-dropped:]
        self.finish_reason = "stop"

    def _num_held_back(self) -> int:
        """Length of the longest end of the text that may become a stop string."""
        return max(
            (
                length
                for stop in self._stop
                for length in range(min(len(stop) - 1, len(self.text)), 0, -1)
                if self.text.endswith(stop[:length])
            ),
            default=0,
        )

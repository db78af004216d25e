"""What a generation cost and what speculation brought, in SGLang's names."""

from dataclasses import dataclass, field

from specdec.drafters import Draft

__all__ = ["Stats"]


@dataclass(slots=True)
class Stats:
    """Counters and times of one sequence.

    A *round* is a target forward that checks at least one draft token; a forward without drafts is
    a plain step. Drafts are counted as they were compared, before a stop cuts the text.

    Attributes:
        prompt_tokens: Ids of the prompt.
        cached_tokens: How many of them the target had read before, for an earlier text.
        completion_tokens: New ids that were put out.
        verify_ct: Rounds.
        target_forward_ct: Target forwards after the prompt: rounds and plain steps.
        draft_forward_ct: Draft-model forwards after the prompt.
        num_proposed_drafts: Draft tokens that the target checked.
        num_correct_drafts: Those that stood.
        accept_histogram: ``accept_histogram[n]`` is the number of rounds in which n drafts stood.
        propose_histogram: ``propose_histogram[n]`` is the number of rounds with n drafts.
        replayed_ct: Ids that either model read again, because it can't go back otherwise.
        strict_ct: Choices so close that a forward over one token decided them (``strict=True``).
        by_drafter: Of several drafters, by name: the drafts that were checked, and that stood.
        predicted_speedup: What the measured costs and this text's acceptance promised over plain
            decoding, where the number of drafts was chosen by them.
        prefill_seconds: Reading the prompt, by both models; also what a decoder measures once.
        draft_seconds: Proposing.
        verify_seconds: Target forwards, comparison included.
        rollback_seconds: Cutting the caches back.
        host_seconds: The rest of the rounds: the loop's own work.
        reason: Why nothing, or from some point on nothing more, was drafted. None if all was well.

    Sequences that decode together share their forwards; each is charged an equal part of the time.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    verify_ct: int = 0
    target_forward_ct: int = 0
    draft_forward_ct: int = 0
    num_proposed_drafts: int = 0
    num_correct_drafts: int = 0
    accept_histogram: list[int] = field(default_factory=list)
    propose_histogram: list[int] = field(default_factory=list)
    replayed_ct: int = 0
    strict_ct: int = 0
    by_drafter: dict[str, tuple[int, int]] = field(default_factory=dict)
    predicted_speedup: float | None = None
    prefill_seconds: float = 0.0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    rollback_seconds: float = 0.0
    host_seconds: float = 0.0
    reason: str | None = None

    @property
    def speculative(self) -> bool:
        """Whether any draft was checked."""
        return self.verify_ct > 0

    @property
    def accept_length(self) -> float | None:
        """Mean tokens that a round brings: the drafts that stood and the target's own one.

        Plain steps aren't counted. Equals ``completion_tokens / verify_ct`` when there were none
        and no stop cut a round short. None without rounds.
        """
        return 1 + self.num_correct_drafts / self.verify_ct if self.verify_ct else None

    @property
    def accept_rate(self) -> float | None:
        """Part of the checked drafts that stood. None when nothing was proposed."""
        if not self.num_proposed_drafts:
            return None
        return self.num_correct_drafts / self.num_proposed_drafts

    @property
    def decode_seconds(self) -> float:
        """All time after the prompt."""
        return self.draft_seconds + self.verify_seconds + self.rollback_seconds + self.host_seconds

    @property
    def tokens_per_second(self) -> float | None:
        """New tokens per second of decoding, without the prompt. None before the first."""
        return self.completion_tokens / self.decode_seconds if self.decode_seconds else None

    def count_round(self, draft: Draft, num_correct: int) -> None:
        """Enter one target forward that checked ``draft``, of which ``num_correct`` ids stood."""
        self.target_forward_ct += 1
        self.draft_forward_ct += draft.forward_ct
        self.replayed_ct += draft.replayed_ct
        self.reason = draft.reason or self.reason
        if draft.token_ids:
            self.verify_ct += 1
            self.num_proposed_drafts += len(draft.token_ids)
            self.num_correct_drafts += num_correct
            if draft.by is not None:
                proposed, stood = self.by_drafter.get(draft.by, (0, 0))
                tally = (proposed + len(draft.token_ids), stood + num_correct)
                self.by_drafter[draft.by] = tally
            count(self.propose_histogram, len(draft.token_ids))
            count(self.accept_histogram, num_correct)

    def count_seconds(self, *, draft: float, verify: float, rollback: float, host: float) -> None:
        """Enter this sequence's part of a round's time."""
        self.draft_seconds += draft
        self.verify_seconds += verify
        self.rollback_seconds += rollback
        self.host_seconds += host

    def as_dict(self) -> dict[str, object]:
        """Every counter, time and derived figure, ready for JSON."""
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        derived = ("speculative", "accept_length", "accept_rate", "tokens_per_second")
        return fields | {name: getattr(self, name) for name in derived}


def count(histogram: list[int], value: int) -> None:
    """Enter a value; the histogram grows with need."""
    histogram += [0] * (value + 1 - len(histogram))  # none when negative
    histogram[value] += 1

"""What tokens spell, and ids for a text, across vocabularies."""

import codecs
from itertools import pairwise

from specdec.vocab import Vocabulary

__all__ = ["Speller", "common_tokens"]


class Speller:
    """Text to ids of a vocabulary that spell exactly that text, special ids apart."""

    def __init__(self, vocab: Vocabulary) -> None:
        self.steering = {*vocab.special_ids, *vocab.eos_ids}
        if vocab.bos_id is not None:
            self.steering.add(vocab.bos_id)
        self.ids: dict[bytes, int] = {}  # the first id of each spelling
        self.vocab = vocab
        self._longest: dict[bytes, int] = {}  # by the first two bytes, the length of a token
        for token, spelling in enumerate(vocab.tokens):
            if spelling and token not in self.steering:
                self.ids.setdefault(spelling, token)
                start = spelling[:2]
                self._longest[start] = max(self._longest.get(start, 0), len(spelling))
        neighbours = pairwise(sorted(self.ids))
        self._beginnings = {one for one, other in neighbours if other.startswith(one)}

    def spell(self, token: int) -> bytes:
        """The bytes of an id, none for one that steers the model or is padding."""
        return b"" if token in self.steering else self.vocab.spell(token)

    def may_grow(self, token: int) -> bool:
        """Whether a longer token begins as this one does."""
        return self.spell(token) in self._beginnings

    def split(self, text: bytes) -> tuple[list[int], int]:
        """Ids for as much of ``text`` as they can spell, and how many bytes that is.

        As the model's tokenizer would cut it, where that spells the text; else in as few tokens as
        can be.
        """
        decoder = codecs.getincrementaldecoder("utf-8")()
        try:
            head = decoder.decode(text)
        except UnicodeDecodeError:
            return self.fewest(text)
        begin = head.encode()
        ids = self._encoded(head, begin)
        if ids is None:
            return self.fewest(text)
        rest, num_bytes = self.fewest(text[len(begin) :])  # of a character that isn't whole
        return ids + rest, len(begin) + num_bytes

    def fewest(self, text: bytes) -> tuple[list[int], int]:
        """As ``split``, in as few tokens as can be."""
        most = len(text) + 1
        counts, starts = [0, *[most] * len(text)], [0] * most
        for start in range(len(text)):
            if counts[start] == most:
                continue
            longest = self._longest.get(text[start : start + 2], 1)
            for end in range(start + 1, min(start + longest, len(text)) + 1):
                if counts[start] + 1 < counts[end] and text[start:end] in self.ids:
                    counts[end], starts[end] = counts[start] + 1, start
        reached = end = max(i for i, count in enumerate(counts) if count < most)
        ids = []
        while end:
            ids.append(self.ids[text[starts[end] : end]])
            end = starts[end]
        return ids[::-1], reached

    def start(self) -> list[int]:
        """What the model's tokenizer puts before a text."""
        bos = self.vocab.bos_id
        return [bos] if bos is not None and self._encode("")[:1] == [bos] else []

    def _encoded(self, text: str, spelling: bytes) -> list[int] | None:
        # Some put a space of their own before the text.
        for each in [text, text[1:]] if text.startswith(" ") else [text]:
            ids = [token for token in self._encode(each) if token not in self.steering]
            is_known = all(0 <= token < self.vocab.num_tokens for token in ids)
            if is_known and b"".join(map(self.spell, ids)) == spelling:
                return ids
        return None

    def _encode(self, text: str) -> list[int]:
        try:
            return list(self.vocab.encode(text)) if self.vocab.encode else []
        except Exception:  # a tokenizer of its own few words
            return []


def common_tokens(target: Speller, draft: Speller) -> dict[int, int]:
    """Target ids that the draft has too, by what they spell, and the draft's ids for them.

    Special ids go with special ids alone: of the same text, else EOS with EOS and BOS with BOS.
    """
    ours, theirs = target.vocab, draft.vocab
    literal = {text: i for i, text in enumerate(theirs.tokens) if text and i in draft.steering}
    pairs = {}
    for i, text in enumerate(ours.tokens):
        known = literal if i in target.steering else draft.ids
        if text in known:
            pairs[i] = known[text]
    if theirs.eos_ids:
        pairs |= {i: min(theirs.eos_ids) for i in ours.eos_ids if i not in pairs}
    if ours.bos_id is not None and theirs.bos_id is not None:
        pairs.setdefault(ours.bos_id, theirs.bos_id)
    return pairs

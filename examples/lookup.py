"""Drafts without a draft model: by the text itself, and by what this decoder has put out before."""

from specdec import SpeculativeDecoder, SuffixDrafter
from specdec.testing import TableBackend


def main() -> None:
    target = TableBackend.random(26, seed=4)
    decoder = SpeculativeDecoder(target, SuffixDrafter(memory_tokens=10_000), num_draft_tokens=8)
    for _ in range(2):  # the second time it remembers
        result = decoder.generate("cab", max_new_tokens=60)
        print(f"{result.text}: {result.stats.target_forward_ct} forwards")
    # With a model, each drafts where it promises more: draft=["suffix", LlamaCppBackend(...)].
    mixed = SpeculativeDecoder(target, ["suffix", target.sibling(0.3)], num_draft_tokens=4)
    print(mixed.generate("cab", max_new_tokens=60).stats.by_drafter)


if __name__ == "__main__":
    main()

"""Backends around backends: whatever has the six members is a backend, so wrapping is easy."""

from collections.abc import Sequence

from specdec import Logits, ModelBackend, Span, SpeculativeDecoder
from specdec.testing import TableBackend


class Wrapper:
    """Passes everything through; a subclass looks at what interests it."""

    def __init__(self, inner: ModelBackend) -> None:
        self.inner = inner
        self.vocab, self.max_context = inner.vocab, inner.max_context
        self.new_cache, self.crop, self.info = inner.new_cache, inner.crop, inner.info

    def forward(self, batch: Sequence[Span]) -> list[Logits]:
        return self.inner.forward(batch)


class LoggingBackend(Wrapper):
    def forward(self, batch: Sequence[Span]) -> list[Logits]:
        print("forward", [(len(span.cache), list(span.tokens)) for span in batch])
        return super().forward(batch)


class CountingBackend(Wrapper):
    fed = 0

    def forward(self, batch: Sequence[Span]) -> list[Logits]:
        self.fed += sum(len(span.tokens) for span in batch)
        return super().forward(batch)


def main() -> None:
    model = TableBackend.random(8, seed=1)
    target, draft = LoggingBackend(model), CountingBackend(model.sibling(0.3))
    result = SpeculativeDecoder(target, draft, num_draft_tokens=3).generate(
        "cab", max_new_tokens=12
    )
    print(result.text, "with", draft.fed, "ids fed to the draft")


if __name__ == "__main__":
    main()

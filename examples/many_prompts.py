"""Many prompts at once, each with what it needs; results come as they are done."""

from collections.abc import Iterator

from specdec import BatchItem, SamplingParams, SpeculativeDecoder
from specdec.backends import HFBackend, LlamaCppBackend
from specdec.embedded import embedded_gguf


def prompts() -> Iterator[BatchItem]:
    """As many as there are: they are taken as there is room."""
    for city in ("Paris", "Lima", "Oslo", "Accra"):
        yield BatchItem(f"{city} is the capital of", max_new_tokens=6, stop=["\n", "."])
    warm = SamplingParams(temperature=0.8, seed=7)
    yield BatchItem("Once upon a time", max_new_tokens=24, sampling=warm)
    yield BatchItem("Once", stop="")  # an error, and the others go on


def main() -> None:
    model = embedded_gguf()
    decoder = SpeculativeDecoder(HFBackend(model, dtype="float32"), LlamaCppBackend(model))
    for number, result in decoder.as_completed(prompts(), max_batch=4):
        print(f"{number}: {result.error or repr(result.text)} ({result.finish_reason})")


if __name__ == "__main__":
    main()

"""A torch target, drafted by its own 4-bit GGUF in llama.cpp: the same text in less time."""

from specdec import SpeculativeDecoder
from specdec.backends import HFBackend, LlamaCppBackend
from specdec.embedded import embedded_gguf


def main() -> None:
    model = embedded_gguf()  # your own: a folder, a hub id, a GGUF
    target = HFBackend(model, dtype="float32")
    draft = LlamaCppBackend(model)

    plain = SpeculativeDecoder(target).generate("The three laws of robotics are", max_new_tokens=64)
    decoder = SpeculativeDecoder(target, draft, num_draft_tokens=7)
    result = decoder.generate("The three laws of robotics are", max_new_tokens=64)

    print(result.text)
    print("the same as plain decoding:", result.token_ids == plain.token_ids)
    print("tokens per round:", result.stats.accept_length)
    print(
        "tokens per second:",
        result.stats.tokens_per_second,
        "plain:",
        plain.stats.tokens_per_second,
    )


if __name__ == "__main__":
    main()

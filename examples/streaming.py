"""A chat answer as it comes; tokens that the draft had proposed stand in brackets."""

from specdec import SpeculativeDecoder
from specdec.backends import HFBackend, LlamaCppBackend
from specdec.embedded import embedded_gguf


def main() -> None:
    model = embedded_gguf()
    decoder = SpeculativeDecoder(
        HFBackend(model, dtype="float32"), LlamaCppBackend(model), num_draft_tokens=5
    )
    messages = [{"role": "user", "content": "Name three rivers of Europe."}]

    stream = decoder.stream(messages, max_new_tokens=60, stop="\n\n")
    for event in stream:
        print(f"[{event.text}]" if event.from_draft else event.text, end="", flush=True)

    result = stream.collect()
    print(f"\n{result.finish_reason}, {result.stats.accept_rate:.0%} of the drafts stood")


if __name__ == "__main__":
    main()

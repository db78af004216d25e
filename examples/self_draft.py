"""One model as target and draft: its own weights, quantised, draft for it in llama.cpp."""

from specdec import SpeculativeDecoder
from specdec.backends import HFBackend
from specdec.embedded import embedded_gguf


def main() -> None:
    # Any model that transformers loads: a hub id, a folder, a GGUF; or HFBackend(model=...,
    # tokenizer=...) for one in memory, such as a fine-tune with its adapters merged.
    target = HFBackend(embedded_gguf())
    decoder = SpeculativeDecoder(
        target, draft="self", num_draft_tokens=5
    )  # "self:q8_0" and so on choose the type
    result = decoder.generate("The three laws of robotics are", max_new_tokens=48)
    print(result.text)
    print("accept_rate", result.stats.accept_rate)


if __name__ == "__main__":
    main()

"""Target and draft both in llama.cpp, several prompts at once; torch isn't needed at all."""

import sys

from specdec import SpeculativeDecoder
from specdec.backends import LlamaCppBackend
from specdec.embedded import embedded_gguf


def main() -> None:
    model = embedded_gguf()
    # In earnest the draft is a smaller model of the same family: the target's own file drafts
    # perfectly and saves nothing. One backend may well be both; each sequence has two caches.
    backend = LlamaCppBackend(model)
    decoder = SpeculativeDecoder(target=backend, draft=backend, num_draft_tokens=4)

    prompts = ["The sun is", "Water boils at", "A haiku about rain:"]
    for prompt, result in zip(
        prompts, decoder.generate_batch(prompts, max_new_tokens=20), strict=True
    ):
        print(f"{prompt}{result.text}  ({result.stats.accept_rate:.0%} of the drafts stood)")
    print("torch was imported:", "torch" in sys.modules)


if __name__ == "__main__":
    main()

"""A second GGUF as draft inside llama-cpp-python's own Llama."""

from llama_cpp import Llama

from specdec.embedded import embedded_gguf
from specdec_llama_cpp import LlamaCppBackend, LlamaDraftModel


def main() -> None:
    model = str(embedded_gguf())
    # In earnest the draft is a smaller model, or a drafter such as SuffixDrafter().
    draft = LlamaDraftModel(LlamaCppBackend(model), num_draft_tokens=4)
    for draft_model in (None, draft):
        llama = Llama(model, draft_model=draft_model, n_ctx=512, verbose=False)
        answer = llama("Water boils at", max_tokens=20, temperature=0.0)
        print("drafted:" if draft_model else "plain:", answer["choices"][0]["text"])
    draft.close()


if __name__ == "__main__":
    main()

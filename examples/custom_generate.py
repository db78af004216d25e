"""A GGUF as draft inside transformers' own generate."""

import torch

from specdec.backends import HFBackend, LlamaCppBackend
from specdec.embedded import embedded_gguf
from specdec_hf import custom_generate


def main() -> None:
    path = embedded_gguf()
    loaded = HFBackend(path, dtype="float32")  # any model of transformers will do
    model, tokenizer = loaded.model, loaded.tokenizer
    assert tokenizer is not None

    fast = custom_generate(LlamaCppBackend(path), tokenizer=tokenizer)
    inputs = tokenizer("Gravity is", return_tensors="pt").to(model.device)
    options = {"max_new_tokens": 24, "do_sample": True, "temperature": 0.8, "top_p": 0.9}
    torch.manual_seed(1)
    ids = model.generate(**inputs, **options, custom_generate=fast)
    print(tokenizer.decode(ids[0]))
    print(fast.stats[0])

    plain = model.generate(**inputs, max_new_tokens=12, do_sample=False)
    ids = model.generate(**inputs, max_new_tokens=12, do_sample=False, custom_generate=fast)
    print("greedy ids are those of generate alone:", ids.tolist() == plain.tolist())


if __name__ == "__main__":
    main()

"""JSON that always fits a schema: a grammar by llguidance as a processor, for the draft as well."""

from collections.abc import Sequence

import numpy as np
from array_api_compat import array_namespace, device
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from specdec import Logits, SamplingParams, SpeculativeDecoder, Vocabulary
from specdec.backends import HFBackend, LlamaCppBackend
from specdec.embedded import embedded_gguf
from specdec.vocab import encode_prompt

FIELDS = {
    "name": {"type": "string", "maxLength": 16},
    "continent": {"enum": ["Africa", "America", "Asia", "Europe", "Oceania"]},
    "population": {"type": "integer", "minimum": 0, "maximum": 99999999},
}
SCHEMA = {
    "type": "object",
    "properties": FIELDS,
    "required": list(FIELDS),
    "additionalProperties": False,
}


class Tokens:
    """A vocabulary as llguidance wants it; calling it encodes a text."""

    def __init__(self, vocab: Vocabulary) -> None:
        self.vocab = vocab
        self.tokens = [token or b"" for token in vocab.tokens]
        self.special_token_ids = sorted(vocab.special_ids)
        self.bos_token_id, self.eos_token_id = vocab.bos_id, min(vocab.eos_ids)

    def __call__(self, text: str) -> list[int]:
        ids = encode_prompt(self.vocab, text)
        return ids[1:] if ids[0] == self.bos_token_id else ids


class JsonGrammar:
    """Leaves the ids that may come next: those that end the text only where the JSON is whole."""

    def __init__(self, schema: dict[str, object], vocab: Vocabulary, prompt_length: int) -> None:
        tokenizer = LLTokenizer(TokenizerWrapper(Tokens(vocab)), eos_token=sorted(vocab.eos_ids))
        grammar = LLMatcher.grammar_from_json_schema(
            schema,
            overrides={
                "whitespace_flexible": False,  # or a model may put out spaces for ever
                "item_separator": ", ",
                "key_separator": ": ",
            },
        )
        self.matcher = LLMatcher(tokenizer, grammar)
        self.prompt_length = prompt_length
        self.read: list[int] = []  # by the matcher: the draft runs ahead, the target looks back

    def __call__(self, ids: Sequence[int], row: Logits) -> Logits:
        output = list(ids[self.prompt_length :])
        common = 0
        for new, old in zip(output, self.read, strict=False):
            if new != old:
                break
            common += 1
        self.matcher.rollback(len(self.read) - common)
        num_read = common + self.matcher.try_consume_tokens(output[common:])
        self.read = output[:num_read]
        if num_read < len(output):  # the end, or a draft that won't stand: nobody uses this row
            return row
        mask = np.frombuffer(self.matcher.compute_bitmask(), np.uint8)
        allowed = np.unpackbits(mask, count=row.shape[0], bitorder="little").astype(bool)
        xp = array_namespace(row)
        return xp.where(xp.asarray(allowed, device=device(row)), row, -xp.inf)


def main() -> None:
    model = embedded_gguf()
    decoder = SpeculativeDecoder(
        HFBackend(model, dtype="float32"), LlamaCppBackend(model), num_draft_tokens=5
    )
    vocab = decoder.target.vocab
    prompt = encode_prompt(vocab, [{"role": "user", "content": "Describe Vienna in JSON."}])
    grammar = JsonGrammar(SCHEMA, vocab, prompt_length=len(prompt))
    for temperature in (0.0, 1.0):
        sampling = SamplingParams(temperature=temperature, seed=1, processors=[grammar])
        result = decoder.generate(prompt, sampling=sampling)
        print(result.text, f"({result.stats.accept_rate:.0%} of the drafts stood)")


if __name__ == "__main__":
    main()

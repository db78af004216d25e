"""Drafters behind Llama's draft_model: asked statelessly, they follow one text."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec import (
    CompositeDrafter,
    Draft,
    Drafter,
    DraftRequest,
    ModelDrafter,
    RuntimeFailure,
    SuffixDrafter,
)
from specdec.testing import TableBackend

pytest.importorskip("llama_cpp")

from llama_cpp.llama_speculative import LlamaDraftModel as DraftModel

from specdec_llama_cpp import LlamaCppBackend, LlamaDraftModel


def asked(draft: LlamaDraftModel, ids: Sequence[int]) -> list[int]:
    found = draft(np.array(ids, np.intc))
    assert found.dtype == np.intc
    assert found.ndim == 1
    return list(found.tolist())


def greedy(model: TableBackend, ids: Sequence[int], count: int) -> list[int]:
    text = list(ids)
    for _ in range(count):
        before = text[-2] if len(text) > 1 else text[-1]
        text.append(int(model.table[before, text[-1]].argmax()))
    return text[len(ids) :]


def decode(target: TableBackend, draft: LlamaDraftModel, ids: list[int], count: int) -> list[int]:
    """As Llama.generate does it: accept while the target agrees, then ask again."""
    text = [*ids, *greedy(target, ids, 1)]
    while len(text) < len(ids) + count:
        for token in [*asked(draft, text), None]:
            (own,) = greedy(target, text, 1)
            text.append(own)
            if own != token:
                break
    return text[len(ids) : len(ids) + count]


def test_it_is_what_llama_takes() -> None:
    assert isinstance(LlamaDraftModel(TableBackend.random(8)), DraftModel)


def test_a_model_drafts_and_reads_only_what_is_new() -> None:
    target = TableBackend.random(8, seed=2)
    model = target.sibling(0.3)
    draft = LlamaDraftModel(model, num_draft_tokens=4)
    prompt = [1, 2, 3] * 40
    assert decode(target, draft, prompt, 60) == greedy(target, prompt, 60)
    assert model.fed_ct < len(prompt) + 4 * 60
    before = model.fed_ct
    assert asked(draft, [*prompt, 5]) == greedy(model, [*prompt, 5], 4)  # a text that begins alike
    assert model.fed_ct - before < 8
    draft.close()
    draft.drafter.clear()
    assert model.open_caches == 0


@settings(max_examples=60)
@given(
    texts=st.lists(st.lists(st.integers(0, 7), max_size=12), max_size=8),
    cuts=st.lists(st.integers(0, 12), min_size=8, max_size=8),
)
def test_any_order_of_texts_gives_what_a_new_one_gives(
    texts: list[list[int]], cuts: list[int]
) -> None:
    model = TableBackend.random(8, seed=1)
    draft, before = LlamaDraftModel(model, num_draft_tokens=3), [0]
    for text, cut in zip(texts, cuts, strict=False):
        before = [*before[:cut], *text]
        assert asked(draft, before) == (greedy(model, before, 3) if before else [])
    assert model.open_caches <= 2


class Spy(Drafter):
    def __init__(self) -> None:
        self.heard: list[Any] = []

    def open(self, prompt_ids: Sequence[int]) -> int:
        self.heard.append(("open", list(prompt_ids)))
        return len(self.heard)

    def commit(self, state: int, ids: Sequence[int]) -> None:
        self.heard.append(("commit", state, list(ids)))

    def close(self, state: int) -> None:
        self.heard.append(("close", state))

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        (request,) = requests
        if request.ids[-1] == 9:
            raise RuntimeFailure("nine")
        return [Draft(request.ids[-request.num_tokens :])]


def test_calls_become_one_sequence_until_the_text_is_another() -> None:
    spy = Spy()
    draft = LlamaDraftModel(spy, num_draft_tokens=2)
    assert asked(draft, [1, 2]) == [1, 2]
    assert asked(draft, [1, 2, 3]) == [2, 3]
    assert asked(draft, [1, 2, 4]) == [2, 4]
    with pytest.raises(RuntimeFailure, match="nine"):
        asked(draft, [1, 2, 4, 9])
    assert asked(draft, [1, 2, 4, 5]) == [4, 5]
    draft.close()
    draft.close()
    assert spy.heard == [
        *[("open", [1, 2]), ("commit", 1, [1, 2, 3]), ("commit", 1, [1, 2, 3]), ("close", 1)],
        *[("open", [1, 2, 4]), ("commit", 5, [1, 2, 4, 9]), ("close", 5)],
        *[("open", [1, 2, 4, 5]), ("commit", 8, [1, 2, 4, 5]), ("close", 8)],
    ]


def test_a_round_ends_with_the_first_id_that_wasnt_drafted() -> None:
    spy = Spy()
    draft = LlamaDraftModel(spy, num_draft_tokens=2)
    for text in ([1, 2], [1, 2, 1, 2], [1, 2, 1, 2, 1, 3, 4, 5], [1, 2, 1, 2, 1, 3, 4, 5]):
        asked(draft, text)
    assert [ids for _, _, ids in spy.heard[1:]] == [
        [1, 2, 1, 2],
        [1, 2, 1, 2, 1, 3],
        [1, 2, 1, 2, 1, 3, 4, 5],
        [1, 2, 1, 2, 1, 3, 4, 5],
    ]


class Scorer(Drafter):
    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        return [Draft([r.sampler.guess(np.zeros((1, 8)), r.ids, []) or 0]) for r in requests]


def test_a_text_is_closed_even_where_its_last_round_fails() -> None:
    class Failing(Spy):
        def commit(self, state: int, ids: Sequence[int]) -> None:
            raise RuntimeFailure("commit")

    spy = Failing()
    draft = LlamaDraftModel(spy)
    asked(draft, [1, 2])
    with pytest.raises(RuntimeFailure, match="commit"):
        draft.close()
    draft.close()
    assert spy.heard == [("open", [1, 2]), ("close", 1)]


class Wild(Drafter):
    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        return [Draft([-1] if r.ids[-1] == 1 else [0] * (r.num_tokens + 1)) for r in requests]


def test_drafts_are_checked() -> None:
    draft = LlamaDraftModel(Wild(), num_draft_tokens=2)
    with pytest.raises(ValueError, match=r"Wild proposed \[-1\]"):
        asked(draft, [1])
    with pytest.raises(ValueError, match="Wild proposed 3 tokens where at most 2 were asked for"):
        asked(draft, [2])


def test_a_few_new_ids_are_read_with_the_first_draft() -> None:
    model = TableBackend.random(8, seed=2)
    draft = LlamaDraftModel(model, num_draft_tokens=4)
    asked(draft, [1, 2, 3] * 40)
    before = model.forward_ct
    asked(draft, [1, 2, 3] * 40 + [4, 5, 6, 7, 0, 1])
    assert model.forward_ct == before + 4


def test_lookups_by_name_and_several_drafters() -> None:
    for lookup in ("lookup", "suffix"):
        assert asked(LlamaDraftModel(lookup, num_draft_tokens=3), [1, 2, 3, 4, 1, 2]) == [3, 4, 1]
    model = TableBackend.random(8, seed=2)
    draft = LlamaDraftModel(["lookup", model], num_draft_tokens=3)
    assert asked(draft, [1, 2, 3]) == greedy(model, [1, 2, 3], 3)
    for _ in range(3):
        assert decode(model, draft, [1, 2, 3] * 9, 40) == greedy(model, [1, 2, 3] * 9, 40)


def test_what_it_refuses() -> None:
    with pytest.raises(TypeError, match="draft must be a backend or a Drafter, not int"):
        LlamaDraftModel([Spy(), 4])  # type: ignore[list-item]
    with pytest.raises(ValueError, match=r"no draft is called 'suffix\+self' here"):
        LlamaDraftModel("suffix+self")
    with pytest.raises(ValueError, match="num_draft_tokens must be at least 1, not 0"):
        LlamaDraftModel(Spy(), num_draft_tokens=0)
    model = TableBackend.random(8)
    scorer = ModelDrafter(model, model.vocab)
    for each in (scorer, CompositeDrafter([Spy(), scorer])):
        with pytest.raises(ValueError, match="give LlamaDraftModel the vocab= of the Llama"):
            LlamaDraftModel(each)
    late = LlamaDraftModel(Scorer())  # which nothing tells before it asks
    with pytest.raises(ValueError, match="give LlamaDraftModel the vocab= of the Llama"):
        asked(late, [1])
    told = LlamaDraftModel(ModelDrafter(model, model.vocab), vocab=model.vocab)
    assert asked(told, [1]) == greedy(model, [1], 8)


def test_a_second_gguf_and_another_tokenizer(tiny_llama: Any, smollm2_gguf: Path) -> None:
    with (
        LlamaCppBackend(tiny_llama.gguf, n_threads=1) as tiny,
        LlamaCppBackend(smollm2_gguf, n_ctx=512, n_threads=1) as real,
    ):
        assert tiny.vocab.encode is not None
        ids = tiny.vocab.encode("the man and the sea and the man and the")
        same = asked(LlamaDraftModel(tiny, num_draft_tokens=3), ids)
        assert len(same) == 3
        other = asked(LlamaDraftModel(real, vocab=tiny.vocab, num_draft_tokens=3), ids)
        assert 1 <= len(other) <= 3
        assert max(other) < tiny.vocab.num_tokens


def test_a_memory_is_cut_to_the_ids_that_are_known() -> None:
    memory = SuffixDrafter(memory_tokens=100)
    texts = LlamaDraftModel(memory)
    for end in range(1, 8):
        asked(texts, [1, 2, 3, 9, 4, 5, 6][:end])
    texts.close()
    small = LlamaDraftModel(memory, vocab=TableBackend.random(8).vocab)
    assert asked(small, [2]) == [3]
    assert asked(LlamaDraftModel(memory), [2]) == [3, 9, 4, 5, 6]


SCRIPT = """
import sys
from llama_cpp import Llama
from specdec_llama_cpp import LlamaCppBackend, LlamaDraftModel

target, draft = sys.argv[1:]
options = dict(n_ctx=256, n_threads=1, n_threads_batch=1, verbose=False)
wanted = dict(max_tokens=24, temperature=0.0)
plain = Llama(target, **options)("the man and", **wanted)["choices"][0]["text"]
print("ran")
model = LlamaDraftModel(LlamaCppBackend(draft, n_threads=1), num_draft_tokens=4)
asked = []
call = model.drafter.propose
model.drafter.propose = lambda requests: asked.append(call(requests)) or asked[-1]
text = Llama(target, draft_model=model, **options)("the man and", **wanted)["choices"][0]["text"]
print("same" if text == plain else f"{plain!r} became {text!r}", len(asked))
"""


def test_in_a_real_llama(tiny_llama: Any, tiny_draft: Any) -> None:
    """In a process of its own: llama-cpp-python's weights are repacked as the machine has it."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tiny_llama.gguf), str(tiny_draft.gguf)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    if "ran" not in done.stdout:
        pytest.skip(f"a plain Llama doesn't run here (exit code {done.returncode})")
    assert done.returncode == 0, done.stderr
    words = done.stdout.split()
    assert words[1] == "same", done.stdout
    assert 0 < int(words[2]) < 24

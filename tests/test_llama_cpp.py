"""The llama.cpp backend, clause by clause, on a tiny random Llama and on a real GGUF."""

import ctypes
import gc
import itertools
import linecache
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from specdec.backend import ModelBackend, Span
from specdec.errors import (
    ContextFullError,
    CropError,
    RuntimeFailure,
    TokenIdError,
)

pytest.importorskip("llama_cpp")

from llama_cpp import llama_cpp as lib

from specdec_llama_cpp import LlamaCppBackend
from specdec_llama_cpp import backend as backend_module
from specdec_llama_cpp import context as context_module
from specdec_llama_cpp import log as log_module
from specdec_llama_cpp.context import Model

IDS = [257, 279, 272, 262, 258, 32, 100, 111, 103, 32, 291, 32, 104, 195, 169, 108, 277, 10, 5, 9]


@pytest.fixture(scope="module")
def backend(tiny_llama: Any) -> Iterator[LlamaCppBackend]:
    """One thread, so that rows can be compared bit for bit."""
    with LlamaCppBackend(tiny_llama.gguf, n_threads=1) as backend:
        yield backend


@pytest.fixture(scope="module")
def smollm2(smollm2_gguf: Path) -> Iterator[LlamaCppBackend]:
    with LlamaCppBackend(smollm2_gguf, n_threads=1) as backend:
        yield backend


def rows_of(backend: LlamaCppBackend, tokens: Sequence[int], num_logits: int) -> Any:
    """What a fresh cache answers."""
    cache = backend.new_cache()
    (rows,) = backend.forward([Span(cache, tokens, num_logits)])
    cache.close()
    return rows.copy()


def assert_close(actual: Any, expected: Any) -> None:
    """Equal up to rounding: logits spread over about 20, and float16 sums depend on their order."""
    np.testing.assert_allclose(actual, expected, rtol=0, atol=0.05)


def fed(backend: LlamaCppBackend, tokens: Sequence[int]) -> Any:
    cache = backend.new_cache()
    backend.forward([Span(cache, tokens, 0)])
    return cache


def some_ids(count: int) -> list[int]:
    return [int(i) for i in np.random.default_rng(count).integers(0, 288, count)]


# Rows


def test_it_is_a_model_backend(backend: LlamaCppBackend) -> None:
    assert isinstance(backend, ModelBackend)
    assert backend.max_context == 512


def test_exact_mode_gives_the_rows_of_transformers(tiny_llama: Any) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_llama.folder, dtype="float32")
    with torch.no_grad():
        expected = model(torch.tensor([IDS])).logits[0].numpy()
    with LlamaCppBackend(tiny_llama.gguf, flash_attention=False, cache_dtype="f32") as exact:
        np.testing.assert_allclose(rows_of(exact, IDS, len(IDS)), expected, rtol=1e-4, atol=1e-4)
    with LlamaCppBackend(tiny_llama.gguf) as usual:
        assert_close(rows_of(usual, IDS, len(IDS)), expected)


def test_c1_a_span_gets_the_rows_of_its_last_tokens(backend: LlamaCppBackend) -> None:
    every = rows_of(backend, IDS, len(IDS))
    assert every.shape == (len(IDS), backend.vocab.size)
    assert every.dtype == np.float32
    np.testing.assert_array_equal(rows_of(backend, IDS, 3), every[-3:])
    assert rows_of(backend, IDS, 0).shape == (0, backend.vocab.size)


def test_c1_padded_vocabularies_have_wide_rows(make_tiny_llama: Any) -> None:
    with LlamaCppBackend(make_tiny_llama(vocab_padding=6).gguf) as padded:
        assert padded.vocab.size == 298
        assert rows_of(padded, IDS, 1).shape == (1, 298)
        assert list(padded.vocab.tokens[-6:]) == [None] * 6


def test_c2_a_batch_gives_what_its_spans_give_alone(backend: LlamaCppBackend) -> None:
    prompts = [IDS[:3], IDS[2:14], IDS[7:8], IDS[4:9], IDS]
    caches = [fed(backend, prompt) for prompt in prompts]
    spans = [
        Span(caches[3], [1, 2, 3], 0),
        Span(caches[0], [4], 1),
        Span(caches[4], [5, 6, 7, 8], 4),
        Span(caches[1], [9, 10], 1),
    ]
    together = [rows.copy() for rows in backend.forward(spans)]
    for span, rows in zip(spans, together, strict=True):
        prompt = prompts[caches.index(span.cache)]
        assert len(span.cache) == len(prompt) + len(span.tokens)
        alone = rows_of(backend, [*prompt, *span.tokens], span.num_logits)
        assert_close(rows, alone)
    assert len(caches[2]) == 1


def test_no_spans_no_rows(backend: LlamaCppBackend) -> None:
    assert backend.forward([]) == []


@pytest.mark.parametrize("n_batch", [1, 7, 20, 64])
def test_long_batches_are_split(tiny_llama: Any, backend: LlamaCppBackend, n_batch: int) -> None:
    whole = rows_of(backend, IDS, 9)
    with LlamaCppBackend(tiny_llama.gguf, n_batch=n_batch, n_threads=1) as split:
        first, second = split.new_cache(), split.new_cache()
        rows = split.forward([Span(first, IDS[:11], 4), Span(second, IDS, 9)])
        assert_close(rows[0], rows_of(backend, IDS[:11], 4))
        assert_close(rows[1], whole)


def test_a_token_has_the_same_row_alone_and_with_others(smollm2: LlamaCppBackend) -> None:
    cache = fed(smollm2, IDS)
    tokens = some_ids(17)
    narrow = [smollm2.forward([Span(cache, [token], 1)])[0].copy() for token in tokens]
    for width in (2, 5, 17):
        smollm2.crop(cache, len(IDS))
        (wide,) = smollm2.forward([Span(cache, tokens[:width], width)])
        np.testing.assert_array_equal(wide, np.concatenate(narrow[:width]))


# Crops


@pytest.mark.parametrize("which", ["backend", "smollm2"])
def test_c3_crop_then_forward_equals_never_having_been_there(
    request: pytest.FixtureRequest, which: str
) -> None:
    backend: LlamaCppBackend = request.getfixturevalue(which)
    cache = fed(backend, [*IDS, 1, 2, 3])
    backend.crop(cache, len(IDS))
    assert len(cache) == len(IDS)
    (rows,) = backend.forward([Span(cache, [50, 60], 2)])
    np.testing.assert_array_equal(rows, rows_of(backend, [*IDS, 50, 60], 2))


def test_c3_a_crop_to_nothing_and_to_the_present_length(backend: LlamaCppBackend) -> None:
    cache = fed(backend, IDS)
    backend.crop(cache, len(IDS))
    assert len(cache) == len(IDS)
    backend.crop(cache, 0)
    assert len(cache) == 0
    (rows,) = backend.forward([Span(cache, IDS, 1)])
    np.testing.assert_array_equal(rows, rows_of(backend, IDS, 1))


Moves = list[tuple[int, int]]
moves = st.lists(st.tuples(st.integers(0, 2), st.integers(-12, 12)), max_size=25)


@given(moves)
@settings(deadline=None, max_examples=15)
def test_c3_caches_follow_a_list_of_tokens(backend: LlamaCppBackend, moves: Moves) -> None:
    """Forwards (positive) and crops (negative) of three sequences, against fresh caches."""
    caches = [backend.new_cache() for _ in range(3)]
    texts: list[list[int]] = [[], [], []]
    for which, step in moves:
        cache, text = caches[which], texts[which]
        if step > 0:
            new = some_ids(step)
            backend.forward([Span(cache, new, 1)])
            text += new
        else:
            del text[max(0, len(text) + step) :]
            backend.crop(cache, len(text))
        assert [len(cache) for cache in caches] == [len(text) for text in texts]
    for cache, text in zip(caches, texts, strict=True):
        (rows,) = backend.forward([Span(cache, [42], 1)])
        rows = rows.copy()
        assert_close(rows, rows_of(backend, [*text, 42], 1))
        cache.close()


def test_c3_a_refused_crop_is_an_error(
    backend: LlamaCppBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = fed(backend, IDS)
    for result in (False, True):  # True, and nothing done: the length is looked at as well
        with monkeypatch.context() as patch:
            patch.setattr(lib, "llama_memory_seq_rm", lambda *_args, result=result: result)
            with pytest.raises(CropError, match="from 20 to 5 tokens"):
                backend.crop(cache, 5)
        assert len(cache) == len(IDS)
        (rows,) = backend.forward([Span(cache, [3], 1)])
        assert_close(rows, rows_of(backend, [*IDS, 3], 1))
        backend.crop(cache, len(IDS))


# Errors before anything changes


def test_c4_bad_calls_change_nothing(backend: LlamaCppBackend) -> None:
    cache, other = fed(backend, IDS), fed(backend, [1])
    size = backend.vocab.size
    bad: list[tuple[type[Exception], Callable[[], object]]] = [
        (CropError, lambda: backend.crop(cache, len(IDS) + 1)),
        (CropError, lambda: backend.crop(cache, -1)),
        (
            ContextFullError,
            lambda: backend.forward([Span(other, [1], 1), Span(cache, [1] * 500, 0)]),
        ),
        (TokenIdError, lambda: backend.forward([Span(other, [1], 1), Span(cache, [size], 1)])),
        (TokenIdError, lambda: backend.forward([Span(other, [1], 1), Span(cache, [-1], 1)])),
        (ValueError, lambda: backend.forward([Span(cache, [], 0)])),
        (ValueError, lambda: backend.forward([Span(cache, [1], 2)])),
        (ValueError, lambda: backend.forward([Span(cache, [1], 1), Span(cache, [2], 1)])),
    ]
    for error, call in bad:
        with pytest.raises(error):
            call()
    assert (len(cache), len(other)) == (len(IDS), 1)
    (rows,) = backend.forward([Span(cache, [3], 1)])
    assert_close(rows, rows_of(backend, [*IDS, 3], 1))


def test_c4_a_cache_can_be_filled_to_the_last_token(tiny_llama: Any) -> None:
    with LlamaCppBackend(tiny_llama.gguf, n_ctx=24) as small:
        cache = fed(small, IDS)
        assert small.forward([Span(cache, [1, 2, 3, 4], 1)])[0].shape == (1, small.vocab.size)
        with pytest.raises(ContextFullError, match="24"):
            small.forward([Span(cache, [5], 1)])


# Rows in use, failures, repetition


def test_c6_rows_outlive_everything_but_a_forward(tiny_llama: Any) -> None:
    backend = LlamaCppBackend(tiny_llama.gguf, n_threads=1)
    cache = fed(backend, IDS)
    (rows,) = backend.forward([Span(cache, [1, 2, 3], 3)])
    before = rows.copy()
    assert not rows.flags.owndata
    backend.crop(cache, 4)
    caches = [backend.new_cache() for _ in range(9)]
    caches.pop().close()
    np.testing.assert_array_equal(rows, before)
    backend.close()
    del backend, cache, caches
    gc.collect()
    np.testing.assert_array_equal(rows, before)


def failing_decode(*, at: int, outcome: int | BaseException) -> Callable[[Any, Any], int]:
    """A llama_decode that does its work and then fails, at its ``at``-th call."""
    real, calls = lib.llama_decode, iter(range(1000))

    def decode(context: Any, batch: Any) -> int:
        code = int(real(context, batch))
        if next(calls) < at:
            return code
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    return decode


@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize(
    ("outcome", "error"),
    [
        (1, RuntimeFailure),
        (2, RuntimeFailure),
        (-3, RuntimeFailure),
        (KeyboardInterrupt(), KeyboardInterrupt),
    ],
)
def test_c7_after_a_failure_every_cache_is_as_before(
    tiny_llama: Any,
    monkeypatch: pytest.MonkeyPatch,
    at: int,
    outcome: int | BaseException,
    error: type[BaseException],
) -> None:
    with LlamaCppBackend(tiny_llama.gguf, n_batch=8, n_threads=1) as backend:
        first, second = fed(backend, IDS), fed(backend, IDS[:4])
        with monkeypatch.context() as patch:
            patch.setattr(lib, "llama_decode", failing_decode(at=at, outcome=outcome))
            with pytest.raises(error):
                backend.forward([Span(first, some_ids(9), 1), Span(second, some_ids(6), 6)])
        assert (len(first), len(second)) == (len(IDS), 4)
        rows = [r.copy() for r in backend.forward([Span(second, [7], 1), Span(first, [8, 9], 2)])]
        assert_close(rows[0], rows_of(backend, [*IDS[:4], 7], 1))
        assert_close(rows[1], rows_of(backend, [*IDS, 8, 9], 2))


def test_c7_an_interrupt_at_any_line_leaves_every_cache_as_before(
    backend: LlamaCppBackend,
) -> None:
    first, second = fed(backend, IDS), fed(backend, IDS[:4])
    expected = rows_of(backend, [*IDS, 7], 1), rows_of(backend, [*IDS[:4], 8], 1)
    for line in itertools.count(1):
        try:
            with interrupted(at_line=line):
                backend.forward([Span(first, [1, 2], 1), Span(second, [3], 1)])
        except KeyboardInterrupt:
            assert (len(first), len(second)) == (len(IDS), 4)
        else:
            break
        for found, rows in zip(
            backend.forward([Span(first, [7], 1), Span(second, [8], 1)]), expected, strict=True
        ):
            assert_close(found, rows)
        backend.crop(first, len(IDS))
        backend.crop(second, 4)
    assert line > 50


@contextmanager
def interrupted(*, at_line: int) -> Iterator[None]:
    """Ctrl-C before the n-th line that runs in the backend.

    Not at ``with lock`` and ``try``, where only a tracer can raise and the lock stays taken.
    """
    files, lines = (backend_module.__file__, context_module.__file__), itertools.count(1)

    def trace(frame: FrameType, event: str, _arg: object) -> Any:
        file = frame.f_code.co_filename
        if file not in files:
            return None
        line = linecache.getline(file, frame.f_lineno)
        counts = event == "line" and "_lock" not in line and line.strip() != "try:"
        if counts and next(lines) == at_line:
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


def test_c7_a_failed_growth_changes_nothing(
    make_tiny_llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LlamaCppBackend(make_tiny_llama(max_context=2048).gguf, n_threads=1) as backend:
        cache = fed(backend, IDS)
        for name in ("llama_init_from_model", "llama_state_seq_set_data_ext"):
            with monkeypatch.context() as patch:
                patch.setattr(lib, name, lambda *_args: 0)
                with pytest.raises(RuntimeFailure, match="1024"):
                    backend.forward([Span(cache, some_ids(600), 1)])
            assert len(cache) == len(IDS)
            (rows,) = backend.forward([Span(cache, [3], 1)])
            assert_close(rows, rows_of(backend, [*IDS, 3], 1))
            backend.crop(cache, len(IDS))


def test_c8_the_same_calls_give_the_same_rows(tiny_llama: Any) -> None:
    def script() -> Any:
        with LlamaCppBackend(tiny_llama.gguf, n_threads=2) as backend:
            cache, other = fed(backend, IDS), fed(backend, IDS[5:])
            backend.crop(cache, 11)
            rows = backend.forward([Span(other, [1, 2], 2), Span(cache, [3, 4, 5], 3)])
            return np.concatenate(rows)

    np.testing.assert_array_equal(script(), script())


# Growth


@pytest.mark.parametrize(("model", "slots", "tokens"), [("tiny", 20, 25), ("smollm2", 6, 1)])
def test_growth_moves_sequences_bit_for_bit(
    tiny_llama: Any, smollm2_gguf: Path, model: str, slots: int, tokens: int
) -> None:
    path = tiny_llama.gguf if model == "tiny" else smollm2_gguf
    with LlamaCppBackend(path, n_threads=1) as backend:
        caches = [fed(backend, some_ids(30 + i)) for i in range(3)]

        def answers() -> list[Any]:
            found = []
            for cache in caches:
                length = len(cache)
                (rows,) = backend.forward([Span(cache, [5, 6, 7], 3)])
                found.append(rows.copy())
                backend.crop(cache, length)
            return found

        before = answers()
        first = backend._context
        more = [backend.new_cache() for _ in range(slots)]
        backend.forward([Span(cache, some_ids(tokens), 0) for cache in more])
        assert backend._context is not first
        np.testing.assert_array_equal(answers(), before)


def test_a_sequence_that_outgrows_its_context(make_tiny_llama: Any) -> None:
    path, text = make_tiny_llama(max_context=2048).gguf, some_ids(1100)
    with (
        LlamaCppBackend(path, n_threads=1) as growing,
        LlamaCppBackend(path, n_threads=1) as roomy,
    ):
        fed(roomy, some_ids(2000)).close()
        caches = {backend: fed(backend, text[:300]) for backend in (growing, roomy)}
        for start in range(300, 1100, 40):
            (grown,) = growing.forward([Span(caches[growing], text[start : start + 40], 2)])
            (plain,) = roomy.forward([Span(caches[roomy], text[start : start + 40], 2)])
            np.testing.assert_array_equal(grown, plain)


def test_room_keeps_to_one_side_of_a_longrope_limit(
    make_tiny_llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LongRoPE models take other rotary factors where the context has more room than a limit."""
    real = Model.metadata

    def metadata(model: Model, key: str) -> str | None:
        return "1024" if key.endswith("original_context_length") else real(model, key)

    monkeypatch.setattr(Model, "metadata", metadata)
    path = make_tiny_llama(max_context=2048).gguf
    with LlamaCppBackend(path) as long:
        fed(long, IDS)
        assert long._context is not None
        assert long._context.cells > 1024
    with LlamaCppBackend(path, n_ctx=1000) as short:
        kept = fed(short, some_ids(600))
        with pytest.raises(RuntimeFailure, match="need 1200 tokens"):
            fed(short, some_ids(600))
        assert short.forward([Span(kept, [1] * 400, 1)])[0].shape == (1, short.vocab.size)


# Caches and lifetimes


def test_forgotten_and_closed_caches_give_their_slots_back(backend: LlamaCppBackend) -> None:
    for _ in range(300):
        fed(backend, IDS)
    closed = [fed(backend, IDS) for _ in range(40)]
    for cache in closed:
        cache.close()
        cache.close()
        assert len(cache) == 0
    assert rows_of(backend, IDS, 1).shape == (1, backend.vocab.size)


def test_too_many_open_caches(tiny_llama: Any) -> None:
    with LlamaCppBackend(tiny_llama.gguf) as backend:
        limit = lib.llama_max_parallel_sequences()
        caches = [backend.new_cache() for _ in range(limit)]
        with pytest.raises(RuntimeFailure, match=f"{limit} caches are open"):
            backend.new_cache()
        rows = backend.forward([Span(cache, [3], 1) for cache in caches])
        assert_close(rows[-1], rows[0])
        caches.pop().close()
        assert len(backend.new_cache()) == 0


def test_closed_and_foreign_caches_are_refused(tiny_llama: Any, backend: LlamaCppBackend) -> None:
    cache = fed(backend, IDS)
    with LlamaCppBackend(tiny_llama.gguf) as other:
        for call in (lambda: other.crop(cache, 0), lambda: other.forward([Span(cache, [1], 1)])):
            with pytest.raises(ValueError, match="another backend"):
                call()
    cache.close()
    for call in (lambda: backend.crop(cache, 0), lambda: backend.forward([Span(cache, [1], 1)])):
        with pytest.raises(ValueError, match="is closed"):
            call()


def test_a_closed_backend_frees_its_weights_and_says_so(tiny_llama: Any) -> None:
    backend = LlamaCppBackend(tiny_llama.gguf)
    cache, vocab = fed(backend, IDS), backend.vocab
    assert backend._model is not None
    weights = weakref.ref(backend._model)
    backend.close()
    backend.close()
    assert weights() is None
    for call in (backend.new_cache, lambda: backend.forward([Span(cache, [1], 1)])):
        with pytest.raises(ValueError, match="closed"):
            call()
    assert vocab.encode is not None
    with pytest.raises(ValueError, match="closed"):
        vocab.encode("the")


def test_a_forgotten_backend_frees_its_weights(tiny_llama: Any) -> None:
    backend = LlamaCppBackend(tiny_llama.gguf)
    cache = fed(backend, IDS)
    assert backend._model is not None
    weights = weakref.ref(backend._model)
    del backend
    assert weights() is None
    assert len(cache) == len(IDS)


def test_threads_take_turns(backend: LlamaCppBackend) -> None:
    texts = [some_ids(30 + i) for i in range(4)]
    found: dict[int, Any] = {}

    def work(i: int) -> None:
        cache = backend.new_cache()
        for token in texts[i]:
            backend.forward([Span(cache, [token], 0)])
        found[i] = cache

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, text in enumerate(texts):
        (rows,) = backend.forward([Span(found[i], [1], 1)])
        rows = rows.copy()
        assert_close(rows, rows_of(backend, [*text, 1], 1))


# Vocabulary


@pytest.fixture(scope="module")
def hf_tokenizer(tiny_llama: Any) -> Any:
    return pytest.importorskip("transformers").AutoTokenizer.from_pretrained(tiny_llama.folder)


def encode(backend: LlamaCppBackend, text: str) -> list[int]:
    assert backend.vocab.encode is not None
    return backend.vocab.encode(text)


def test_the_table_spells_bytes_and_special_tokens(backend: LlamaCppBackend) -> None:
    vocab = backend.vocab
    assert sorted(t for t in vocab.tokens[:256] if t) == [bytes([i]) for i in range(256)]
    assert list(vocab.tokens[-4:]) == [b"<|bos|>", b"<|eos|>", b"<|im_start|>", b"<|im_end|>"]
    assert vocab.special_ids == {288, 289, 290, 291}
    assert vocab.eos_ids == {289, 291}
    assert vocab.bos_id == 288
    assert vocab.spell(encode(backend, " the")[0]) == b" the"


def test_encoding_equals_transformers(backend: LlamaCppBackend, hf_tokenizer: Any) -> None:
    text = "the cat and the dog<|im_end|> héllo 42\n\n  x ✓"
    assert encode(backend, text) == hf_tokenizer(text).input_ids
    messages = [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "é"}]
    assert backend.vocab.encode_chat is not None
    assert backend.vocab.encode_chat(messages) == hf_tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False
    )


@given(st.text())
@settings(deadline=None)
def test_ids_spell_the_text_again(backend: LlamaCppBackend, text: str) -> None:
    ids = encode(backend, text)
    assert b"".join(map(backend.vocab.spell, ids)) == text.encode()


@given(st.text())
@settings(deadline=None, max_examples=50)
def test_ids_spell_the_text_again_with_a_real_tokenizer(
    smollm2: LlamaCppBackend, text: str
) -> None:
    known = {token[0] for token in smollm2.vocab.tokens if token and len(token) == 1}
    assume(known.issuperset(text.encode()))  # some bytes have no token in this model
    ids = encode(smollm2, text)
    assert b"".join(map(smollm2.vocab.spell, ids)) == text.encode()


def test_bos_comes_once_where_the_model_wants_it(
    make_tiny_llama: Any, backend: LlamaCppBackend
) -> None:
    plain = encode(backend, "the cat")
    assert 288 not in plain
    with LlamaCppBackend(make_tiny_llama(add_bos=True).gguf) as eager:
        assert encode(eager, "the cat") == [288, *plain]
        assert eager.vocab.encode_chat is not None
        assert eager.vocab.encode_chat([{"role": "user", "content": "the cat"}])[0] == 290


def test_a_real_models_vocabulary(smollm2: LlamaCppBackend) -> None:
    vocab = smollm2.vocab
    assert vocab.size == len(vocab.tokens) == 49152
    assert vocab.bos_id == 1
    assert vocab.tokens[2] == b"<|im_end|>"
    assert 2 in vocab.eos_ids
    assert 1 not in encode(smollm2, "Hello")
    assert vocab.encode_chat is not None
    chat = vocab.encode_chat([{"role": "user", "content": "Hello"}])
    literal = b"".join(vocab.tokens[i] or b"" for i in chat).decode()
    assert literal.startswith("<|im_start|>system\n")
    assert literal.endswith("<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n")


def test_messages_that_the_template_refuses(backend: LlamaCppBackend) -> None:
    assert backend.vocab.encode_chat is not None
    with pytest.raises(ValueError, match=r"template of model\.gguf .*: unknown role"):
        backend.vocab.encode_chat([{"role": "oracle", "content": "42"}])


def test_a_file_without_a_tokenizer_needs_a_vocabulary(
    make_tiny_llama: Any, backend: LlamaCppBackend
) -> None:
    bare = make_tiny_llama(with_tokenizer=False)
    with pytest.raises(ValueError, match=r"no tokenizer.*pass vocab="):
        LlamaCppBackend(bare.gguf)
    with LlamaCppBackend(bare.gguf, vocab=backend.vocab, n_threads=1) as dressed:
        assert dressed.vocab is backend.vocab
        np.testing.assert_array_equal(rows_of(dressed, IDS, 2), rows_of(backend, IDS, 2))
    with pytest.raises(ValueError, match=r"292 ids.*298 wide"):
        LlamaCppBackend(make_tiny_llama(vocab_padding=6).gguf, vocab=backend.vocab)


def test_a_real_model_writes_english(smollm2: LlamaCppBackend) -> None:
    cache = smollm2.new_cache()
    tokens = encode(smollm2, "The capital of France is")
    written = []
    for _ in range(4):
        (rows,) = smollm2.forward([Span(cache, tokens, 1)])
        tokens = [int(rows[0].argmax())]
        written += tokens
    assert b"Paris" in b"".join(map(smollm2.vocab.spell, written))


# Arguments


def test_paths_are_checked_before_loading(tiny_llama: Any, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"nowhere\.gguf"):
        LlamaCppBackend(tmp_path / "nowhere.gguf")
    with pytest.raises(ValueError, match="is a folder"):
        LlamaCppBackend(tiny_llama.folder)
    with pytest.raises(ValueError, match=r"not a GGUF file: it starts with b'\{"):
        LlamaCppBackend(tiny_llama.folder / "tokenizer.json")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n_ctx": 0}, "n_ctx=0: .* 1 to 512"),
        ({"n_ctx": 513}, "n_ctx=513: .* 1 to 512"),
        ({"n_batch": 0}, "n_batch=0"),
        ({"n_threads": 0}, "n_threads=0"),
        ({"cache_dtype": "q2"}, "cache_dtype='q2': give one of f32, f16, q8_0"),
        ({"cache_dtype": "q8_0", "flash_attention": False}, "needs flash_attention"),
    ],
)
def test_bad_arguments(tiny_llama: Any, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LlamaCppBackend(tiny_llama.gguf, **arguments)


def test_info_says_what_it_runs_on(backend: LlamaCppBackend) -> None:
    info = backend.info()
    assert info["runtime"] == "llama.cpp"
    assert info["device"] == "cpu"
    assert info["architecture"] == "llama"
    assert (info["context"], info["threads"], info["batch"]) == (512, 1, 512)
    assert info["gpu_offload_available"] == lib.llama_supports_gpu_offload()


def test_info_counts_the_weights_without_the_header(
    tiny_llama: Any, backend: LlamaCppBackend
) -> None:
    file_bytes = tiny_llama.gguf.stat().st_size
    assert 0.5 * file_bytes < backend.info()["weight_bytes"] < file_bytes


def test_layers_for_a_gpu_that_the_build_lacks(
    tiny_llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lib, "llama_supports_gpu_offload", lambda: False)
    with pytest.warns(UserWarning, match=r"n_gpu_layers=-1, but .*GGML_CUDA=on"):
        backend = LlamaCppBackend(tiny_llama.gguf, n_gpu_layers=-1)
    assert backend.info()["device"] == "cpu"
    backend.close()


@pytest.mark.gpu("llama_cpp")
def test_rows_from_a_gpu(tiny_llama: Any, backend: LlamaCppBackend) -> None:
    with LlamaCppBackend(tiny_llama.gguf, n_gpu_layers=-1) as gpu:
        assert gpu.info()["device"] == "gpu"
        cache = fed(gpu, [*IDS, 1, 2])
        gpu.crop(cache, len(IDS))
        (rows,) = gpu.forward([Span(cache, [50, 60], 2)])
        np.testing.assert_allclose(rows, rows_of(backend, [*IDS, 50, 60], 2), atol=0.1)


# The log


def log_callback() -> int | None:
    callback, data = lib.llama_log_callback(), ctypes.c_void_p()
    lib.llama_log_get(ctypes.byref(callback), ctypes.byref(data))
    return ctypes.cast(callback, ctypes.c_void_p).value


def test_the_log_is_silent_and_given_back(
    tiny_llama: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    before = log_callback()
    backend = LlamaCppBackend(tiny_llama.gguf)
    fed(backend, IDS)
    backend.close()
    del backend
    assert log_callback() == before
    assert capfd.readouterr() == ("", "")
    backend = LlamaCppBackend(tiny_llama.gguf, verbose=True)
    assert "llama_model_loader" in capfd.readouterr().err
    backend.close()


def test_what_llama_cpp_says_is_in_the_error(tiny_llama: Any, tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(tiny_llama.gguf.read_bytes()[:100_000])
    with pytest.raises(RuntimeFailure, match=r"can't load .*cut\.gguf: .*tensor"):
        LlamaCppBackend(path)


def test_threads_that_share_a_backend_get_their_own_rows(tiny_llama: Any) -> None:
    """Each thread reads its rows when the others have long gone on."""
    with LlamaCppBackend(tiny_llama.gguf, n_threads=1) as backend:

        def run(seed: int) -> list[np.ndarray[Any, Any]]:
            ids = np.random.default_rng(seed).integers(0, 256, 12).tolist()
            with closing(backend.new_cache()) as cache:
                return [backend.forward([Span(cache, [token], 1)])[0] for token in ids]

        alone = [run(seed) for seed in range(4)]
        with ThreadPoolExecutor(4) as pool:
            for _ in range(5):
                for rows, expected in zip(pool.map(run, range(4)), alone, strict=True):
                    for row, other in zip(rows, expected, strict=True):
                        assert_close(row, other)


def test_an_interrupt_inside_the_log_comes_out_of_the_call() -> None:
    """Python swallows what is raised in a callback from C."""

    class Interrupted(list[str]):
        def append(self, _line: str) -> None:
            raise KeyboardInterrupt

    def interrupted_call() -> None:
        with log_module.borrowed_log():
            log_module._reader.errors = Interrupted()
            log_module._receive(log_module.ERROR, b"some line", None)

    with pytest.raises(KeyboardInterrupt):
        interrupted_call()
    with log_module.borrowed_log() as errors:
        log_module._receive(log_module.ERROR, b"another", None)
    assert errors == ["another"]

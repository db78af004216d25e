"""A draft from the model itself: what is kept, what is made anew, and what is refused."""

import errno
import os
import shutil
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NoReturn

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec import MissingRuntimeError, SpeculativeDecoder
from specdec.errors import BackendError, RuntimeFailure, UnsupportedModelError

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("gguf")
pytest.importorskip("llama_cpp")

from specdec_hf import HFBackend  # noqa: E402 - after the skips
from specdec_hf import fingerprint as fingerprint_module  # noqa: E402
from specdec_hf import self_draft as self_draft_module  # noqa: E402
from specdec_hf.export import plan  # noqa: E402
from specdec_hf.fingerprint import fingerprint  # noqa: E402
from specdec_hf.self_draft import self_draft, write_quantized  # noqa: E402
from specdec_llama_cpp import LlamaCppBackend  # noqa: E402
from specdec_llama_cpp import quantize as quantize_module  # noqa: E402

module: Any = self_draft_module  # whose imports are exchanged below
write_gguf: Callable[..., str | None] = module.write_gguf

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPTS = ["the theatre and the sea", "in", "a b c d e f g h i j k l m n o p q r s t u v w x y z"]


@pytest.fixture
def target(tiny_llama: Any) -> HFBackend:
    return HFBackend(tiny_llama.folder)


@pytest.fixture
def exports(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files that models were written to, as it happens."""
    written: list[Path] = []

    def spy(model: Any, path: Path, **options: Any) -> str | None:
        written.append(path)
        return write_gguf(model, path, **options)

    monkeypatch.setattr(module, "write_gguf", spy)
    return written


def make(target: HFBackend, folder: Path, kind: str = "q8_0") -> bytes:
    """What is in the one file of the folder, after a draft was loaded from it."""
    with self_draft(target, kind, folder=folder) as draft:
        assert draft.vocab is target.vocab
    (file,) = folder.iterdir()
    return file.read_bytes()


def accept_rate(target: HFBackend, draft: LlamaCppBackend) -> float:
    """Of greedy drafts, which must not change the output of a target in float32."""
    drafted = accepted = 0
    for prompt in PROMPTS:
        plain = SpeculativeDecoder(target).generate(prompt, max_new_tokens=40)
        result = SpeculativeDecoder(target, draft, num_draft_tokens=4).generate(
            prompt, max_new_tokens=40
        )
        if target.model.dtype == torch.float32:
            assert result.token_ids == plain.token_ids
        accepted += result.stats.num_correct_drafts
        drafted += result.stats.num_proposed_drafts
    return accepted / drafted


# What is kept.


def test_the_second_time_nothing_is_exported(
    tiny_llama: Any, target: HFBackend, exports: list[Path], tmp_path: Path
) -> None:
    """The same model loaded from elsewhere is the same model."""
    moved = shutil.copytree(tiny_llama.folder, tmp_path / "moved")
    folder = tmp_path / "cache"
    for again in (target, target, HFBackend(moved)):
        make(again, folder)
    assert len(exports) == 1
    (file,) = folder.iterdir()
    assert file.name.startswith("llama-q8_0-")
    for kind in ("q4_0", "Q4_0"):
        self_draft(target, kind, folder=folder).close()
    assert len(exports) == len(list(folder.iterdir())) == 2


def test_another_weight_or_setting_is_another_file(
    target: HFBackend, exports: list[Path], tmp_path: Path
) -> None:
    def files() -> int:
        self_draft(target, "q8_0", folder=tmp_path).close()
        return len(list(tmp_path.iterdir()))

    assert files() == 1
    head = target.model.lm_head.weight
    with torch.no_grad():
        head[5, 7] += 1.0
        assert files() == 2
        head[5, 7] -= 1.0
    target.model.config.rms_norm_eps *= 2
    for norm in (m for m in target.model.modules() if hasattr(m, "variance_epsilon")):
        norm.variance_epsilon *= 2
    assert files() == 3
    assert len(exports) == 3


@pytest.mark.parametrize("left", [0.999, 0.9, 0.5, 0.03, 0.001, 0.0])
def test_a_truncated_file_is_made_anew(
    target: HFBackend, exports: list[Path], tmp_path: Path, left: float
) -> None:
    whole = make(target, tmp_path)
    (file,) = tmp_path.iterdir()
    file.write_bytes(whole[: int(left * len(whole))])
    assert make(target, tmp_path) == whole
    assert len(exports) == 2


@pytest.mark.parametrize("where", [0.001, 0.3, 0.9999])
def test_a_damaged_file_is_made_anew(
    target: HFBackend, exports: list[Path], tmp_path: Path, where: float
) -> None:
    whole = make(target, tmp_path)
    (file,) = tmp_path.iterdir()
    damaged = bytearray(whole)
    damaged[int(where * len(whole))] ^= 1
    file.write_bytes(damaged)
    assert make(target, tmp_path) == whole
    assert len(exports) == 2


def test_what_a_killed_process_left_is_removed_after_a_day(
    target: HFBackend, tmp_path: Path
) -> None:
    old, young = tmp_path / ".specdec-old", tmp_path / ".specdec-young"
    for room in (old, young):
        room.mkdir()
        (room / "whole.gguf").write_bytes(b"GGUF")
    os.utime(old, (0, 0))
    self_draft(target, "q8_0", folder=tmp_path).close()
    assert young.exists()
    assert not old.exists()


@pytest.mark.parametrize("foreign", ["noise", "without a key", "of another model"])
def test_a_foreign_file_is_made_anew(
    make_tiny_llama: Any, target: HFBackend, exports: list[Path], tmp_path: Path, foreign: str
) -> None:
    other = make_tiny_llama(seed=1)
    folder = tmp_path / "cache"
    whole = make(target, folder)
    (file,) = folder.iterdir()
    contents = {
        "noise": bytes(range(256)) * 100,
        "without a key": other.gguf.read_bytes(),
        "of another model": make(HFBackend(other.folder), tmp_path / "other"),
    }
    file.write_bytes(contents[foreign])
    assert make(target, folder) == whole
    assert len(exports) == 3


def test_two_at_once_leave_one_whole_file(tiny_llama: Any, tmp_path: Path) -> None:
    targets = [HFBackend(tiny_llama.folder) for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        drafts = list(pool.map(lambda t: self_draft(t, "q8_0", folder=tmp_path), targets))
    rates = [accept_rate(target, draft) for target, draft in zip(targets, drafts, strict=True)]
    assert len(set(rates)) == 1
    assert len(list(tmp_path.iterdir())) == 1


def test_where_files_are_kept(
    target: HFBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen, usual = tmp_path / "chosen" / "deep", tmp_path / "usual"
    monkeypatch.setenv("SPECDEC_CACHE", str(chosen))
    monkeypatch.setattr(module.platformdirs, "user_cache_path", lambda name: usual / name)
    target.self_draft("q8_0").close()
    assert len(list(chosen.iterdir())) == 1
    assert not usual.exists()
    monkeypatch.delenv("SPECDEC_CACHE")
    target.self_draft("q8_0").close()
    assert len(list((usual / "specdec").iterdir())) == 1


# What the key sees.


def test_a_fingerprint_sees_every_bit(tiny_llama: Any) -> None:
    model = HFBackend(tiny_llama.folder).model
    before = fingerprint(model)
    weights = [parameter.data.view(torch.uint8).view(-1) for parameter in model.parameters()]

    @settings(max_examples=25)
    @given(st.sampled_from(range(len(weights))), st.integers(0, 2**40), st.integers(0, 7))
    def flip(which: int, where: int, bit: int) -> None:
        weights[which][where % len(weights[which])] ^= 1 << bit
        assert fingerprint(model) != before
        weights[which][where % len(weights[which])] ^= 1 << bit
        assert fingerprint(model) == before

    flip()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_fingerprint_is_of_values(
    tiny_llama: Any, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    """However they lie in memory, and however they are cut into pieces."""
    model = HFBackend(tiny_llama.folder, dtype=dtype).model
    before = fingerprint(model)
    for layer in model.model.layers:
        weight = layer.mlp.up_proj.weight
        weight.data = weight.data.t().contiguous().t()
        assert not weight.is_contiguous()
    assert fingerprint(model) == before
    monkeypatch.setattr(fingerprint_module, "PIECE", 1000)
    assert fingerprint(model) == before
    assert fingerprint(model, "q4_0") != before
    assert fingerprint(model.float()) != before or dtype == "float32"


def test_a_fingerprint_sees_tied_weights_once_and_asks_for_all() -> None:
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        tie_word_embeddings=True,
    )
    tied = plan(transformers.LlamaForCausalLM(config)).entries
    assert {"token_embd.weight", "output.weight"} & {entry.name for entry in tied} == {
        "token_embd.weight"
    }
    with torch.device("meta"):
        absent = transformers.LlamaForCausalLM(config)
    with pytest.raises(UnsupportedModelError, match="is not in memory"):
        fingerprint(absent)


@pytest.mark.gpu("torch")
def test_a_fingerprint_is_the_same_on_the_gpu(tiny_llama: Any) -> None:
    on_cpu, on_gpu = (HFBackend(tiny_llama.folder, device=where).model for where in ("cpu", "cuda"))
    assert fingerprint(on_cpu) == fingerprint(on_gpu)


# What goes wrong.


def test_a_folder_that_cannot_be_written(target: HFBackend, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    for folder in (tmp_path / "file", tmp_path / "file" / "deeper"):
        with pytest.raises(BackendError, match=r"can't write to .*file.*: set SPECDEC_CACHE to"):
            self_draft(target, folder=folder)
    with pytest.raises(BackendError, match=r"can't write to .*nosuch .*: choose a folder"):
        write_quantized(target, tmp_path / "nosuch" / "out.gguf", "q8_0")


def test_too_little_room_is_said_before_anything_is_written(
    target: HFBackend, exports: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=700_000))
    message = r"a q4_0 file takes 714.3 kB for a while, 700.0 kB left\): set SPECDEC_CACHE to"
    with pytest.raises(BackendError, match=message):
        self_draft(target, "q4_0", folder=tmp_path)
    assert not exports
    assert not os.listdir(tmp_path)
    self_draft(target, "q2_k", folder=tmp_path).close()


Breaks = Callable[[pytest.MonkeyPatch], type[BaseException]]


def disk_full_in_the_export(monkeypatch: pytest.MonkeyPatch) -> type[BaseException]:
    def fail(_model: Any, path: Path, **_options: Any) -> NoReturn:
        path.write_bytes(b"GGUF and so on")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(module, "write_gguf", fail)
    return BackendError


def disk_full_in_llama_cpp(monkeypatch: pytest.MonkeyPatch) -> type[BaseException]:
    def fail(_source: Path, target: Path, *_: Any, **__: Any) -> NoReturn:
        target.write_bytes(b"GGUF and so on")
        raise RuntimeFailure("llama.cpp can't make small.gguf: iostream error")

    monkeypatch.setattr(quantize_module, "quantize", fail)
    return BackendError


def interrupted_in_the_export(monkeypatch: pytest.MonkeyPatch) -> type[BaseException]:
    def interrupt(done: int, total: int) -> None:
        if 2 * done > total:
            raise KeyboardInterrupt

    def write(model: Any, path: Path, **options: Any) -> str | None:
        return write_gguf(model, path, **options | {"progress": interrupt})

    monkeypatch.setattr(module, "write_gguf", write)
    return KeyboardInterrupt


def interrupted_in_llama_cpp(monkeypatch: pytest.MonkeyPatch) -> type[BaseException]:
    quantize = quantize_module.quantize

    def interrupt(done: int, total: int) -> None:
        if 2 * done > total:
            raise KeyboardInterrupt

    monkeypatch.setattr(
        quantize_module,
        "quantize",
        lambda *arguments, **_: quantize(*arguments, progress=interrupt),
    )
    return KeyboardInterrupt


@pytest.mark.parametrize(
    "breaks",
    [
        disk_full_in_the_export,
        disk_full_in_llama_cpp,
        interrupted_in_the_export,
        interrupted_in_llama_cpp,
    ],
)
def test_nothing_is_left_of_what_breaks_in_the_middle(
    target: HFBackend, tmp_path: Path, breaks: Breaks
) -> None:
    mine = tmp_path / "mine.gguf"
    mine.write_bytes(b"mine")
    with pytest.MonkeyPatch.context() as monkeypatch:
        expected = breaks(monkeypatch)
        said = r"set SPECDEC_CACHE|^$"
        with pytest.raises(expected, match=said):
            self_draft(target, "q8_0", folder=tmp_path)
        with pytest.raises(expected, match=said.replace("set SPECDEC_CACHE", "choose a folder")):
            write_quantized(target, mine, "q8_0")
        assert os.listdir(tmp_path) == ["mine.gguf"]
    assert mine.read_bytes() == b"mine"
    mine.unlink()
    make(target, tmp_path)


@pytest.mark.parametrize("wrong", [0.9, float("nan")])
def test_an_export_that_computes_something_else_is_refused(
    target: HFBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: float
) -> None:
    def scaled(model: Any, path: Path, **options: Any) -> str | None:
        weight = model.model.layers[1].mlp.up_proj.weight
        right = weight.data
        weight.data = right * wrong
        try:
            return write_gguf(model, path, **options)
        finally:
            weight.data = right

    monkeypatch.setattr(module, "write_gguf", scaled)
    with pytest.raises(UnsupportedModelError, match=r"computes something else: .* Pass a GGUF"):
        self_draft(target, folder=tmp_path)
    assert not os.listdir(tmp_path)


def test_what_was_asked_wrongly(target: HFBackend, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no quantisation 'q9_9': use f32, "):
        self_draft(target, "q9_9", folder=tmp_path)
    with pytest.raises(ValueError, match="no quantisation 'q9_9': use f32, "):
        write_quantized(target, tmp_path / "x", "q9_9")
    assert not os.listdir(tmp_path)


def test_without_llama_cpp_it_says_what_to_install(
    target: HFBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for loaded in [m for m in sys.modules if m.startswith("specdec_llama_cpp")]:
        monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    with pytest.raises(MissingRuntimeError, match=r"'llama_cpp', .*\[llama-cpp\]"):
        self_draft(target, folder=tmp_path)
    with pytest.raises(MissingRuntimeError, match=r"'llama_cpp', .*\[llama-cpp\]"):
        write_quantized(target, tmp_path / "x", "q8_0")


# What comes of it.


@pytest.mark.parametrize(("kind", "least"), [("f32", 0.99), ("q8_0", 0.7), ("q4_0", 0.05)])
def test_the_target_accepts_its_own_quantisation(
    target: HFBackend, tmp_path: Path, kind: str, least: float
) -> None:
    """Random weights take four bits badly; trained ones don't."""
    with self_draft(target, kind, folder=tmp_path) as draft:
        assert accept_rate(target, draft) > least


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_short_floats_are_exported_as_they_are(tiny_llama: Any, tmp_path: Path, dtype: str) -> None:
    target = HFBackend(tiny_llama.folder, dtype=dtype)
    with self_draft(target, "q8_0", folder=tmp_path) as draft:
        assert accept_rate(target, draft) > 0.5


def test_the_draft_has_the_targets_context(tiny_llama: Any, tmp_path: Path) -> None:
    for limit in (None, 40, 20):
        target = HFBackend(tiny_llama.folder, max_context=limit)
        with self_draft(target, "q8_0", folder=tmp_path) as draft:
            assert draft.max_context == target.max_context == (limit or 512)


def test_a_merged_adapter_changes_the_draft(
    target: HFBackend, tiny_llama: Any, tmp_path: Path
) -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    config = peft.LoraConfig(
        r=4,
        lora_alpha=4,
        target_modules=["q_proj", "v_proj", "down_proj"],
        init_lora_weights=False,  # random ones, as if it had learnt something
    )
    with pytest.warns(FutureWarning, match="is_gradient_checkpointing"):  # peft 0.21, 2026-07
        adapted = peft.get_peft_model(HFBackend(tiny_llama.folder).model, config)
    tuned = HFBackend(model=adapted.merge_and_unload(), tokenizer=target.tokenizer)
    with (
        self_draft(target, "q8_0", folder=tmp_path) as base,
        self_draft(tuned, "q8_0", folder=tmp_path) as own,
    ):
        assert accept_rate(tuned, base) < 0.25
        assert accept_rate(tuned, own) > 0.75
        assert accept_rate(target, base) > 0.75


def test_smollm2_drafts_for_itself(smollm2_gguf: Path, tmp_path: Path) -> None:
    target = HFBackend(smollm2_gguf, dtype="float32")
    plain = SpeculativeDecoder(target).generate("Once upon a time", max_new_tokens=32)
    with self_draft(target, "q8_0", folder=tmp_path) as draft:
        decoder = SpeculativeDecoder(target, draft, num_draft_tokens=5)
        result = decoder.generate("Once upon a time", max_new_tokens=32)
    assert result.token_ids == plain.token_ids
    assert (result.stats.accept_rate or 0) > 0.8
    (file,) = tmp_path.iterdir()
    assert file.name.startswith("llama-q8_0-")


def test_a_users_file_has_the_tokenizer_or_a_reason(target: HFBackend, tmp_path: Path) -> None:
    path = tmp_path / "out.gguf"
    assert write_quantized(target, path, "q8_0") is None
    with LlamaCppBackend(path) as written:
        assert written.vocab.encode is not None
        assert target.vocab.encode is not None
        for prompt in PROMPTS:
            assert written.vocab.encode(prompt) == target.vocab.encode(prompt)
    speechless = HFBackend(model=target.model, vocab=target.vocab)
    assert "tokenizer" in str(write_quantized(speechless, path, "q8_0"))
    with pytest.raises(ValueError, match="has no tokenizer"):
        LlamaCppBackend(path)


def test_one_bar_goes_once_from_nothing_to_the_end(
    target: HFBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[float] = []

    class Bar(nullcontext[Any]):
        def __init__(self, *, total: float, disable: bool | None, **_look: Any) -> None:
            assert total == 1.0
            assert disable is None  # it shows in a terminal only
            super().__init__(self)

        def update(self, step: float) -> None:
            steps.append(step)

    monkeypatch.setattr(module.logging, "tqdm", Bar)
    make(target, tmp_path)
    assert min(steps) >= 0
    assert 0.9 < sum(steps) <= 1
    assert len(steps) > 40


def test_it_is_silent_where_no_one_looks(
    target: HFBackend, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    make(target, tmp_path)
    assert capfd.readouterr() == ("", "")

"""GGUF files with fewer bits per weight, by the library and by the command line."""

import os
import signal
from pathlib import Path
from typing import Any, get_args

import pytest
from typer.testing import CliRunner

from specdec.backend import Span
from specdec.cli import app
from specdec.cli.models import Quantization
from specdec.errors import RuntimeFailure

pytest.importorskip("llama_cpp")

from specdec_llama_cpp import LlamaCppBackend
from specdec_llama_cpp.quantize import QUANTIZATIONS, quantize


@pytest.mark.parametrize("kind", QUANTIZATIONS)
def test_every_kind_loads_and_runs(tiny_llama: Any, tmp_path: Path, kind: str) -> None:
    written = tmp_path / "small.gguf"
    quantize(tiny_llama.gguf, written, kind)
    with LlamaCppBackend(written, n_threads=1) as small, LlamaCppBackend(tiny_llama.gguf) as whole:
        assert small.vocab.encode is not None
        assert small.vocab.encode("the sea") == whole.vocab.encode("the sea")  # type: ignore[misc]
        assert kind.split("_")[0] in str(small.info()["dtype"]).lower()
        (few,), (many,) = (
            backend.forward([Span(backend.new_cache(), [1, 2, 3], 1)]) for backend in (small, whole)
        )
    assert few.shape == many.shape
    assert (few == many).all() == (kind == "f32")
    assert (written.stat().st_size < tiny_llama.gguf.stat().st_size) == (kind != "f32")


def test_names_are_in_any_case_and_unknown_ones_are_listed(tiny_llama: Any, tmp_path: Path) -> None:
    for kind in ("q8_0", "Q8_0"):
        quantize(tiny_llama.gguf, tmp_path / kind, kind)
    assert (tmp_path / "q8_0").read_bytes() == (tmp_path / "Q8_0").read_bytes()
    with pytest.raises(ValueError, match=r"no quantisation 'q9_0': use f32, .*q4_0"):
        quantize(tiny_llama.gguf, tmp_path / "q9_0", "q9_0")
    assert not (tmp_path / "q9_0").exists()


def test_progress_counts_every_tensor(tiny_llama: Any, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    quantize(
        tiny_llama.gguf,
        tmp_path / "q",
        "q4_0",
        progress=lambda done, total: seen.append((done, total)),
    )
    assert seen == [(i, 30) for i in range(30)]


def test_ctrl_c_is_not_lost(tiny_llama: Any, tmp_path: Path) -> None:
    """It comes while llama.cpp works, which is then waited for."""
    seen: list[int] = []

    def interrupted(done: int, _total: int) -> None:
        seen.append(done)
        if done == 5:
            os.kill(os.getpid(), signal.SIGINT)

    # Jobs that a script starts in the background are born deaf to it.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            quantize(tiny_llama.gguf, tmp_path / "q", "q4_0", progress=interrupted)
    finally:
        signal.signal(signal.SIGINT, before)
    assert seen[-1] == 29


def test_what_progress_raises_comes_out(tiny_llama: Any, tmp_path: Path) -> None:
    def broken(_done: int, _total: int) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        quantize(tiny_llama.gguf, tmp_path / "q", "q4_0", progress=broken)
    quantize(tiny_llama.gguf, tmp_path / "q", "q4_0")


def test_the_log_stays_off_the_terminal(
    tiny_llama: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    quantize(tiny_llama.gguf, tmp_path / "q", "q4_0")
    assert capfd.readouterr() == ("", "")


def test_errors_say_what_llama_cpp_said(tiny_llama: Any, tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(tiny_llama.gguf.read_bytes()[:100_000])
    with pytest.raises(RuntimeFailure, match=r"of broken\.gguf: .*not within the file bounds"):
        quantize(broken, tmp_path / "q", "q4_0")
    with pytest.raises(RuntimeFailure, match=r"nosuch/q of model\.gguf: .*failed to quantize"):
        quantize(tiny_llama.gguf, tmp_path / "nosuch" / "q", "q4_0")


def run(*arguments: str | Path) -> Any:
    return CliRunner().invoke(app, ["quantize", *map(str, arguments)])


@pytest.mark.usefixtures("one_thread")
def test_the_command_writes_what_llama_cpp_loads(tiny_llama: Any, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    path = tmp_path / "out.gguf"
    result = run(tiny_llama.folder, path, "--type", "Q8_0")
    assert result.exit_code == 0, result.output
    assert result.stdout == f"{path}: {path.stat().st_size / 1000:.1f} kB, q8_0, tokenizer inside\n"
    assert os.listdir(tmp_path) == ["out.gguf"]
    with LlamaCppBackend(path) as written, LlamaCppBackend(tiny_llama.gguf) as original:
        for text in ("the theatre and the sea", "<|im_start|>a\n"):
            ids = [backend.vocab.encode(text) for backend in (written, original)]  # type: ignore[misc]
            assert ids[0] == ids[1]
        assert written.vocab.eos_ids == original.vocab.eos_ids
        assert written.max_context == original.max_context


@pytest.mark.usefixtures("one_thread")
def test_the_command_replaces_a_file_only_by_force(tiny_llama: Any, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    path = tmp_path / "out.gguf"
    path.write_bytes(b"mine")
    refused = run(tiny_llama.folder, path)
    assert refused.exit_code == 2
    assert "is there already: --force replaces it" in refused.stderr
    assert path.read_bytes() == b"mine"
    assert run(tiny_llama.folder, path, "--force", "--type", "q9").exit_code == 2
    assert path.read_bytes() == b"mine"
    assert run(tiny_llama.folder, path, "--force").exit_code == 0
    assert path.read_bytes()[:4] == b"GGUF"


def test_the_command_says_what_it_cannot_do(tiny_llama: Any, tmp_path: Path) -> None:
    result = run(tiny_llama.gguf, tmp_path / "out.gguf")
    assert result.exit_code == 2
    assert "LlamaCppBackend, which doesn't write GGUF files: put hf: in front" in result.stderr
    result = run(tiny_llama.folder, tmp_path / "nosuch" / "out.gguf")
    assert "there is no folder" in result.stderr
    result = run(tiny_llama.folder, tmp_path)
    assert "is a folder: give a file in it" in result.stderr
    assert not os.listdir(tmp_path)


def test_the_command_offers_every_kind() -> None:
    assert set(get_args(Quantization)) == set(QUANTIZATIONS)


def test_the_command_leaves_what_is_no_file_alone(tiny_llama: Any, tmp_path: Path) -> None:
    pipe, link, file = tmp_path / "pipe", tmp_path / "link", tmp_path / "file.gguf"
    os.mkfifo(pipe)
    file.write_bytes(b"old")
    link.symlink_to(file)
    command = ["quantize", str(tiny_llama.folder), "--type", "Q8_0", "--force"]
    refused = CliRunner().invoke(app, [*command, str(pipe)])
    assert refused.exit_code == 2
    assert "is no plain file" in refused.stderr
    assert pipe.is_fifo()
    assert CliRunner().invoke(app, [*command, str(link)]).exit_code == 0
    assert link.is_symlink()
    assert file.read_bytes()[:4] == b"GGUF"

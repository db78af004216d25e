"""``specdec batch``: nothing lost, nothing twice, whatever ends a run."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

import specdec.cli.batch
from specdec import SamplingParams, SpeculativeDecoder
from specdec.cli import app
from specdec.cli.jsonl import Job, Results, lines, pending, results
from specdec.testing import TableBackend

ROOT = Path(__file__).parents[1]
JOB = Job("table", SamplingParams(), {"max_new_tokens": 6})


def decoder() -> SpeculativeDecoder:
    target = TableBackend.random(8, seed=3, max_context=40)
    return SpeculativeDecoder(target, target.sibling(0.4), num_draft_tokens=3, keep_caches=0)


def run(source: Path, out: Path, job: Job = JOB, stop_after: int | None = None) -> None:
    """A run that ends, where it is told to, with the results still wanting."""
    with Results(out) as file:
        todo = pending(source, job, file.done)
        for number, record in enumerate(results(decoder(), todo, job, max_batch=3)):
            if number == stop_after:
                return
            file.add(record)


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def lasting(path: Path) -> dict[int, dict[str, Any]]:
    """What a file says of each line, without times."""
    found = {}
    for record in records(path):
        assert record["line"] not in found
        record["stats"] = {
            name: value
            for name, value in record["stats"].items()
            if not name.endswith("seconds") and name != "tokens_per_second"
        }
        found[record["line"]] = record
    return found


def prompts(path: Path, count: int) -> Path:
    """A file of prompts, every seventh line bad."""
    rows: list[dict[str, Any]] = [
        {"id": n, "prompt": [n % 8, n % 3], "max_new_tokens": n % 5}
        | ({"prompt": []} if n % 7 == 6 else {})
        | ({"temperature": 1.0, "seed": n} if n % 4 == 1 else {})
        for n in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@given(count=st.integers(0, 30), cuts=st.lists(st.integers(0, 12_000), max_size=4))
def test_a_file_that_is_cut_anywhere_is_completed(
    tmp_path_factory: pytest.TempPathFactory, count: int, cuts: list[int]
) -> None:
    folder = tmp_path_factory.mktemp("batch")
    source = prompts(folder / "in.jsonl", count)
    run(source, whole := folder / "whole.jsonl")
    out = folder / "out.jsonl"
    for number, cut in enumerate(cuts):
        run(source, out, stop_after=3 * number)
        os.truncate(out, min(cut, out.stat().st_size))
    run(source, out)
    assert len(records(out)) == count
    assert lasting(out) == lasting(whole)


BAD_LINES = [
    (b"not json", "it is no JSON"),
    (b'{"prompt": "a"', "it is no JSON"),
    (b"\xff\xfe", "it is no JSON"),
    (b"[" * 100_000, ""),
    (b"[1, 2]", "a line is a JSON object, not list"),
    (b"{}", "a prompt or messages"),
    (b'{"prompt": "a", "messages": []}', "not both"),
    (b'{"prompt": "a", "temprature": 1}', "no field 'temprature'"),
    (b'{"prompt": "a", "temperature": "hot"}', "temperature must be a number"),
    (b'{"prompt": "a", "max_new_tokens": null}', "max_new_tokens must be a whole number"),
    (b'{"prompt": "a", "logit_bias": {"x": 1}}', "'x'"),
    (b'{"prompt": "a", "stop": {"a": 1}}', "stop is a text"),
    (b'{"prompt": "a", "id": ' + b"[" * 900 + b"]" * 900 + b"}", "an id is a text"),
    (b'{"id": {"a": ' + b"[" * 900 + b"]" * 900 + b"}}", "an id is a text"),
    (b'{"messages": "ab"}', "messages are a list"),
    (b'{"messages": []}', "messages are a list"),
    (b'{"prompt": "a", "' + b"x" * 1_000_000 + b'": 1}', "no field"),
    (b'{"prompt": "a", "stop": ""}', "at least one character"),
    (b'{"prompt": ""}', "empty"),
    (b'{"prompt": [99]}', "id 99"),
    (b'{"prompt": {"text": "a"}}', ""),
    (b'{"messages": [{"role": "user", "content": "a"}]}', "chat template"),
    (b'{"prompt": [1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3, 4, 1]}', "21 tokens"),
]


def test_bad_lines_are_records_with_their_number(tmp_path: Path) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    good = [b'\xef\xbb\xbf{"prompt": "ab"}', b"", b'  {"prompt": "cd", "id": "x"}\r']
    source.write_bytes(b"\n".join([*good, *(line for line, _ in BAD_LINES), b'{"prompt": "ab"}']))
    target = TableBackend.random(8, seed=3, max_context=20)
    with Results(out) as file:
        for record in results(SpeculativeDecoder(target), lines(source), JOB, max_batch=4):
            file.add(record)
    found = lasting(out)
    first, last = found.pop(1), found.pop(4 + len(BAD_LINES))
    assert first["text"] == last["text"] != ""
    assert found.pop(3)["id"] == "x"
    assert sorted(found) == list(range(4, 4 + len(BAD_LINES)))
    for number, (_, words) in enumerate(BAD_LINES, start=4):
        assert found[number]["finish_reason"] == "error"
        assert found[number]["error"].startswith(f"line {number}: ")
        assert words in found[number]["error"]
        assert len(found[number]["error"]) < 600


def test_every_option_of_a_line_counts_before_the_runs(tmp_path: Path) -> None:
    fields: list[dict[str, Any]] = [
        {"temperature": 1.0, "seed": 7, "top_k": 3},
        {"max_new_tokens": 2},
        {"stop": ["a"], "logprobs": 2},
        {"stop_token_ids": [1]},
        {"logit_bias": {"2": 9.5}},
        {"repetition_penalty": 1.5, "min_tokens": 3},
    ]
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(json.dumps({"prompt": [1, 2], **each}) for each in fields))
    job = Job("table", SamplingParams(temperature=0.5, seed=100), {"max_new_tokens": 12})
    run(source, out, job)
    found = lasting(out)
    for number, options in enumerate(fields, start=1):
        mine = {n: options.pop(n) for n in list(options) if hasattr(job.sampling, n)}
        if "logit_bias" in mine:
            mine["logit_bias"] = {2: 9.5}
        sampling = SamplingParams(**{"temperature": 0.5, "seed": 100 + number, **mine})
        alone = decoder().generate([1, 2], **{"max_new_tokens": 12, **options}, sampling=sampling)
        assert found[number]["token_ids"] == alone.token_ids
        assert found[number]["finish_reason"] == alone.finish_reason
        assert found[number]["seed"] == sampling.seed
        assert ("logprobs" in found[number]) == (number == 3)


def test_a_record_is_in_the_file_at_once(tmp_path: Path) -> None:
    source, out = prompts(tmp_path / "in.jsonl", 9), tmp_path / "out.jsonl"
    with Results(out) as file:
        todo = pending(source, JOB, file.done)
        for number, record in enumerate(results(decoder(), todo, JOB, max_batch=2), start=1):
            file.add(record)
            assert len(records(out)) == number


def test_a_refused_run_cuts_nothing_off(tmp_path: Path) -> None:
    source, out = prompts(tmp_path / "in.jsonl", 5), tmp_path / "out.jsonl"
    run(source, out, stop_after=3)
    torn = out.read_bytes() + b'{"line": 4, "ke'
    out.write_bytes(torn)
    with pytest.raises(ValueError, match="with other options"):
        run(source, out, Job("other", JOB.sampling, JOB.options))
    assert out.read_bytes() == torn
    run(source, out)
    assert len(lasting(out)) == 5


class TestResultsOfSomethingElse:
    @pytest.fixture
    def files(self, tmp_path: Path) -> tuple[Path, Path]:
        source = prompts(tmp_path / "in.jsonl", 5)
        run(source, tmp_path / "out.jsonl", stop_after=4)
        return source, tmp_path / "out.jsonl"

    def test_another_input(self, files: tuple[Path, Path]) -> None:
        source, out = files
        before = out.read_bytes()
        source.write_text(source.read_text().replace('"max_new_tokens": 1', '"max_new_tokens": 2'))
        with pytest.raises(ValueError, match="result for line 2, but of another text"):
            run(source, out)
        source.write_text('{"prompt": [0, 0], "max_new_tokens": 0, "id": 0}\n')
        with pytest.raises(ValueError, match="result for line"):
            run(source, out)
        assert out.read_bytes() == before

    def test_a_shorter_input(self, files: tuple[Path, Path]) -> None:
        source, out = files
        source.write_text("".join(source.read_text().splitlines(keepends=True)[:1]))
        with pytest.raises(ValueError, match=r"which .*in.jsonl doesn't have"):
            run(source, out)

    def test_other_options(self, files: tuple[Path, Path]) -> None:
        for job in (
            Job("other", JOB.sampling, JOB.options),
            Job("table", SamplingParams(top_k=3), JOB.options),
            Job("table", JOB.sampling, {"max_new_tokens": 7}),
        ):
            with pytest.raises(ValueError, match="with other options"):
                run(*files, job)

    def test_no_results_at_all(self, tmp_path: Path) -> None:
        source, out = prompts(tmp_path / "in.jsonl", 5), tmp_path / "notes.txt"
        for text in (
            "my notes\n",
            '{"text": "a"}\n',
            "[1]\n",
            '{"line": "x", "key": ""}\n',
            '{"a": 1}',
            "notes",
        ):
            out.write_text(text)
            with pytest.raises(ValueError, match=r"line 1 of .*notes.txt is no result"):
                run(source, out)
            assert out.read_text() == text

    @pytest.mark.skipif(sys.platform == "win32", reason="no such locks there")
    def test_another_run_is_writing(self, files: tuple[Path, Path]) -> None:
        with Results(files[1]), pytest.raises(RuntimeError, match=r"another run is writing"):
            run(*files)
        run(*files)
        assert len(lasting(files[1])) == 5


def invoke(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["batch", *map(str, arguments)])


def test_nothing_is_loaded_where_nothing_is_to_be_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(specdec.cli.batch, "open_pair", lambda models: pytest.fail("loaded"))
    empty, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    empty.write_text("\n\n")
    done = invoke("--input", empty, "--output", out)
    assert done.exit_code == 0
    assert "has every result" in done.stderr
    done = invoke("--input", empty, "--output", empty)
    assert done.exit_code == 2
    assert "the same file" in done.stderr
    done = invoke("--input", empty, "--output", tmp_path / "no" / "out.jsonl")
    assert done.exit_code == 2
    done = invoke("--input", empty, "--output", out, "--max-batch", 0)
    assert "max_batch must be at least 1" in done.stderr


def test_ctrl_c_says_how_to_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted(TableBackend):
        def forward(self, batch: Any) -> Any:
            if self.forward_ct == 8:
                raise KeyboardInterrupt
            return super().forward(batch)

    target = Interrupted(decoder().target.table)  # type: ignore[attr-defined]
    monkeypatch.setattr(specdec.cli.batch, "open_pair", lambda models: (target, None))
    source, out = prompts(tmp_path / "in.jsonl", 40), tmp_path / "out.jsonl"
    done = invoke("--input", source, "--output", out)
    assert done.exit_code == 130
    assert "run it again to go on" in done.stderr
    count = len(lasting(out))
    assert 0 < count < 40
    target.forward_ct = 99
    done = invoke("--input", source, "--output", out)
    assert done.exit_code == 0
    assert f"going on behind {count} results" in done.stderr
    assert len(lasting(out)) == 40


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with names")
def test_a_pipe_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    done = invoke("--input", tmp_path / "pipe", "--output", tmp_path / "out.jsonl")
    assert done.exit_code == 2
    assert "is no file" in done.stderr


def test_the_command_says_what_it_did(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = decoder()
    monkeypatch.setattr(specdec.cli.batch, "open_pair", lambda models: (made.target, "suffix"))
    source, out = prompts(tmp_path / "in.jsonl", 20), tmp_path / "out.jsonl"
    done = invoke("--input", source, "--output", out, "--num-draft-tokens", 2)
    assert done.exit_code == 0, done.output
    assert done.stdout == ""
    assert "20 results | errors 2 | tokens/s" in done.stderr
    assert "accept_rate" in done.stderr
    assert len(lasting(out)) == 20


def start(source: Path, out: Path, *options: str, mark: str = "") -> subprocess.Popen[bytes]:
    path = os.pathsep.join([str(ROOT), str(ROOT / "backends")])
    command = [sys.executable, "-m", "specdec", "batch", "--input", source, "--output", out]
    return subprocess.Popen(
        [*map(str, command), *options],
        env={**os.environ, "PYTHONPATH": path, "SPECDEC_TEST_MARK": mark},
        stderr=subprocess.PIPE,
    )


@pytest.fixture
def pair(tiny_llama: Any, tiny_draft: Any) -> Sequence[str]:
    pytest.importorskip("transformers")
    pytest.importorskip("llama_cpp")
    # In llama.cpp what else is in its memory changes the rounding, so it is no target here.
    return "--target-model", str(tiny_llama.folder), "--draft-model", str(tiny_draft.gguf)


def test_a_thousand_prompts_and_runs_that_are_killed(tmp_path: Path, pair: Sequence[str]) -> None:
    source = tmp_path / "in.jsonl"
    words = ["the sea", "a house", "in", "and", "theatre"]
    rows = [{"prompt": f"{words[n % 5]} {n}", "max_new_tokens": 4 + n % 5} for n in range(1000)]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = [*pair, "--num-draft-tokens", "3", "--temperature", "1", "--seed", "5"]
    options += ["--n-threads", "1"]
    whole, out = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    complete(source, whole, *options)
    rng = random.Random(time.time_ns())
    for enough in sorted(rng.sample(range(whole.stat().st_size), 3)):
        with start(source, out, *options) as process:
            while process.poll() is None and (not out.exists() or out.stat().st_size < enough):
                time.sleep(rng.random() / 100)
            process.send_signal(signal.SIGKILL)
    complete(source, out, *options)
    assert len(whole.read_bytes().splitlines()) == len(out.read_bytes().splitlines()) == 1000
    assert texts(out) == texts(whole)


@pytest.mark.skipif(not Path("/proc").exists(), reason="processes are found by /proc")
def test_an_actor_that_is_killed(tmp_path: Path, pair: Sequence[str]) -> None:
    pytest.importorskip("ray")
    source = tmp_path / "in.jsonl"
    rows = [{"prompt": f"the sea {n}", "max_new_tokens": 4 + n % 9} for n in range(400)]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows) + "no json\n")
    options = [*pair, "--num-draft-tokens", "3", "--n-threads", "1"]
    whole, out, mark = tmp_path / "whole.jsonl", tmp_path / "out.jsonl", str(tmp_path)
    complete(source, whole, *options)
    with start(source, out, *options, "--engine", "ray", "--num-actors", "2", mark=mark) as driver:
        while driver.poll() is None and (not out.exists() or not out.stat().st_size):
            time.sleep(0.02)
        victim, _other = actors(mark)
        os.kill(victim, signal.SIGKILL)
        assert len(out.read_bytes().splitlines()) < 401
        _, errors = driver.communicate()
        assert driver.returncode == 0, errors
    assert "401 results | errors 1 |" in errors.decode()
    assert texts(out) == texts(whole)


def complete(source: Path, out: Path, *options: str) -> None:
    """A run that nothing disturbs."""
    with start(source, out, *options) as process:
        _, errors = process.communicate()
        assert process.returncode == 0, errors.decode()


def texts(path: Path) -> dict[int, dict[str, Any]]:
    """What a file says of each line. What a draft model proposes depends on its neighbours."""
    found = lasting(path)
    for each in found.values():
        del each["stats"]
    return found


def actors(mark: str) -> list[int]:
    """The processes of a run that have models."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            name = (folder / "cmdline").read_bytes()
            variables = (folder / "environ").read_bytes()
        except OSError:  # it has ended meanwhile
            continue
        if name.startswith(b"ray::MapWorker") and f"SPECDEC_TEST_MARK={mark}".encode() in variables:
            found.append(int(folder.name))
    return found

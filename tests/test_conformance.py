"""The bundled backends keep every clause of the contract, on tiny models and on a real one."""

from collections.abc import Iterator
from typing import Any

import pytest

from specdec import ModelBackend
from specdec.testing import CHECKS, Check


@pytest.fixture(scope="module", params=["hf", "hf bfloat16", "llama.cpp", "llama.cpp smollm2"])
def backend(
    request: pytest.FixtureRequest, tiny_llama: Any, smollm2_gguf: Any
) -> Iterator[tuple[ModelBackend, float]]:
    """A backend and its tolerance."""
    if request.param.startswith("hf"):
        torch = pytest.importorskip("torch")
        from specdec.backends import HFBackend

        before = torch.get_num_threads()
        torch.set_num_threads(1)
        dtype = request.param.partition(" ")[2] or "float32"
        yield HFBackend(tiny_llama.folder, dtype=dtype), 1e-3 if dtype == "float32" else 0.05
        torch.set_num_threads(before)
    else:
        pytest.importorskip("llama_cpp")
        from specdec.backends import LlamaCppBackend

        path = smollm2_gguf if "smollm2" in request.param else tiny_llama.gguf
        with LlamaCppBackend(path, n_threads=1) as llama:
            yield llama, 0.05


@pytest.mark.parametrize("check", CHECKS)
def test_contract(backend: tuple[ModelBackend, float], check: Check) -> None:
    model, tolerance = backend
    check(model, tolerance=tolerance)

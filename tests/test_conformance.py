"""The bundled backends keep every clause of the contract, on tiny models and on a real one."""

from collections.abc import Iterator
from typing import Any

import pytest

from specdec import ModelBackend
from specdec.testing import CHECKS, Check

HF = {"hf": ("cpu", "float32"), "hf bfloat16": ("cpu", "bfloat16"), "hf gpu": ("cuda", "float32")}
LLAMA = {"llama.cpp": 0, "llama.cpp gpu": -1}


@pytest.fixture(
    params=[
        "hf",
        "hf bfloat16",
        pytest.param("hf gpu", marks=pytest.mark.gpu("torch")),
        "llama.cpp",
        "llama.cpp smollm2",
        pytest.param("llama.cpp gpu", marks=pytest.mark.gpu("llama_cpp")),
    ],
)
def backend(
    request: pytest.FixtureRequest, one_thread: None, tiny_llama: Any, smollm2_gguf: Any
) -> Iterator[tuple[ModelBackend, float]]:
    """A backend and its tolerance."""
    name = request.param
    if name in HF:
        pytest.importorskip("transformers")
        from specdec.backends import HFBackend

        device, dtype = HF[name]
        model = HFBackend(tiny_llama.folder, device=device, dtype=dtype)
        yield model, 1e-3 if dtype == "float32" else 0.2
    else:
        pytest.importorskip("llama_cpp")
        from specdec.backends import LlamaCppBackend

        path = smollm2_gguf if "smollm2" in name else tiny_llama.gguf
        with LlamaCppBackend(path, n_threads=1, n_gpu_layers=LLAMA.get(name, 0)) as llama:
            yield llama, 0.2


@pytest.mark.parametrize("check", CHECKS)
def test_contract(backend: tuple[ModelBackend, float], check: Check) -> None:
    model, tolerance = backend
    if check.__name__ == "check_batch" and "Q4" in str(model.info()["dtype"]):
        tolerance = 0.5  # what lies beside a sequence of llama.cpp's moves its 4-bit rows
    check(model, tolerance=tolerance)

"""The package as others see it: its names, what it imports, and its plugins."""

import importlib
import pkgutil
import subprocess
import sys
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import pytest

import specdec
import specdec.backends
from specdec import MissingRuntimeError
from specdec.backends import load_backend
from specdec.testing import TableBackend

ROOT = Path(__file__).parents[1]
MODULES = [
    name
    for _, name, _ in pkgutil.walk_packages(specdec.__path__, "specdec.")
    if not name.endswith("__main__")
]


@pytest.mark.parametrize("name", ["specdec", *MODULES])
def test_all_is_right(name: str) -> None:
    if name == "specdec.backends":
        pytest.importorskip("torch")
        pytest.importorskip("llama_cpp")
    module = importlib.import_module(name)
    assert len(set(module.__all__)) == len(module.__all__)
    assert all(hasattr(module, public) for public in module.__all__)


def test_the_core_imports_no_runtime() -> None:
    modules = ", ".join(["specdec", *MODULES])
    code = (
        f"import sys, {modules}\n"
        "print([n for n in ('torch', 'transformers', 'llama_cpp') if n in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def offer(monkeypatch: pytest.MonkeyPatch, **plugins: str) -> None:
    """Pretend that packages with these entry points are installed."""
    points = EntryPoints(
        EntryPoint(name, value, "specdec.backends") for name, value in plugins.items()
    )
    monkeypatch.setattr(specdec.backends, "entry_points", points.select)


def test_a_plugin_of_another_package_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    offer(monkeypatch, table="specdec.testing:TableBackend", broken="no_such_module:Backend")
    assert load_backend("table") is TableBackend
    with pytest.raises(ValueError, match=r"no backend is called 'tabel'; .*: broken, table"):
        load_backend("tabel")
    with pytest.raises(MissingRuntimeError, match="needs the module 'no_such_module'"):
        load_backend("broken")


def test_a_missing_runtime_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("torch", "specdec_hf", "llama_cpp", "specdec_llama_cpp"):
        for loaded in [m for m in sys.modules if m == name or m.startswith(name + ".")]:
            monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    with pytest.raises(MissingRuntimeError, match=r"'torch', which isn't installed: .*\[hf\]"):
        specdec.backends.HFBackend  # noqa: B018 - the access is the test
    with pytest.raises(MissingRuntimeError, match=r"'llama_cpp', .*\[llama-cpp\]"):
        specdec.backends.LlamaCppBackend  # noqa: B018
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        specdec.backends.Nothing  # noqa: B018

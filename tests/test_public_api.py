"""What SiPipe exports, what importing it costs, and what it must not drag in."""

import importlib
import importlib.util
import pkgutil
import subprocess
import sys

import pytest

import sipipe
from sipipe.errors import ResourceError

PACKAGES = [
    "sipipe",
    *(
        f"sipipe.{module.name}"
        for module in pkgutil.iter_modules(sipipe.__path__)
        if module.name not in ("vllm", "__main__")
    ),
]


def loaded_after(statement):
    code = f"import sys; {statement}; print(*sorted(m.split('.')[0] for m in sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    return set(done.stdout.split())


def test_the_public_names():
    assert sipipe.__all__ == ["Executor", "__version__"]


@pytest.mark.parametrize("package", PACKAGES)
def test_all_is_true(package):
    module = importlib.import_module(package)
    names = list(getattr(module, "__all__", []))  # ruff keeps them sorted
    assert len(set(names)) == len(names)
    if package != "sipipe":  # the executor needs vLLM
        for name in names:
            assert getattr(module, name) is not None


@pytest.mark.parametrize(
    "package", ["sipipe", "sipipe.cli", "sipipe.config", "sipipe.core_binding"]
)
def test_these_import_without_heavy_packages(package):
    heavy = {"vllm", "torch", "numba", "transformers", "numpy", "zmq"}
    assert not heavy & loaded_after(f"import {package}")


def test_the_core_imports_without_vllm_and_torch():
    statement = "; ".join(f"import {package}" for package in PACKAGES)
    assert not {"vllm", "torch", "transformers"} & loaded_after(statement)


def test_the_executor_without_vllm_is_one_sentence(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(ResourceError, match="vLLM is not installed here: pip install"):
        _ = sipipe.Executor


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'Excutor'"):
        _ = sipipe.Excutor


@pytest.mark.engine
def test_the_executor_is_vllms():
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    from vllm.v1.executor.abstract import Executor

    assert issubclass(sipipe.Executor, Executor)
    assert sipipe.Executor.supports_pp

"""scripts/newer_vllm.py: a vLLM for CPUs of a CUDA wheel's Python, made once, or why there is none."""

import importlib.metadata
import zipfile

import pytest
from tests.programs import load


@pytest.fixture
def script(tmp_path, monkeypatch):
    """The script as a module: it finds kernels, and keeps what it makes under tmp_path."""
    module = load("scripts", "newer_vllm.py")
    kernel = tmp_path / "_C.abi3.so"
    kernel.write_bytes(b"compiled for CPUs")
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "_kernels", lambda: [kernel])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return module


def put_wheels(script, said="print('new')"):
    cache = script.wheels_directory()
    cache.mkdir(parents=True, exist_ok=True)
    info = f"vllm-{script.VERSION}.dist-info"
    inside = {
        "vllm/__init__.py": said,
        "vllm/_version.py": f"__version__ = '{script.VERSION}'",
        "vllm/_C.abi3.so": "compiled for CUDA",
        "vllm/vllm-rs": "another front end",
        f"{info}/METADATA": f"Name: vllm\nVersion: {script.VERSION}\nRequires-Dist: torch==2\n",
        f"{info}/entry_points.txt": "[vllm.general_plugins]\n",
        f"{info}/RECORD": "",
    }
    with zipfile.ZipFile(cache / f"vllm-{script.VERSION}-cp38-abi3-linux.whl", "w") as wheel:
        for name, text in inside.items():
            wheel.writestr(name, text)
    with zipfile.ZipFile(cache / f"orjson-3-{script.PYTHON}-linux.whl", "w") as wheel:
        wheel.writestr("orjson/__init__.py", "")


def test_it_has_the_wheels_python_and_our_kernels(script):
    put_wheels(script)
    folder = script.make()
    inside = {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()}
    info = f"vllm-{script.VERSION}+cpu.dist-info"
    assert inside == {
        *("vllm/__init__.py", "vllm/_version.py", "vllm/_C.abi3.so", "orjson/__init__.py"),
        *(f"{info}/METADATA", f"{info}/entry_points.txt"),
    }
    assert (folder / "vllm/_C.abi3.so").read_text() == "compiled for CPUs"
    assert "+cpu" in (folder / "vllm/_version.py").read_text()
    (found,) = importlib.metadata.distributions(path=[str(folder)])
    assert (found.version, found.requires) == (f"{script.VERSION}+cpu", ["torch==2"])


def test_it_is_made_once_and_anew_for_another_wheel(script):
    put_wheels(script)
    first = script.make()
    assert script.make() == first
    put_wheels(script, "print('newer')")
    second = script.make()
    assert second != first
    assert {*first.parent.iterdir()} == {first, second}


def test_without_a_package_index_it_says_so_in_one_line(script, monkeypatch, capsys):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    monkeypatch.setattr("sys.argv", ["newer_vllm"])
    assert script.main() == 1
    said = capsys.readouterr().err
    assert said.startswith("newer_vllm: pip download of")
    assert said.count("\n") == 1
    assert [file.name for file in script.wheels_directory().iterdir()] == ["lock"]

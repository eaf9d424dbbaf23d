"""What a worker's process must not have loaded when vLLM sets itself up; each in a new process."""

import os

import pytest
from tests.engine.forks import Forked

pytest.importorskip("vllm", reason="vLLM is not installed")


def loaded_after(directory, statement: str, names: list[str]) -> list[str]:
    """Which of ``names`` a process has loaded that began with vLLM, and without any of them."""
    program, said = directory / "program.py", directory / "said"
    find = f"[n for n in {names!r} if n in sys.modules]"
    program.write_text(f"import sys\nassert not {find}\n{statement}\nprint('LOADED', *{find})\n")
    with said.open("w") as out:
        process = Forked(program, env=dict(os.environ), out=out)
    try:
        process.wait(120)
    finally:
        process.kill()
    loaded = [line for line in said.read_text().splitlines() if line.startswith("LOADED")]
    assert loaded, said.read_text()
    return loaded[-1].split()[1:]


def test_the_process_starts_without_numba(tmp_path):
    """vLLM's CPU worker scans all loaded modules and stumbles over llvmlite."""
    assert loaded_after(tmp_path, "import sipipe.worker.main", ["llvmlite", "numba"]) == []

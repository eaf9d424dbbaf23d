"""Another vLLM than those that SiPipe supports is refused in one line, before it is imported."""

import subprocess
import sys

import pytest


@pytest.fixture
def another(tmp_path):
    """A vLLM of which nothing can be imported."""
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("raise ImportError('all has moved')\n")
    info = tmp_path / "vllm-0.34.1+cpu.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.34.1+cpu\n")
    return {"PYTHONPATH": str(tmp_path), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}


def said(environment, *arguments):
    done = subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    return done.stderr.strip().splitlines()


@pytest.mark.parametrize("command", ["serve", "generate", "bench"])
def test_commands_say_both_versions_in_one_line(another, command):
    (line,) = said(another, "-m", "sipipe", command, "model", "--pp", "2", "words")
    assert "SiPipe supports vLLM 0.32.0, 0.33.0, found 0.34.1+cpu: pip install vllm==0.32" in line


def test_so_does_the_executor_that_vllm_asks_for(another):
    *_, line = said(another, "-c", "import sipipe; sipipe.Executor")
    assert line.startswith("sipipe.errors.UnsupportedError: SiPipe supports vLLM 0.32.0")


def test_who_insists_goes_on(another):
    *_, line = said(
        another | {"SIPIPE_IGNORE_VLLM_VERSION": "1"}, "-c", "import sipipe; sipipe.Executor"
    )
    assert line == "ImportError: all has moved"

"""Another vLLM than those that SiPipe supports is refused in one line, before it is imported."""

import subprocess
import sys

import pytest


def broken(directory, version, error):
    """The environment in which vLLM has this version, and raises ``error`` where it is imported."""
    (directory / "vllm").mkdir()
    (directory / "vllm" / "__init__.py").write_text(f"raise {error}\n")
    info = directory / f"vllm-{version}+cpu.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")
    return {"PYTHONPATH": str(directory), "PATH": "/usr/bin:/bin", "HOME": str(directory)}


@pytest.fixture
def another(tmp_path):
    """A vLLM of which nothing can be imported."""
    return broken(tmp_path, "0.34.1", "ImportError('all has moved')")


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


@pytest.mark.parametrize("command", ["serve", "generate"])
@pytest.mark.parametrize(
    ("named", "error"),
    [
        ("torchvision", "RuntimeError('operator torchvision::nms does not exist')"),
        ("torchaudio", "OSError('Could not load this library: /a/torchaudio/lib/_torchaudio.so')"),
    ],
)
def test_a_torchvision_that_does_not_fit_is_named_in_one_line(tmp_path, command, named, error):
    """As pip installs it beside vLLM's CPU build, where it finds none for CPUs."""
    environment = broken(tmp_path, "0.32.0", error)
    *_, line = said(environment, "-m", "sipipe", command, "model", "--pp", "2", "words")
    assert line == (
        f"sipipe: vLLM cannot be imported: this {named} is not for this torch: pip uninstall "
        "torchvision torchaudio torchcodec"
    )


def test_so_does_the_executor_that_vllm_asks_for(another):
    *_, line = said(another, "-c", "import sipipe; sipipe.Executor")
    assert line.startswith("sipipe.errors.UnsupportedError: SiPipe supports vLLM 0.32.0")


def test_who_insists_goes_on(another):
    *_, line = said(
        another | {"SIPIPE_IGNORE_VLLM_VERSION": "1"}, "-c", "import sipipe; sipipe.Executor"
    )
    assert line == "ImportError: all has moved"

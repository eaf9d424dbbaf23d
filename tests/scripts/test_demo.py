"""scripts/demo.py: without the trained model it says so in a line and takes a random one; whatever
ends it, its server ends too."""

import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from tests.programs import load

from sipipe.errors import ResourceError

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "demo.py"


def test_without_the_trained_model_a_random_one_is_made(tmp_path, monkeypatch, capsys):
    demo, made = load("scripts", "demo.py"), []

    def missing(directory):
        raise ResourceError("make-model: smollm2 is not here")

    monkeypatch.setattr(demo, "MODELS", tmp_path)
    monkeypatch.setattr(demo.smollm2, "make_smollm2", missing)
    monkeypatch.setattr(demo.subprocess, "run", lambda command, check: made.append(command))
    assert demo.checkpoint() == tmp_path / "llama-bench"
    assert str(tmp_path / "llama-bench") in made[0]
    assert capsys.readouterr().out.startswith(
        "smollm2 is not here\nA random model is served instead"
    )
    (tmp_path / "SmolLM2-135M-Instruct").mkdir()
    assert demo.checkpoint() == tmp_path / "SmolLM2-135M-Instruct"


RUN = """
import runpy, sys, time
from pathlib import Path
demo = runpy.run_path(sys.argv[1])
demo["main"].__globals__.update({
    "checkpoint": lambda: Path("none"),
    "SIPIPE": [sys.executable, "-c", "import time; time.sleep(600)"],
    "wait_until_ready": lambda *_: (print("waits", flush=True), time.sleep(600)),
})
with demo["kernels"]():
    sys.exit(demo["main"]())
"""
"""The demo, with a server that is none."""


@pytest.mark.ci
def test_what_it_starts_does_not_outlive_it(tmp_path):
    (tmp_path / "build").mkdir()
    command = [sys.executable, "-c", RUN, SCRIPT]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as demo:
        for line in demo.stdout:
            if line == "waits\n":
                break
        started = psutil.Process(demo.pid).children()
        assert 0 < len(started) <= 2  # what compiles the kernels may be done
        demo.terminate()
        assert demo.wait(60) == 143
        assert not any(process.is_running() for process in started)

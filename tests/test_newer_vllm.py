"""SiPipe on the newest vLLM that it supports, which the package index has for CUDA only: its Python
on the CPU kernels of the one that .venv has (scripts/newer_vllm.py).

The tests are those of the other files, in a pytest of their own whose PYTHONPATH has that vLLM.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.make_model.checkpoint import make_model

from tests.programs import load, ran

pytestmark = pytest.mark.engine

ROOT = Path(__file__).parents[1]

SEAMS = (
    "tests/test_seams.py",
    "tests/test_handed_over.py",
    "tests/scripts/test_stage_tensors.py",
)
ENGINE = "tests/engine/test_parity.py::test_stages_equal_stock[2]"
SLOW = {
    "parity": ("tests/engine/test_parity.py",),
    "features": ("tests/engine/test_features.py",),
    "speculation": ("tests/engine/test_speculation.py", "tests/engine/test_heads.py"),
    "second_runner": ("tests/engine/test_second_runner.py",),
    "servers": ("tests/engine/start/test_server.py", "tests/engine/start/test_launch.py"),
    "faults": ("tests/engine/test_failures.py", "tests/engine/test_sudden_end.py"),
    "replicas": ("tests/engine/test_replicas.py",),
}
FILES = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("tests/engine/test_*.py"))
ALL = {
    "seams": (*SEAMS, "-m", ""),
    "engine": (*FILES, "-m", "not slow"),
    "rooms": ("tests/engine", "--ignore-glob=tests/engine/test_*.py", "-m", "not slow"),
    "worker": ("tests/worker", "-m", ""),
    "commands": ("tests/cli/test_engine.py", "-m", ""),
    **{name: (*files, "-m", "slow") for name, files in SLOW.items()},
}


@pytest.fixture(scope="module")
def newer():
    script = load("scripts", "newer_vllm.py")
    try:
        made = script.make()
    except script.UnavailableError as error:
        pytest.skip(str(error))
    command = [sys.executable, "-c", "import vllm; print(vllm.__version__)"]
    said = subprocess.run(
        command, env=environment(made), stdout=subprocess.PIPE, text=True, check=True
    )
    assert said.stdout.startswith(script.VERSION)
    return made


def environment(newer: Path) -> dict[str, str]:
    """Of a process that is to have ``newer``, which keeps what it finds out where no other vLLM does:
    under the same names it would be of the wrong release, for both, in turn."""
    mine = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    path = os.pathsep.join([str(newer), *filter(None, [mine.get("PYTHONPATH")])])
    return {**mine, "PYTHONPATH": path, "VLLM_CACHE_ROOT": f"{newer}-cache"}


def run(newer: Path, *arguments: str) -> None:
    """Run tests on ``newer``; fail with what pytest says of those that fail."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    done = ran(command, env=environment(newer), cwd=ROOT)
    assert done.returncode == 0, done.stdout[-20_000:]
    assert re.search(r"\d passed", done.stdout), done.stdout[-2_000:]


@pytest.mark.ci
@pytest.mark.timeout(1200)  # with the download
def test_seams_and_an_engine(newer):
    run(newer, *SEAMS, ENGINE)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("arguments", ALL.values(), ids=ALL)
def test_the_tests_of(newer, arguments):
    run(newer, *arguments)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_bench_measures_both_sides(newer, models):
    """Each row's servers are started as a user's are."""
    path = make_model("llama", models / "served")
    command = [sys.executable, "-m", "sipipe", "bench", str(path), "--pp", "2", "--json"]
    command += ["--rows", "sipipe,stock", "--sampling", "greedy", "--engines", "1"]
    command += ["--repeat", "1", "--requests", "8", "--tokens", "8", "--max-model-len", "512"]
    env = {**environment(newer), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-5000:]
    assert json.loads(done.stdout)

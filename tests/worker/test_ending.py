"""A worker that is told to end does, whatever it does: in a process and with threads of its own."""

import os
import signal
import time
from multiprocessing import Pipe
from pathlib import Path

import pytest
from tests.engine.forks import Forked

pytest.importorskip("vllm", reason="vLLM is not installed")

HERE = Path(__file__).parent
SECONDS = 60  # a bug in the test itself


@pytest.mark.parametrize("by", ["SIGTERM", "the engine's death"])
@pytest.mark.parametrize(
    "doing", ["waits for inputs", "waits for hidden states of iteration 0", "runs a call"]
)
def test_a_worker_that_is_told_to_end_closes_and_is_gone(tmp_path, doing, by):
    ours, theirs = Pipe()
    said, log = tmp_path / "said", tmp_path / "log"
    with log.open("w") as out:
        process = Forked(
            HERE / "ending_worker.py",
            [doing, str(said)],
            env=dict(os.environ),
            out=out,
            ends=[theirs.fileno()],
        )
    theirs.close()
    try:
        deadline = time.monotonic() + SECONDS
        while not said.exists():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.01)
        if by == "SIGTERM":
            os.kill(process.pid, signal.SIGTERM)
        else:
            ours.close()
        process.wait(SECONDS)
    finally:
        process.kill()
        ours.close()
    # By itself, and not as the parent's thread ends one that does not follow.
    assert said.read_text() == "closed", log.read_text()

"""Engines of other tests, killed when those are done with them: nothing may be left.

tests/conftest.py has these run after the files that use the same engines.
"""

import os
import signal

import pytest
from tests.engine.engines import (
    gone,
    greedy,
    left_in_shared_memory,
    model,
    prompts,
    shared,
    take_engine,
)

pytestmark = pytest.mark.engine


@pytest.mark.parametrize(
    ("who", "family", "tp"), [("front end", "llama", 1), ("both", "qwen3-moe", 2)]
)
def test_a_killed_engine_leaves_no_process(models, who, family, tp):
    with take_engine(model(models, family), **shared(2, tp)) as engine:
        asked = {"prompts": prompts(4), "params": greedy(4, shortest=300, longest=400)}
        engine.submit([asked])
        engine.wait_until_generating()
        everybody, core = engine.descendants(), engine.find("EngineCore")
        assert core
        if who == "both":
            core[0].send_signal(signal.SIGKILL)
        os.kill(engine.process.pid, signal.SIGKILL)
        engine.process.wait(20)
        assert gone(everybody)
        left = left_in_shared_memory(set())
        assert not [name for name in left if "sipipe" in name.lower()]

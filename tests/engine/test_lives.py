"""Processes of a start that is cut short: none outlives another, and the last line names the cause.

Each kill is drawn at random (:mod:`.lives`): the door, the process, the moment. The numbers are seeds.
"""

import random

import pytest
from tests.engine.engines import model
from tests.engine.lives import DOORS, kill_one

pytestmark = pytest.mark.engine

FEW = {"vllm serve", "LLM, forked"}
"""Of every run; "sipipe serve" has tests of its own (test_sudden_end.py)."""


@pytest.mark.parametrize(
    ("door", "seed"),
    [
        pytest.param(door, seed, marks=pytest.mark.ci if door in FEW and not seed else mark)
        for mark in [pytest.mark.slow]
        for seed in range(3)
        for door in DOORS
    ],
)
def test_a_start_whose_process_is_killed_leaves_nothing(models, tmp_path, door, seed):
    outcome = kill_one(door, model(models), tmp_path, random.Random(f"{door} {seed}"))
    logs = "\n".join(log.read_text(errors="replace")[-3000:] for log in tmp_path.iterdir())
    assert outcome.good, f"{outcome}\n{logs}"

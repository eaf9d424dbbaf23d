"""Logits that are no numbers, or hardly: every case ends, and is right where that is defined."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.ci
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_whatever_the_logits_are_a_draw_ends_and_is_right(seed: int) -> None:
    """In a process of its own, which ends by itself where a kernel does not (tests/sampler/fuzz.py)."""
    found = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.sampler.fuzz", str(seed), "1500"],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stdout[-20:] + found.stderr[-3000:]


# Every draw by rejection fails, as one does with a probability below 1e-100.
NO_ATTEMPT = """
import numpy as np
from sipipe.sampler.kernels import draw
draw.ATTEMPTS = 0
from sipipe.messages.params import SequenceParams
from tests.sampler import naive
from sipipe.sampler.state import SequenceColumns
x = np.random.default_rng(0).normal(size=700).astype(np.float32)
for given in ({}, {"top_p": 0.7}, {"top_k": 600}, {"top_p": 0.7, "logprobs": 2}, {"logprobs": 0}):
    params = [SequenceParams(**given, seed=seed, presence_penalty=1.0) for seed in range(20_000)]
    columns = SequenceColumns(700, logprobs_mode="processed_logprobs")
    for handle, own in enumerate(params):
        columns.join(handle, own, (), [3, 5])
    tokens = columns.sample(range(20_000), x.reshape(1, -1), np.zeros(20_000, int)).token_ids
    exact = naive.softmax(naive.processed_logits(x, params[0], (), [3, 5]))
    assert (exact[tokens] > 0).all()
    distance = abs(np.bincount(tokens, minlength=700) / 20_000 - exact).sum() / 2
    assert distance < 0.1, (given, distance)
"""


@pytest.mark.slow  # compiles
def test_where_no_attempt_takes_a_token_it_is_drawn_from_all_weights(tmp_path: Path) -> None:
    found = subprocess.run(
        [sys.executable, "-c", NO_ATTEMPT],
        cwd=Path(__file__).parents[2],
        env={"PATH": "", "PYTHONPATH": ".", "SIPIPE_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stderr[-3000:]

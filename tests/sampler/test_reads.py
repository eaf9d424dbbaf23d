"""How often a row is read for a token, counted by the kernels: 4 times at most on the average."""

from __future__ import annotations

import numpy as np
import pytest
from benchmarks.smollm2_logits import smollm2
from tests.sampler.support import bfloat16, from_bfloat16

from sipipe.messages.params import SequenceParams
from sipipe.sampler.kernels.state import make_work
from sipipe.sampler.state import SequenceColumns

ROWS = 64
CASES = (
    [{"min_p": p} for p in (1e-9, 1e-5, 0.001, 0.05, 0.5, 1.0)]
    + [{"top_p": p} for p in (1e-6, 1e-4, 0.001, 0.01, 0.03, 0.04, 0.3, 0.9, 0.999)]
    + [{"min_p": 1e-5, **more} for more in (
        {"temperature": 2.0}, {"top_k": 50}, {"top_p": 0.9}, {"top_p": 0.01},
        {"repetition_penalty": 1.2, "presence_penalty": 0.3},
    )]
    + [{"logprobs": n} for n in (0, 1, 20, 50)]
)  # fmt: skip


def rows_of(shape: str, vocab: int) -> np.ndarray:
    rng = np.random.default_rng(0)
    if shape == "smollm2":
        return from_bfloat16(smollm2())[:, :vocab]
    x = np.zeros((ROWS, vocab), np.float32)
    if shape == "normal":
        x += rng.normal(0, 3, x.shape).astype(np.float32)
    elif shape == "nearly flat":
        x += rng.normal(0, 0.01, x.shape).astype(np.float32)
    elif shape == "one hot":
        x[:, vocab // 2] = 30.0
    elif shape == "two values":
        x[:, ::2] = 1.0
    return x


@pytest.mark.parametrize("vocab", [49_152, 262_144])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "shape", ["smollm2", "normal", "nearly flat", "flat", "one hot", "two values"]
)
def test_a_row_is_read_four_times_at_most(shape: str, dtype: str, vocab: int) -> None:
    x = rows_of(shape, vocab)
    stored = bfloat16(x) if dtype == "bfloat16" else x
    work, blocks = make_work(x.shape[1]), -(-x.shape[1] // 256)
    many = {}
    for given in CASES:
        columns = SequenceColumns(x.shape[1], work=work)
        for row in range(len(x)):
            columns.join(row, SequenceParams(seed=row, **given), [1, 2], [3, 4])
        work.passed[0] = 0
        assert not columns.sample(range(len(x)), stored).errors
        reads = round(float(work.passed[0]) / blocks / len(x), 1)
        if reads > 4:
            many[str(given)] = reads
    assert not many

"""What the package exports, and what importing it loads."""

from __future__ import annotations

import subprocess
import sys

import pytest

import sipipe.sampling
from sipipe.messages.cost import cost_estimate
from sipipe.messages.params import SequenceParams
from sipipe.sampler.warmup import warm_up


def test_exports() -> None:
    assert sipipe.sampling.__all__ == sorted(sipipe.sampling.__all__)
    for name in sipipe.sampling.__all__:
        assert getattr(sipipe.sampling, name) is not None


def test_import_needs_no_engine() -> None:
    code = (
        "import sys, sipipe.sampling;"
        "assert not {'torch', 'vllm', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def test_costs_order_as_measured() -> None:
    greedy = cost_estimate(SequenceParams(temperature=0.0))
    top_k = cost_estimate(SequenceParams(top_k=50))
    temperature = cost_estimate(SequenceParams())
    top_p = cost_estimate(SequenceParams(top_p=0.9))
    assert 0 < greedy <= top_k < temperature < top_p < 1e-3
    assert cost_estimate(SequenceParams(), 256_000) == pytest.approx(
        2 * cost_estimate(SequenceParams(), 128_000)
    )


def test_warm_up_names_what_it_does_not_know() -> None:
    with pytest.raises(ValueError, match=r"dtypes .* 'int8'"):
        warm_up(["int8"])

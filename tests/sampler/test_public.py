"""What importing the package loads, and the small functions that it exports."""

from __future__ import annotations

import subprocess
import sys

import pytest

from sipipe.messages.cost import cost_estimate
from sipipe.messages.params import SequenceParams
from sipipe.sampler.warmup import warm_up

SERVING = ("torch", "vllm", "transformers")
OTHERS = ("sipipe.config", "sipipe.engine", "sipipe.worker", "sipipe.ipc", "sipipe.observe")


def test_import_needs_no_engine() -> None:
    """Where torch and vLLM are not installed, and without the rooms that serve."""
    code = f"""
import sys
import importlib.abc

class Refuse(importlib.abc.MetaPathFinder):
    def find_spec(self, name, *_):
        for blocked in {SERVING + OTHERS}:
            if name == blocked or name.startswith(blocked + "."):
                raise ModuleNotFoundError(f"blocked: {{name}}", name=name)

sys.meta_path.insert(0, Refuse())
import numpy as np
import sipipe.sampling as sampling
logits = np.zeros((2, 50), np.float32)
logits[:, 7] = 1.0
print(sampling.sample(logits, sampling.SequenceParams(temperature=0.0)).tolist())
print(sorted(name for name in sys.modules if name.startswith("sipipe.messages.")))
"""
    found = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=300
    )
    assert found.returncode == 0, found.stderr
    assert found.stdout.split("\n")[:2] == [
        "[7, 7]",
        "['sipipe.messages.cost', 'sipipe.messages.measured', 'sipipe.messages.params']",
    ]


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

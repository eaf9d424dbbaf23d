"""The model beside what the paper found, and figures that others have published.

Throughput: ``benchmarks/planner.py:PUBLISHED``, an engine without pipeline stages, so this tests
devices, memory and tensor parallelism; nothing published tells SiPipe's stages.

One request: DeepSeek-R1 on 16 H100, tenstorrent/tt-inference-server issue 356; DeepSeek-V3 on 8
GPUs, sgl-project/sglang pull request 2643 (30.3 tokens/s); Qwen3-30B-A3B on an A100,
tt-inference-server issue 340. The launch costs of ``hardware.toml`` are from these, so that they
say whether the model adds up, not whether it predicts.
"""

import json
import re

import pytest
from benchmarks.planner import PUBLISHED, findings, published
from benchmarks.planner import tensor_parallel as stock
from benchmarks.results import RESULTS


@pytest.mark.slow  # quick: a few of its rows, below
def test_what_is_kept_of_it_is_what_the_model_gives():
    """Of all rows, those that the model misses too."""
    rows = published()
    kept = json.loads((RESULTS / "planner-published.json").read_text())["rows"]
    assert rows == kept, "python -m benchmarks.planner --quick, and keep planner-published"
    inside, told = map(int, rows[-1]["lengths in the range"].split(" of "))
    assert told == sum(rate is not None for rates in PUBLISHED.values() for rate in rates)
    assert inside >= 0.8 * told


@pytest.mark.parametrize(
    ("model", "gpu", "count", "hosts", "milliseconds"),
    [
        ("deepseek-v3", "h100", 8, 2, 31.2),
        ("deepseek-v3", "h200", 8, 1, 33.0),
        ("qwen3-30b-a3b", "a100", 1, 1, 9.6),
    ],
)
def test_one_request(model, gpu, count, hosts, milliseconds):
    found = stock(model, gpu, count, hosts, input=128, output=128, fixed_batch=1)
    quickest, slowest = found.quickest.delay * 1e3, found.slowest.delay * 1e3
    assert quickest <= milliseconds <= slowest
    assert 0.75 <= found.tpot * 1e3 / milliseconds <= 1.25


NOT_REPRODUCED = {
    "DeepSeek-V3, best stock pipeline / pure TP",
    "DeepSeek-V3, best SiPipe / pure TP",
    "16 H100, best SiPipe / best stock",
    "8 H100, SiPipe / stock at P2T4",
}
"""Of the paper's findings: the model's figure, or an end of its range, is outside the paper's."""


def numbers(text):
    return [float(each) for each in re.findall(r"[\d.]+", text)]


def test_what_is_kept_of_the_papers_findings_is_what_the_model_gives():
    kept = json.loads((RESULTS / "planner-findings.json").read_text())["rows"]
    assert findings() == kept, "python -m benchmarks.planner --quick, and keep planner-findings"
    model = {row["what"]: numbers(row["model"]) for row in kept}
    ranges = {row["what"]: numbers(row["paper"]) for row in kept if row["paper"][-1:] in ("x", "%")}
    outside = {
        what
        for what, told in ranges.items()
        if not told[0] <= min(model[what]) <= max(model[what]) <= told[-1]
    }
    assert outside == NOT_REPRODUCED
    peaks = dict(re.findall(r"(\S+) (\d+)", kept[0]["model"]))
    assert set(peaks.values()) <= {"2", "4"}
    h100, a100 = (model[f"8 {gpu}, SiPipe / stock at P2T4"] for gpu in ("H100", "A100"))
    assert all(small < large for small, large in zip(a100, h100, strict=True))
    assert min(model["8 H100, stock TP 8 / stock P2T4"]) > 1

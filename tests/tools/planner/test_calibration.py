"""Fitting, on the traces of simulated pipelines."""

import pytest
from benchmarks.calibration import Run, calibrate
from benchmarks.calibration_traces import check_loop, run_of
from benchmarks.made_up_trace import Example, write_example
from tests.tools.planner.planned import config, make_cluster

from sipipe.engine.layers.hf_config import facts_from_config
from sipipe.errors import ConfigError
from sipipe.tools.planner.costs import datasheet_costs
from sipipe.tools.planner.workload import Workload
from sipipe.tools.report.reader import read_trace

SIZES = config(layers=8, vocabulary=151_936, hidden=512, heads=8, intermediate=1536)
BENCH = facts_from_config(SIZES | {"num_key_value_heads": 4}, name="bench")
# So many cores that no test depends on the machine's.
CLUSTER = make_cluster("cpu", per_host=1, cores=1_000, gigabits=100)
SHEET = datasheet_costs(BENCH, CLUSTER, Workload())


def test_a_trace_without_forwards_and_one_of_another_model():
    with pytest.raises(ConfigError, match=r"calibration: .*forward records"):
        calibrate(SHEET, [Run(p=2, t=1, observations=[])])
    with pytest.raises(ConfigError, match="9 stages"):
        calibrate(SHEET, [Run(p=9, t=1, observations=[])])


@pytest.mark.parametrize(
    "example",
    [
        {"stock": True, "inflight": 4},
        {"stock": True, "inflight": 4, "sample": 0.5, "prepare": 4.0},
        {"inflight": 5},
        {"inflight": 4, "sample": 12.0},
        {"inflight": 5, "stages": 2, "sample": 24.0},
    ],
)
def test_a_simulated_pipeline_is_predicted_from_its_trace(tmp_path, example):
    """Made up event by event; the fitted loop must give its time per output token."""
    spec = Example(iterations=1_200, prefill_every=100, **example)
    write_example(tmp_path, spec)
    trace = read_trace(str(tmp_path))
    (check,) = check_loop(calibrate(SHEET, [run_of(trace)]), trace)
    assert check.batch == spec.batch
    assert check.count > 100
    assert abs(check.error) < 0.1

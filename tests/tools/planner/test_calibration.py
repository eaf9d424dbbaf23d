"""Fitting, on synthetic traces with known constants and noise."""

import dataclasses
import sys

import numpy as np
import pytest
from benchmarks.calibration import Observation, Run, calibrate, usual
from benchmarks.calibration_traces import check_loop, run_of
from benchmarks.made_up_trace import Example, write_example

from sipipe.engine.layers.hf_config import facts_from_config
from sipipe.errors import ConfigError, ResourceError
from sipipe.tools.planner.costs import datasheet_costs
from sipipe.tools.planner.hardware import Cluster, device, engine, network
from sipipe.tools.planner.pipeline import iterate
from sipipe.tools.planner.placement import place
from sipipe.tools.planner.workload import Workload
from sipipe.tools.report.reader import read_trace

BENCH = facts_from_config(
    {
        "num_hidden_layers": 8,
        "vocab_size": 151_936,
        "hidden_size": 512,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "intermediate_size": 1536,
    },
    name="bench",
)
CLUSTER = Cluster(
    device=device("cpu"),
    hosts=1,
    devices_per_host=1,
    network=network(100),
    cores_per_host=1_000,  # so that no test depends on the machine's cores
)
SHEET = datasheet_costs(BENCH, CLUSTER, Workload())


def test_without_scipy_one_line_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    with pytest.raises(ResourceError, match="fits with scipy, which is not installed") as caught:
        calibrate(SHEET, [synthetic(1, (8,))])
    assert "\n" not in str(caught.value)


def test_a_compilation_is_not_a_cost():
    assert usual([1.0] * 9 + [500.0]).tolist() == [1.0] * 9


@dataclasses.dataclass(frozen=True)
class Truth:
    """A machine's true constants, seconds."""

    layer: float = 300e-6
    flop: float = 1 / 60e9
    logits_flop: float = 1 / 90e9
    prepare: tuple = (200e-6, 3e-6)
    schedule: tuple = (150e-6, 4e-6)
    sample: tuple = (20e-6, 0.07e-3 / 151_936)
    handover: tuple = (30e-6, 0.2e-9)
    send: tuple = (60e-6, 0.5e-9)

    def seconds(self, phase, stage, batch, tokens):
        vocabulary, hidden = BENCH.vocabulary, BENCH.hidden
        active = sum(BENCH.layer_parameters(layer) for layer in stage.layer_range)
        return {
            "forward": self.layer * stage.layers + 2 * active * tokens * self.flop,
            "logits": 2 * vocabulary * stage.projection * hidden * batch * self.logits_flop,
            "prepare": self.prepare[0] + self.prepare[1] * batch,
            "schedule": self.schedule[0] + self.schedule[1] * batch,
            "sample": self.sample[0] + self.sample[1] * batch * vocabulary,
            "handover": self.handover[0] + self.handover[1] * batch * vocabulary * stage.projection,
            "send": self.send[0] + self.send[1] * tokens * hidden,
        }[phase]


def synthetic(p, batches, *, noise=0.1, seed=0, truth=None, records=60, projections=()):
    """A run of the bench model on the true machine, with multiplicative noise."""
    truth, rng = truth or Truth(), np.random.default_rng(seed)
    found = []
    stages = place(BENCH.layers, p, 1, 8, None, projections).stages
    for batch in batches:
        for _ in range(records):
            tokens = batch if rng.random() < 0.8 else batch * 5

            def see(where, phase, size, stage=stages[-1], tokens=tokens):
                exact = truth.seconds(phase, stage, size, tokens)
                value = exact * rng.lognormal(-noise * noise / 2, noise)
                found.append(Observation(where, phase, size, tokens, value))

            for stage in stages:
                for phase in ("forward", "prepare"):
                    see(stage.index, phase, batch, stage)
                if not stage.is_last:
                    see(stage.index, "send", batch, stage)
                if stage.projection:
                    see(stage.index, "logits", batch, stage)
                    see(stage.index, "handover", batch, stage)
            see(-1, "schedule", batch)
            see(-1, "sample", batch)
    return Run(p=p, t=1, observations=found, projections=projections)


def period(costs, p, batch, workload):
    placement = place(BENCH.layers, p, 1, 8)
    return iterate(
        costs,
        engine("sipipe"),
        placement,
        workload.microbatch(batch),
        inflight=p + 1,
        samplers=1,
    ).period


@pytest.mark.parametrize(("fitted", "checked"), [(2, 1), (2, 4), (4, 2), (1, 2)])
def test_a_fit_to_one_configuration_predicts_another(fitted, checked):
    """The check of the issue, on synthetic traces with 20 % noise: within 10 % of the truth."""
    costs = calibrate(SHEET, [synthetic(fitted, (8, 16, 32, 64), noise=0.2)])
    exact = calibrate(SHEET, [synthetic(checked, (8, 16, 32, 64), noise=1e-6)])
    for batch in (8, 24, 64):
        workload = Workload(input=50, output=50)
        assert period(costs, checked, batch, workload) == pytest.approx(
            period(exact, checked, batch, workload), rel=0.10
        )


def test_a_shared_projection_predicts_one_on_the_last_stage():
    costs = calibrate(SHEET, [synthetic(2, (8, 16, 32, 64), noise=0.05, projections=(0.7, 0.3))])
    exact = calibrate(SHEET, [synthetic(2, (8, 16, 32, 64), noise=1e-6)])
    for batch in (8, 24, 64):
        workload = Workload(input=50, output=50)
        expected = period(exact, 2, batch, workload)
        assert period(costs, 2, batch, workload) == pytest.approx(expected, rel=0.05)


def test_the_constants_themselves_are_found():
    costs = calibrate(SHEET, [synthetic(2, (8, 16, 32, 64), noise=0.05, records=200)])
    forward = costs.fits["forward"].coefficients
    assert forward["layers"] == pytest.approx(Truth.layer, rel=0.1)
    assert forward["products"] == pytest.approx(Truth.flop, rel=0.1)
    assert costs.fits["forward"].median_error < 0.05


def test_a_model_that_does_not_describe_the_trace_shows_in_the_error():
    """Times that fall with the batch fit no sum of growing terms."""
    seen = [
        Observation(0, "forward", batch, batch, 1.0 / batch)
        for batch in (1, 8, 64)
        for _ in range(20)
    ]
    assert calibrate(SHEET, [Run(p=1, t=1, observations=seen)]).fits["forward"].high_error > 0.5


def test_stock_and_sipipe_traces_are_kept_apart():
    ours, stock = synthetic(2, (8, 16)), synthetic(2, (8, 16), truth=Truth(prepare=(3e-3, 1e-5)))
    costs = calibrate(SHEET, [ours, dataclasses.replace(stock, engine="vllm")])
    stage, work = place(8, 2, 1, 8).stages[0], Workload(input=0, output=9).microbatch(16)
    assert costs.preparation(engine("sipipe"), stage, work) < 0.4e-3
    assert costs.preparation(engine("vllm"), stage, work) > 2e-3


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

"""Profiles of emulated devices say what the planner says."""

import numpy as np
import pytest
from benchmarks.emulation.__main__ import cpu_by_role, idle_by_sipipe
from benchmarks.emulation.cluster import emulation
from benchmarks.emulation.profile import Curve, Profile, StageProfile

from sipipe.errors import ConfigError
from sipipe.tools.planner.costs import datasheet_costs
from sipipe.tools.planner.workload import Microbatch, Workload


@pytest.mark.parametrize("name", ["llama-70b-8xh100", "deepseek-v3-16xh100"])
@pytest.mark.parametrize("pp", [4, 8])
@pytest.mark.parametrize("batch", [16, 64, 512])
def test_stage_times_are_the_planners(name, pp, batch):
    made = emulation(name, pp, jitter=0.0)
    costs = datasheet_costs(made.facts, made.cluster, Workload())
    for stage, profile in zip(made.placement.stages, made.profile.stages, strict=True):
        work = Microbatch(batch=batch, tokens=batch, context=1000)
        predicted = sum(costs.forward(stage, work, gather=False).values())
        emulated = profile.seconds(np.full(batch, 1000), np.ones(batch)) + profile.projection(batch)
        assert emulated == pytest.approx(predicted, rel=0.01)


@pytest.mark.parametrize(
    ("name", "pp", "more", "words"),
    [
        ("lama-70b-8xh100", 4, {}, 'model "lama-70b" is none of'),
        ("qwen3-8b-8xh999", 4, {}, "unknown device"),
        ("llama-70b-8xh100", 3, {}, "do not make 3 equal stages"),
        ("llama-70b-8xh100", 16, {}, "do not make 16 equal stages"),
        ("llama-70b-8xh100", 2, {"cut": (1, 2)}, "2 numbers, 80 together"),
        ("llama-405b-4xh100", 4, {}, "does not fit into its devices' memory"),
        ("llama-70b-16xh100", 4, {"shared": True}, "several stages on one host"),
        ("llama-8b-1xh100", 1, {"shared": True}, "several stages on one host"),
    ],
)
def test_what_does_not_fit_is_one_line(name, pp, more, words):
    with pytest.raises(ConfigError, match=words) as error:
        emulation(name, pp, jitter=0.0, **more)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("name", "pp"), [("llama-8b-4xh100", 4), ("qwen2.5-7b-8xh100", 8)])
def test_a_shared_projection_leaves_stage_times_and_room_as_they_would_be(name, pp):
    """Layers are even, each stage has its part's weights besides, and times are the whole one's."""
    last, shared = (emulation(name, pp, shared=x, jitter=0.0) for x in (False, True))
    assert sum(stage.projection for stage in shared.placement.stages) == pytest.approx(1)
    counts = [stage.layers for stage in shared.placement.stages]
    assert max(counts) - min(counts) <= 1
    assert shared.profile.stages[-1].projection == last.profile.stages[-1].projection
    assert shared.profile.copy == last.profile.copy
    even = emulation(name, pp, cut=tuple(counts), jitter=0.0).profile.kv_tokens
    assert 0.9 * even < shared.profile.kv_tokens <= even


def test_what_the_cut_forces_is_not_idle_time_of_sipipes():
    """The benchmark's account: stages of 10, 20 and 10 ms, the last with 10 ms of projection."""

    def takes(ms):
        return Curve(at=(0, 1), seconds=(ms / 1e3, ms / 1e3))

    stages = (StageProfile(takes(ms), takes(10), takes(0), 0.0, 0.0) for ms in (10, 20, 10))
    made = Profile(name="a", stages=tuple(stages), copy=takes(0), kv_tokens=1)
    idle = idle_by_sipipe(made, {"batch": 3.2, "busy_share": [0.5, 0.9, 0.95]}, context=40)
    assert idle == pytest.approx([0.0, 0.1, 0.05])
    assert cpu_by_role({"executor": 2.5, "stage 0": 1.24, "stage 1": 0.9}) == (
        "executor 2.5, stage 0.9-1.2"
    )

"""A draft head that only takes time, and drafts that are right as often as was asked for."""

from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("vllm")

import torch
from benchmarks import emulate
from benchmarks.emulation.cluster import emulation
from benchmarks.emulation.profile import Curve, Profile, StageProfile
from benchmarks.emulation.speculator import EmulatedSpeculator
from benchmarks.emulation.worker import EmulatedDevice

from sipipe.errors import ConfigError
from sipipe.tools.planner.costs import datasheet_costs
from sipipe.tools.planner.workload import Microbatch, Workload

DRAFTS = 3


class Device:
    """Notes what is launched, and what is waited for."""

    def __init__(self):
        self.seconds = 0.0
        self.waited = []

    def launch(self, seconds):
        self.seconds += seconds

    def mark(self):
        return self.seconds

    def wait(self, mark):
        self.waited.append(mark)


def propose(profile, requests, tokens, steps):
    """Run an emulated head over ``tokens`` tokens of each request; returns drafts and the device."""
    config = SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=2000),
        scheduler_config=SimpleNamespace(max_num_seqs=64, max_num_batched_tokens=2048),
    )
    device = Device()
    settings = SimpleNamespace(num_speculative_tokens=DRAFTS)
    speculator = EmulatedSpeculator(config, settings, profile.head, device)
    assert speculator.num_speculative_steps == DRAFTS
    batch = SimpleNamespace(
        num_reqs=requests,
        num_scheduled_tokens=np.full(requests, tokens, np.int32),
        seq_lens_cpu_upper_bound=torch.full((requests,), tokens, dtype=torch.int32),
    )
    return speculator.propose(batch, None, {}, num_speculative_tokens=steps), device


@pytest.mark.parametrize("name", ["llama-70b-8xh100", "deepseek-v3-16xh100"])
@pytest.mark.parametrize("pp", [4, 8])
@pytest.mark.parametrize("requests", [4, 32])
def test_a_heads_time_is_the_planners(name, pp, requests):
    made = emulation(name, pp, drafts=DRAFTS, jitter=0.0)
    costs = datasheet_costs(made.facts, made.cluster, Workload())
    work = Microbatch(batch=requests, tokens=requests * (1 + DRAFTS), context=1, drafts=DRAFTS)
    predicted = costs.forward(made.placement.stages[-1], work, gather=False)["draft head"]
    drafts, device = propose(made.profile, requests, 1 + DRAFTS, DRAFTS)
    assert device.seconds == pytest.approx(predicted, rel=0.03)
    assert device.waited == [device.seconds], "drafts go to the engine when the device has them"
    assert drafts.shape == (requests, DRAFTS)


def test_a_pass_over_a_prompt_proposes_nothing_and_waits_for_nothing():
    made = emulation("llama-70b-8xh100", 4, drafts=DRAFTS, jitter=0.0)
    drafts, device = propose(made.profile, 2, 30, 0)
    assert drafts.shape == (2, 0)
    assert 0 < device.seconds < made.profile.stages[-1].layers(60)
    assert not device.waited


def test_a_head_takes_layers_off_the_last_stage_and_room_off_the_cache():
    plain, drafting = (emulation("llama-70b-8xh100", 4, drafts=k, jitter=0.0) for k in (0, DRAFTS))
    layers = [[stage.layers for stage in made.placement.stages] for made in (plain, drafting)]
    assert layers[1][-1] < layers[0][-1]
    assert sum(layers[0]) == sum(layers[1])
    assert plain.profile.head is None
    slowed = drafting.profile.slowed(2.0).head
    assert slowed.layers(8) == pytest.approx(2 * drafting.profile.head.layers(8))
    even = (20, 20, 20, 20)
    tokens = [
        emulation("llama-70b-8xh100", 4, cut=even, drafts=k, jitter=0.0).profile.kv_tokens
        for k in (0, DRAFTS)
    ]
    assert tokens[1] < tokens[0]


@pytest.mark.parametrize("acceptance", [0.3, 0.7])
def test_heads_drafts_are_right_as_often_as_was_asked_for(acceptance):
    curve = Curve(at=(0.0, 1.0), seconds=(0.0, 0.0))
    profile = Profile(
        name="",
        stages=(),
        copy=curve,
        kv_tokens=0,
        acceptance=acceptance,
        head=StageProfile(curve, curve, curve, 0.0, 0.0),
    )
    device = EmulatedDevice(profile, torch.bfloat16, torch.zeros(1, dtype=torch.int64), 8)
    places = torch.randn(3000, 8, dtype=torch.bfloat16)
    device.fetch(torch.empty(3000, 8, device="meta"), places, 0)
    drafts, _ = propose(emulation("llama-70b-8xh100", 4, drafts=1, jitter=0.0).profile, 4, 1, 1)
    right = places.argmax(1) == drafts[0, 0]
    assert right.float().mean() == pytest.approx(acceptance, abs=0.03)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--drafts 2", "--drafts wants --acceptance"),
        ("--drafts 2 --acceptance 0.7 --vocabulary shared", "with --vocabulary last"),
        ("--acceptance 0.4", "0.5 or more, without --drafts"),
    ],
)
def test_a_mistake_is_one_line(options, words):
    with pytest.raises(ConfigError, match=words):
        emulate.emulated(["--profile", "llama-70b-8xh100", "--pp", "4", *options.split()])


@pytest.mark.engine
@pytest.mark.slow
def test_a_head_on_an_emulated_pipeline(monkeypatch):
    """SiPipe's own scheduler, drafter and samplers, with a head and devices that only take time."""
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    words = "--profile qwen3-4b-2xl40s --pp 2 --slow-motion 4 --requests 12 --prompt-tokens 20"
    options = f"{words} --tokens 60 --drafts 2 --acceptance 0.7"
    (load,) = emulate.emulated(options.split())[1]["loads"]
    assert load["drafts"]["verified"] > 0
    assert load["drafts"]["accepted"] == pytest.approx(0.7, abs=0.2)
    assert load["drafts"]["a_pass"] > 1

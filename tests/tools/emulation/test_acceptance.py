"""Emulated logits of which drafts by prompt lookup are right as often as was asked for."""

import itertools

import msgspec
import numpy as np
import pytest

pytest.importorskip("vllm")

import torch
from benchmarks.emulation.profile import Curve, Profile
from benchmarks.emulation.worker import EmulatedDevice

from sipipe.messages.start_records import NGramSettings
from sipipe.sampler.drafts import NGrams


@pytest.mark.parametrize("acceptance", [0.5, 0.6])
def test_drafts_are_right_as_often_as_was_asked_for(acceptance):
    curve = Curve(at=(0.0, 1.0), seconds=(0.0, 0.0))
    profile = Profile(name="", stages=(), copy=curve, kv_tokens=0)
    profile = msgspec.structs.replace(profile, acceptance=acceptance)
    device = EmulatedDevice(profile, torch.bfloat16, torch.zeros(1, dtype=torch.int64), 8)
    places = torch.randn(3000, 8, dtype=torch.bfloat16)
    device.fetch(torch.empty(3000, 8, device="meta"), places, 0)
    tokens = places.argmax(1).to(torch.int32).numpy()
    drafts = NGrams(
        NGramSettings(num_speculative_tokens=1, prompt_lookup_max=4, prompt_lookup_min=2), 3000
    )
    drafts.join(0, tokens[:50], tokens[:0])
    handle, row, right = np.zeros(1, np.int32), np.zeros(1, np.int32), []
    for now, following in itertools.pairwise(tokens[50:]):
        proposed = drafts.propose(handle, row, np.array([now], np.int32), 1e-9)
        right += [np.frombuffer(each, np.int32)[0] == following for _, each in proposed]
        drafts.append([0], [int(now)])
    assert len(right) > 2900
    assert np.mean(right) == pytest.approx(acceptance, abs=0.04), (
        "the longest match favours the ends of runs: far above, fewer"
    )

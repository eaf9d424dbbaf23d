"""Stage times of a recorded run, in a profile."""

import numpy as np
import pytest
from benchmarks.emulation.cluster import emulation
from benchmarks.emulation.replay import replayed
from benchmarks.made_up_trace import Example, write_example

from sipipe.errors import ConfigError
from sipipe.observe.phases import Phase
from sipipe.tools.report.reader import read_trace


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    directory = tmp_path_factory.mktemp("traces") / "made"
    write_example(directory, Example(stages=4, iterations=400, stock=False, inflight=5))
    return read_trace(str(directory))


def test_a_stage_takes_what_it_took(trace):
    profile = emulation("llama-70b-8xh100", 4, jitter=0.0).profile
    made = replayed(profile, trace)
    assert (made.copy, made.kv_tokens) == (profile.copy, profile.kv_tokens)
    for stage, process in zip(made.stages, trace.of("stage"), strict=True):
        records = process.phase(Phase.FORWARD)
        usual = np.median(records["tokens"])
        took = (records["end_ns"] - records["start_ns"])[records["tokens"] == usual] / 1e9
        assert stage.layers(usual) == pytest.approx(np.median(took), rel=0.1)
        assert stage.decode_context == 0


def test_another_number_of_stages_is_one_line(trace):
    with pytest.raises(ConfigError, match="recorded with 4 stages, not the 2 of --pp"):
        replayed(emulation("llama-70b-8xh100", 2, jitter=0.0).profile, trace)

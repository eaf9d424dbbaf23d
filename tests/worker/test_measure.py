"""What a stage measures for ``"cpu_sampling": "auto"``, on a device whose clock is a script.

With vLLM's runner: tests/engine/test_second_runner.py.
"""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm", reason="the module belongs to sipipe.worker")

from vllm.v1.worker.gpu import buffer_utils  # noqa: E402
from vllm.v1.worker.gpu.sample import gumbel  # noqa: E402

from sipipe.messages.measured import MIXES  # noqa: E402
from sipipe.worker import device as device_module  # noqa: E402
from sipipe.worker import measure  # noqa: E402
from sipipe.worker.device import seconds  # noqa: E402

ROWS, HIDDEN, VOCAB = 6, 4, 32


class ScriptedDevice:
    """Work takes what it says, in microseconds; marks are times."""

    def __init__(self):
        self.now = self.reached = 0

    def spend(self, microseconds):
        self.now += microseconds * 1000

    def mark(self):
        return self.now

    def occupy(self, seconds):
        pass

    def wait(self, mark):
        self.reached = max(self.reached, mark)

    def nanoseconds(self, first, last):
        assert last <= self.reached, "asked for a time that the device has not reached"
        return last - first

    def fetch(self, source, target, after):
        assert source.shape == target.shape
        target.copy_(source)
        self.spend(70)
        return self.mark()


@dataclasses.dataclass
class Batch:
    idx_mapping: object = None
    idx_mapping_np: object = None
    expanded_idx_mapping: object = None
    positions: object = torch.arange(ROWS)
    logits_indices: object = torch.arange(ROWS)

    @classmethod
    def make_dummy(cls, reqs, tokens, buffers):
        assert reqs == tokens == ROWS
        assert buffers == "buffers"
        return cls()


class States:
    def __init__(self):
        self.req_id_to_index, self.most = {}, 0
        self.index_to_req_id = {row: str(row) for row in range(10)}

    def add_request(self, *, req_id, prompt_len, all_token_ids, num_computed_tokens, max_tokens):
        assert num_computed_tokens == len(all_token_ids) > prompt_len
        self.req_id_to_index[req_id] = 9 - len(self.req_id_to_index)
        self.most = max(self.most, len(self.req_id_to_index))

    def apply_staged_writes(self):
        pass

    def remove_request(self, req_id):
        del self.req_id_to_index[req_id]


class Runner:
    """A first call that compiles, and one in five that is disturbed, count for nothing."""

    lora_config, device, input_buffers = None, torch.device("cpu"), "buffers"
    max_num_reqs, model_config = 10, SimpleNamespace(seed=0, use_fp64_gumbel=False)

    def __init__(self, device):
        self.clock, self.calls, self.req_states, self.params = device, 0, States(), {}
        self.sampler = SimpleNamespace(
            add_request=self.params.__setitem__, apply_staged_writes=lambda: None
        )

    def _dummy_run(self, tokens, *, uniform_decode):
        assert (tokens, uniform_decode) == (ROWS, True)
        self.calls += 1
        self.clock.spend({1: 9_000_000, 3: 5_000}.get(self.calls, 100))
        return None, torch.ones(ROWS, HIDDEN)

    def sample(self, hidden, batch, grammar):
        assert grammar is None
        assert batch.idx_mapping.tolist() == batch.idx_mapping_np.tolist() == [9, 8, 7, 6, 5, 4]
        params = self.params[9]
        self.clock.spend(10 + 5 * (params.temperature > 0) + 25 * (params.top_k > 0))


class Head:
    def __init__(self, device):
        self.clock = device

    def compute(self, hidden):
        self.clock.spend(3)
        return torch.zeros(ROWS, VOCAB)

    def whole(self, columns):
        self.clock.spend(2)
        return columns


@pytest.fixture
def device(monkeypatch):
    def gumbel_sample(logits, rows, temperatures, *_, **__):
        assert rows.tolist() == [9, 8, 7, 6, 5, 4]
        found.spend(20 + 4 * int(temperatures[9] > 0))

    found = ScriptedDevice()
    monkeypatch.setattr(measure, "InputBatch", Batch)
    monkeypatch.setattr(buffer_utils, "is_uva_available", lambda: False)
    monkeypatch.setattr(gumbel, "gumbel_sample", gumbel_sample)
    return found


def test_a_last_stage(device):
    runner = Runner(device)
    target = torch.ones(ROWS, VOCAB)
    logits = SimpleNamespace(part=lambda row, rows: target[row : row + rows])
    found = measure.measure_stage(runner, device, ROWS, Head(device), logits)
    assert found.layers == pytest.approx(100e-6)
    assert found.projection == pytest.approx(3e-6)
    assert [found.device[mix] for mix in MIXES] == pytest.approx([10e-6, 15e-6, 40e-6])
    assert found.plain == pytest.approx({"greedy": 25e-6, "temperature": 29e-6})
    assert found.copy == pytest.approx(70e-6)
    assert found.copied == ROWS * VOCAB * 4
    assert not runner.req_states.req_id_to_index, "nothing is left of the requests"
    assert runner.req_states.most == ROWS
    assert not target.any(), "into the entry itself"


def test_a_stage_before_it_and_a_rank_that_writes_nothing(device):
    assert measure.measure_stage(Runner(device), device, ROWS, None, None).device == {}
    found = measure.measure_stage(Runner(device), device, ROWS, Head(device), None)
    assert found.copy == 0.0
    assert set(found.device) == set(MIXES), "it takes part in what is collective"


class LateDevice(ScriptedDevice):
    """Runs what is launched when it has run what was launched before."""

    host = free = 0.0

    def launch(self, host, work):
        self.host += host
        self.free = max(self.free, self.host) + work

    def occupy(self, seconds):
        self.launch(0, seconds)

    def mark(self):
        return int(self.free * 1e9)


@pytest.mark.parametrize(("host", "work"), [(0.4e-3, 0.1e-3), (0.1e-3, 0.4e-3)])
def test_a_slow_launch_is_not_the_devices_time(monkeypatch, host, work):
    late = LateDevice()
    monkeypatch.setattr(device_module, "time", SimpleNamespace(perf_counter=lambda: late.host))
    assert seconds(late, lambda: late.launch(host, work)) == pytest.approx(work, rel=1e-3)

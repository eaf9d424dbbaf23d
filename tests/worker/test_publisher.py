"""Results handed on, on the host. On a device that is late: test_cuda_order.py."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from tests.programs import ran

torch = pytest.importorskip("torch")
pytest.importorskip("vllm", reason="the module belongs to sipipe.worker")

from sipipe.ipc.ring.logits import LogitsChannel  # noqa: E402
from sipipe.messages.logits import LogitsShape  # noqa: E402
from sipipe.messages.replies import IterationReport  # noqa: E402
from sipipe.worker.device import HostDevice, Launched  # noqa: E402
from sipipe.worker.inputs.model_input import ModelInput  # noqa: E402
from sipipe.worker.projection.logits import LogitsHandover  # noqa: E402
from sipipe.worker.publisher import Publisher  # noqa: E402

VOCAB, BATCH, ENTRIES = 37, 5, 4


class CountingDevice(HostDevice):
    """A device whose copies end 500 ns after what they copy."""

    waits = 0

    def fetch(self, source, target, after):
        super().fetch(source, target, after)
        return after + 500

    def wait(self, mark):
        self.waits += 1
        return super().wait(mark)


@pytest.fixture
def device():
    return CountingDevice()


@pytest.fixture
def rig(device):
    shape = LogitsShape(vocab=VOCAB, bounds=(0, VOCAB))
    channel = LogitsChannel("logits", shape, rows=ENTRIES * BATCH, entries=ENTRIES, readers=["a"])
    handover = LogitsHandover(channel.endpoint)
    found = SimpleNamespace(said=[], phases=[], failed=[])
    found.publisher = Publisher(
        device,
        handover,
        report=found.said.append,
        record=lambda phase, inputs, began, ended: found.phases.append(
            (phase.name, inputs.iteration, ended - began)
        ),
        fail=found.failed.append,
        stall_timeout=10,
    )
    yield found
    for end in (found.publisher, handover, channel):
        end.close()


def launched(iteration, first=0, last=0, **more):
    row = iteration % ENTRIES * BATCH
    inputs = ModelInput(iteration=iteration, slot=0, buffer_set=0, output=None, logits_row=row)
    return Launched(inputs=inputs, first=first, last=last, **more)


def test_what_is_said_of_an_iteration(rig):
    """Scores of the prompts that asked for them, tokens of the device, and the times of the layers
    and of the product."""
    told = SimpleNamespace(
        prompt_logprobs_dict={"asked": "scores", "not": None},
        prompt_token_id_logprobs_dict={"named": 7.0},
    )
    said = SimpleNamespace(get_output=lambda: told, sampled_token_ids=np.array([[5], [9]]))
    rig.publisher.put(
        launched(0, first=0, made=2000, last=3000, reports=True, draws=True, output=said)
    )
    rig.publisher.drain()
    assert rig.said == [
        IterationReport(
            iteration=0,
            prompt_logprobs={"asked": "scores"},
            tokens=[5, 9],
            prompt_scores={"named": 7.0},
        )
    ]
    assert rig.phases == [("FORWARD", 0, 2000), ("LOGITS", 0, 1000)]


def test_it_sleeps_once_an_iteration_and_has_all_times(rig, device):
    """The layers and the product end before the copy, which is what it sleeps for."""
    for iteration in range(2):
        logits = torch.zeros(BATCH, VOCAB)
        rig.publisher.put(launched(iteration, first=0, made=2000, last=3000, logits=logits))
    rig.publisher.drain()
    assert device.waits == 2
    assert rig.phases == [
        phase for i in range(2) for phase in (("FORWARD", i, 2000), ("LOGITS", i, 1000))
    ]


def test_an_error_ends_it_and_is_said(rig):
    rig.publisher.put(launched(0, logits=torch.zeros(ENTRIES * BATCH + 1, VOCAB)))
    with pytest.raises(Exception, match="21, LogitsShape"):
        rig.publisher.drain()
    with pytest.raises(Exception, match="21, LogitsShape"):
        rig.publisher.put(launched(1))
    rig.publisher.close()
    assert len(rig.failed) == 1


FETCHES = """
import os, threading
import torch
from sipipe.worker.device import HostDevice

def fetch():
    before = len(os.listdir("/proc/self/task"))
    HostDevice().fetch(made, there, 0)
    print(len(os.listdir("/proc/self/task")) - before)

made, whole = torch.randn(64, 8192, dtype=torch.bfloat16), torch.zeros(64, 10_000, dtype=torch.bfloat16)
there = whole[:, 100:8292]
thread = threading.Thread(target=fetch)
thread.start()
thread.join()
assert torch.equal(there, made) and not whole[:, :100].any()
"""


def test_logits_are_copied_without_an_openmp_team():
    """With a team of its own beside that of the forward pass there were more threads than cores, and
    libgomp put the pass's to sleep after each operator: a small model served one request half the tokens."""
    done = ran([sys.executable, "-c", FETCHES], env={**os.environ, "OMP_NUM_THREADS": "2"})
    assert done.stdout.splitlines()[-1:] == ["0"], done.stdout

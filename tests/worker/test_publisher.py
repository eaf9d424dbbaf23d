"""Results handed on, on the host. On a device that is late: test_cuda_order.py."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm", reason="the module belongs to sipipe.worker")

from sipipe.ipc.ring.logits import LogitsChannel  # noqa: E402
from sipipe.messages.logits import LogitsShape  # noqa: E402
from sipipe.messages.replies import IterationReport  # noqa: E402
from sipipe.worker.device import HostDevice, Launched  # noqa: E402
from sipipe.worker.inputs.model_input import ModelInput  # noqa: E402
from sipipe.worker.logits import LogitsHandover  # noqa: E402
from sipipe.worker.publisher import Publisher  # noqa: E402

VOCAB, BATCH, ENTRIES = 37, 5, 4


class Rig:
    def __init__(self, device):
        self.channel = LogitsChannel(
            "logits",
            LogitsShape(vocab=VOCAB, bounds=(0, VOCAB)),
            rows=ENTRIES * BATCH,
            entries=ENTRIES,
            readers=["a"],
        )
        self.said, self.phases, self.failed = [], [], []
        handover = LogitsHandover(self.channel.endpoint)
        self.ends = [handover, self.channel]
        self.publisher = Publisher(
            device,
            handover,
            report=self.said.append,
            record=lambda phase, inputs, began, ended: self.phases.append(
                (phase.name, inputs.iteration, ended - began)
            ),
            fail=self.failed.append,
            stall_timeout=10,
        )

    def close(self):
        self.publisher.close()
        for end in self.ends:
            end.close()


def launched(device, iteration, logits=None, **more):
    row = iteration % ENTRIES * BATCH
    inputs = ModelInput(iteration=iteration, slot=0, buffer_set=0, output=None, logits_row=row)
    marks = {"first": device.mark(), "last": device.mark()}
    return Launched(inputs=inputs, **marks, logits=logits, **more)


def output(prompt_logprobs, tokens):
    return SimpleNamespace(
        get_output=lambda: SimpleNamespace(
            prompt_logprobs_dict=prompt_logprobs, prompt_token_id_logprobs_dict={"named": 7.0}
        ),
        sampled_token_ids=np.array(tokens),
    )


def test_what_is_said_of_an_iteration():
    """Scores of the prompts that asked for them, tokens of the device, and the times of the layers
    and of the product."""
    device = HostDevice()
    rig = Rig(device)
    said = output({"asked": "scores", "not": None}, [[5], [9]])
    one = launched(device, 0, reports=True, draws=True, output=said)
    one.first, one.made, one.last = 0, 2000, 3000
    rig.publisher.put(one)
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
    rig.close()


def test_an_error_ends_it_and_is_said():
    device = HostDevice()
    rig = Rig(device)
    rig.publisher.put(launched(device, 0, torch.zeros(ENTRIES * BATCH + 1, VOCAB)))
    with pytest.raises(Exception, match="21, LogitsShape"):
        rig.publisher.drain()
    with pytest.raises(Exception, match="21, LogitsShape"):
        rig.publisher.put(launched(device, 1))
    rig.publisher.close()
    assert len(rig.failed) == 1
    rig.close()

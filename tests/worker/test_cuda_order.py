"""The GPU path's order of streams, events and copies, on the emulated device.

:data:`HAZARDS` are faults of that order, each planted by replacing some text of one function of
``src`` (or of the rig, where it stands for vLLM); the schedules must find every one.
"""

from __future__ import annotations

import inspect
import socket
import textwrap

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm", reason="the module belongs to sipipe.worker")

from sipipe.ipc.link.cuda_device import CudaDevice  # noqa: E402
from sipipe.ipc.link.cuda_ipc import CudaIpcReceiving, CudaIpcSending  # noqa: E402
from sipipe.ipc.link.endpoint import open_receiver, open_sender  # noqa: E402
from sipipe.ipc.link.receiver import Receiver  # noqa: E402
from sipipe.messages.link import LinkEndpoint  # noqa: E402
from sipipe.worker.device import CudaStageDevice, DeviceThread  # noqa: E402
from sipipe.worker.double_buffer import DoubleBuffer  # noqa: E402
from sipipe.worker.hooks.draws import LastRows, SomeDrawnHere  # noqa: E402
from sipipe.worker.inputs.buffers import InputBuffers  # noqa: E402
from sipipe.worker.inputs.placement import Copied  # noqa: E402
from sipipe.worker.loaded_stage import LoadedStage  # noqa: E402
from sipipe.worker.projection.thread import ProjectionThread  # noqa: E402
from sipipe.worker.publisher import Publisher  # noqa: E402
from sipipe.worker.sampled_stage import SampledStage  # noqa: E402

from .cuda_stages import Rig  # noqa: E402
from .emulated_cuda import PAGEABLE  # noqa: E402
from .emulated_tensors import Factories, install  # noqa: E402
from .integer_runner import Model, Tables  # noqa: E402
from .test_gpu import hand_over  # noqa: E402

QUICK, SEEDS = 10, 24
TRIES = (382, *range(60))
"""Schedules of which one shows a planted hazard; most are shown by the first few, one by few."""


def run(monkeypatch, seed, iterations=12, plant=None, shared=False):
    """What went wrong in one schedule; with graphs and without, a link of 3 or 4."""
    with monkeypatch.context() as patched:
        machine = install(patched, seed)
        if plant is not None:
            plant_hazard(patched, *plant)
        rig = Rig(
            patched,
            machine,
            seed,
            graphs=seed % 2 == 0,
            depth=3 + seed // 4 % 2,
            shared=shared,
        )
        try:
            return rig.run(iterations)
        finally:
            rig.close()


def plant_hazard(monkeypatch, owner, function, *swaps):
    """``swaps``: a text of the function and what it becomes, and so on."""
    found = inspect.unwrap(getattr(owner, function))
    source = textwrap.dedent(inspect.getsource(found))
    for text, instead in zip(swaps[::2], swaps[1::2], strict=True):
        assert source.count(text) == 1, f"{function} has changed: plant the hazard anew"
        source = source.replace(text, instead)
    names = {}
    flags = found.__code__.co_flags & 0x1000000  # from __future__ import annotations
    source = source.replace("super()", f"super({owner.__name__}, self)")
    exec(compile(source, function, "exec", flags), found.__globals__, names)
    monkeypatch.setattr(owner, function, names[function])


@pytest.mark.parametrize("shared", [False, True], ids=["last", "shared"])
@pytest.mark.parametrize(
    "seed", [*range(QUICK), *(pytest.param(i, marks=pytest.mark.slow) for i in range(QUICK, SEEDS))]
)
def test_results_are_right_and_nothing_waits_for_the_device(monkeypatch, seed, shared):
    """With the output projection on the last stage, and shared out."""
    assert not run(monkeypatch, seed, shared=shared)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("seed", range(3))
def test_what_is_to_run_on_a_gpu_runs(monkeypatch, ranks, seed):
    machine = install(monkeypatch, seed)
    machine.stepped = machine.calm = False
    with Factories():
        hand_over(ranks, work=8)
    assert not machine.errors
    assert machine.waits.count(PAGEABLE) == 3, "the test itself looks at three iterations' logits"
    assert machine.copies == 3 + 3 * ranks, "one of a rank and iteration, however many its rows"


@pytest.mark.parametrize("seed", range(3))
def test_hidden_states_that_go_by_way_of_host_memory_are_waited_for(monkeypatch, seed):
    """By the sender's thread, in pieces, on its own stage's GPU."""
    machine = install(monkeypatch, seed)
    machine.device, machine.calm = 1, False
    link = LinkEndpoint(kind="shm", buffer_tokens=2, device="cuda")
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with Factories():
        sender, receiver = open_sender(link, ends[0]), open_receiver(link, ends[1])
        hidden = torch.ones(5, 3, device="cuda:1") * 3
        sender.send(0, 5, {"hidden_states": hidden})
        found = receiver.take(0, 5)["hidden_states"].cpu()
        sender.close()
        receiver.close()
    assert found.tolist() == [[3.0] * 3] * 5
    assert not machine.foreign
    assert not machine.errors


HAZARDS = {
    "the copy of logits does not wait for the head": (
        CudaStageDevice, "fetch", "self._copies.wait_event(after)", "pass",
    ),
    "logits are copied on the stage's own stream": (
        CudaStageDevice, "fetch", "with torch.cuda.stream(self._copies):", "if True:",
    ),
    "the event of the copy is recorded on another stream": (
        CudaStageDevice, "fetch", "event.record(self._copies)", "event.record(after.place[0])",
    ),
    "logits being copied are given back to the allocator": (
        Publisher, "_do", "ran = device.wait(launched.last)",
        "launched.logits = None; ran = device.wait(launched.last)",
    ),
    "pages are not locked": (
        CudaStageDevice, "lock_pages", "memory.nbytes, 0)", "1, 0)",
    ),
    "the entry is committed before the copy has ended": (
        Publisher, "_do", "device.wait(copied)", "pass",
    ),
    "an iteration is reported before the device has run it": (
        Publisher, "_do", "device.wait(launched.last)", "0",
    ),
    "the mark after an iteration comes before the head": (
        SampledStage, "run",
        "launched.output = ", "early = self._device.mark(); launched.output = ",
        "launched.last = self._device.mark()", "launched.last = early",
    ),
    "the graph's output is sent while the next replay overwrites it": (
        SampledStage, "_send", "return self._links.wait_sent", "return lambda: None",
    ),
    "hidden states are given back before they are read": (
        SampledStage, "_receive",
        "        self._links.release(inputs.iteration)\n", "",
        "for key, tensor in tensors.items():",
        "self._links.release(inputs.iteration)\n        for key, tensor in tensors.items():",
    ),
    "a set is written before the device has copied from it": (
        Copied, "wait_free", "if self._read[buffer_set] is not None:", "if False:",
    ),
    "the mark of a set comes before its copies": (
        Copied, "place",
        "batch = source.packed", "early = self._device.mark(); batch = source.packed",
        "self._read[inputs.buffer_set] = self._device.mark()",
        "self._read[inputs.buffer_set] = early",
    ),
    "a set is written before the device has copied late tokens from it": (
        Copied, "take", "self._read[inputs.buffer_set] = self._device.mark()", "pass",
    ),
    "late tokens stay on the host": (
        Copied, "take", '.copy_(source, non_blocking=True)', "",
    ),
    "who waits for a set is GPU 0's thread": (
        Copied, "wait_free", "self._device.use()", "pass",
    ),
    "what builders copy is page-locked, and written again": (
        InputBuffers, "__init__",
        "self.lengths = own(torch.int32, requests)",
        "self.lengths = Buffer(torch.zeros(requests, dtype=torch.int32, pin_memory=pinned))",
    ),
    "a batch is not padded": (
        Copied, "_padded", "_pad_requests(source, count, requests, used)", "pass",
    ),
    "new blocks of a request are left out": (
        Copied, "begin", "if ids is not None:", "if False:",
    ),
    "a call runs beside prepared iterations": (
        DoubleBuffer, "call", "self.drain()\n", "pass\n",
    ),
    "a call runs before the device is done": (
        LoadedStage, "call", "self.running.drain()", "pass",
    ),
    "hidden states are sent before they are computed": (
        CudaIpcSending, "transmit", "device.copies.wait_event(after)", "pass",
    ),
    "hidden states are sent into memory that the receiver still reads": (
        CudaIpcSending, "transmit", "device.copies.wait_event(self._freed[buffer])", "pass",
    ),
    "a piece is given back before it is copied": (
        Receiver, "_put_together",
        "    if k:\n            self._transport.release(header.frame)", "    if k:",
        "for place, tensor in", "self._transport.release(header.frame)\n        for place, tensor in",
    ),
    "hidden states are used before they have come": (
        CudaIpcReceiving, "tensors",
        "self._device.now().wait_event(self._filled[header.frame % self._endpoint.depth])",
        "pass",
    ),
    "hidden states being sent are given back to the allocator": (
        CudaDevice, "copy", "tensor.record_stream(self.copies)", "pass",
    ),
    "the sender's copies do not hold up what overwrites their source": (
        CudaIpcSending, "order_after_copies",
        "self._device.now().wait_stream(self._device.copies)", "pass",
    ),
    "staging is reused by the next iteration": (
        Tables, "__init__", "torch.int32, 2)", "torch.int32, 1)",
    ),
    "tokens drawn on the device are told before they have come": (
        Publisher, "_do", "launched.output.get_output()", "launched.output.model_runner_output",
    ),
    "tokens drawn on the device are read by who launches": (
        SomeDrawnHere, "_drawn", "positions).unsqueeze(1)", "positions).unsqueeze(1).cpu().to(logits.device)",
    ),
    "which rows are drawn is copied with a wait": (
        LastRows, "_logits", "torch_utils.async_tensor_h2d(rows, device=hidden.device)",
        "torch.from_numpy(rows).to(hidden.device)",
    ),
    "samplers get the graph's output instead of a copy": (
        Model, "compute_logits",
        "return hidden @ self.head",
        """kept = self.__dict__.setdefault("kept", self.head.new_empty(ROWS, VOCAB))
    return kept[: len(hidden)].copy_(hidden @ self.head)""",
    ),
    "the publisher's thread is GPU 0's": (
        DeviceThread, "_run", "self._device.use()", "pass",
    ),
}  # fmt: skip


SHARED_HAZARDS = {
    "other stages get the graph's output instead of a copy": (
        LastRows, "_logits", "hidden.is_cpu and ", "",
    ),
    "final hidden states are multiplied before they have come": (
        CudaIpcReceiving, "tensors", "self._device.now()",
        """(self._device.copies if __import__("threading").current_thread().name == "SiPipeProjection"
        else self._device.now())""",
    ),
    "the copy of a part does not wait for the product": (
        ProjectionThread, "_do", "device.fetch(logits, target, last)", "device.fetch(logits, target, first)",
    ),
    "a part is published before its copy has ended": (
        ProjectionThread, "_do", "device.wait(copied)", "pass",
    ),
    "a part being copied is given back to the allocator": (
        ProjectionThread, "_do", "ran = device.wait(last)", "del logits; ran = device.wait(last)",
    ),
    "a part is multiplied in the stage's own stream": (
        CudaStageDevice, "use", "torch.cuda.set_stream(self._own)", "pass",
    ),
}  # fmt: skip
"""Faults where the output projection is shared out."""
PLANTED = [(name, plant, plants is SHARED_HAZARDS) for plants in (HAZARDS, SHARED_HAZARDS)
           for name, plant in plants.items()]  # fmt: skip


@pytest.mark.ci
@pytest.mark.parametrize(
    ("plant", "shared"),
    [(plant, shared) for _, plant, shared in PLANTED],
    ids=[name.replace(" ", "-") for name, *_ in PLANTED],
)
def test_a_planted_hazard_is_found(monkeypatch, plant, shared):
    found = (run(monkeypatch, seed, plant=plant, shared=shared) for seed in TRIES)
    wrong = next(filter(None, found), None)
    assert wrong, "no schedule has found it"

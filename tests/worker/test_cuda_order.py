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

from tests.ipc.link import nixl_stand_in  # noqa: E402
from tests.ipc.link.conftest import free_port  # noqa: E402
from tests.ipc.link.wire import Wire  # noqa: E402

from sipipe.ipc.link import nixl_agent, zeromq  # noqa: E402
from sipipe.ipc.link.cuda_device import CudaDevice  # noqa: E402
from sipipe.ipc.link.cuda_ipc import CudaIpcReceiving, CudaIpcSending  # noqa: E402
from sipipe.ipc.link.endpoint import open_receiver, open_sender  # noqa: E402
from sipipe.ipc.link.host_copies import Arrivals, Departures, _Pages  # noqa: E402
from sipipe.ipc.link.receiver import Receiver  # noqa: E402
from sipipe.ipc.link.sender import Sender  # noqa: E402
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
TRIES = (129, *range(60))
"""Schedules of which one shows a planted hazard; most are shown by the first few, one by few."""


def run(monkeypatch, seed, iterations=12, plant=None, shared=False, kind="cuda_ipc"):
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
            kind=kind,
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


BY_HOST = "shm", "zeromq"


@pytest.mark.parametrize("kind", BY_HOST)
@pytest.mark.parametrize(
    "seed", [*range(QUICK), *(pytest.param(i, marks=pytest.mark.slow) for i in range(QUICK, SEEDS))]
)
def test_so_it_is_with_links_by_host_memory(monkeypatch, seed, kind):
    assert not run(monkeypatch, seed, kind=kind)


@pytest.mark.parametrize("kind", [*BY_HOST, "nixl"])
@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("tokens", [2, 9], ids=["whole", "pieces"])
def test_links_by_host_memory_wait_for_no_later_work(monkeypatch, seed, kind, tokens):
    assert not wrong_while_stages_stand_still(monkeypatch, seed, kind, tokens)


def wrong_while_stages_stand_still(monkeypatch, seed, kind, tokens):
    """What is wrong with one microbatch, which a stage sends before its next iteration and the other
    takes amid its last one: their own streams stand still, but for what somebody waits for."""
    machine = install(monkeypatch, seed)
    monkeypatch.setattr(zeromq, "Connection", Wire)
    monkeypatch.setattr(Wire, "ends", Wire.ends.copy())
    machine.stepped = machine.calm = False
    for stream in machine.own:
        stream.pace = (0,)
    monkeypatch.setattr(machine, "choose_pace", lambda: None)
    monkeypatch.setattr(nixl_agent, "_load", lambda: nixl_stand_in.LIBRARY)
    link = LinkEndpoint(
        kind=kind,
        buffer_tokens=2,
        device="cuda",
        address="127.0.0.1",
        port=0 if kind == "shm" else 1,
        data_port=free_port() if kind == "nixl" else 0,
        stall_timeout=60,
    )
    ends = [None, None]
    if kind == "shm":
        ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ran, wrong = [], []

    def launch(stage):
        for _ in range(50):
            machine.launch(lambda: ran.append(stage), stage)

    with Factories():
        machine.device = 1
        receiver = open_receiver(link, ends[1])
        launch(1)  # the iteration before, which is running
        machine.device = 0
        sender = open_sender(link, ends[0])
        hidden = torch.arange(3.0 * tokens, device="cuda:0").view(tokens, 3)
        sender.send(0, tokens, {"hidden_states": hidden})
        sender.wait_sent()
        hidden.zero_()  # a graph's next replay
        launch(0)
        machine.device = 1
        arrived = receiver.take(0, tokens)["hidden_states"]
        receiver.release(0)
        sender.flush()
        if ran:
            wrong.append(f"hidden states waited for kernels of stages {ran}")
        wrong += [f"who launches waited for {what}" for what in machine.waits]
        if arrived.cpu().ravel().tolist() != [*range(3 * tokens)]:
            wrong.append("other hidden states came")
        if set(ran) != {1}:
            wrong.append("what uses them is not behind the iteration before")
        sender.close()
        receiver.close()
    wrong += [*machine.foreign, *machine.strangers, *machine.errors]
    if machine.locked:
        wrong.append("pages were unmapped before they were unlocked")
    return wrong


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
        Publisher, "_wait", "ended = device.wait(",
        "launched.logits = None; ended = device.wait(",
    ),
    "pages are not locked": (
        CudaStageDevice, "lock_pages", "memory.nbytes, 0)", "1, 0)",
    ),
    "the entry is committed before the copy has ended": (
        Publisher, "_wait", "launched.last if copied is None else copied", "launched.last",
    ),
    "an iteration is reported before the device has run it": (
        Publisher, "_wait", "device.wait(launched.last if copied is None else copied)", "0",
    ),
    "the mark after an iteration comes before the head": (
        SampledStage, "run",
        "launched.output = self._draws", "early = self._device.mark(); launched.output = self._draws",
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
        "self.lengths = zeros(torch.int32, requests)",
        "self.lengths = Buffer(torch.zeros(requests, dtype=torch.int32, pin_memory=pinned))",
    ),
    "a batch is not padded": (
        Copied, "_padded", "_pad_requests(source, inputs.num_reqs, requests, used)", "pass",
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
        "    if k:\n            self._give_back(header.frame)", "    if k:",
        "for place, tensor in", "self._give_back(header.frame)\n        for place, tensor in",
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
        Publisher, "_send_report", "launched.output.get_output()",
        "launched.output.model_runner_output",
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
        ProjectionThread, "_do", "device.wait(copied)", "device.wait(last)",
    ),
    "a part being copied is given back to the allocator": (
        ProjectionThread, "_do", "ran = device.wait(", "del logits; ran = device.wait(",
    ),
    "a part is multiplied in the stage's own stream": (
        CudaStageDevice, "use", "torch.cuda.set_stream(self._stream)", "pass",
    ),
}  # fmt: skip
"""Faults where the output projection is shared out."""
PLANTED = [(name, plant, plants is SHARED_HAZARDS) for plants in (HAZARDS, SHARED_HAZARDS)
           for name, plant in plants.items()]  # fmt: skip

BY_HOST_HAZARDS = {
    "hidden states leave before they are computed": (
        Departures, "fetch", "self._copies.wait_event(after)", "pass",
    ),
    "hidden states leave by the stage's own stream": (
        Departures, "fetch", "with torch.cuda.stream(self._copies):", "if True:",
    ),
    "a header leaves before its frame": (
        Departures, "fetch", "copied.synchronize()", "pass",
    ),
    "pages of links are not locked": (
        _Pages, "lock", "address, len(self), 0", "address, 1, 0",
    ),
    "the graph's output is sent, not a clone": (
        Sender, "send", "[part.clone() for part in parts]", "list(parts)",
    ),
    "who launches waits until hidden states have left": (
        Sender, "wait_sent", "self._check()", "self.flush(timeout)",
    ),
    "clones are given back before they are copied": (
        Departures, "fetch", "copied.synchronize()", "parts.clear(); copied.synchronize()",
    ),
    "hidden states come by the stage's own stream": (
        Arrivals, "copy", "with torch.cuda.stream(self._copies):", "if True:",
    ),
    "they are used before they have come": (
        Arrivals, "join", "stream.wait_stream(self._copies)", "pass",
    ),
    "their memory is reused while the stage reads it": (
        Arrivals, "join", "tensor.record_stream(stream)", "pass",
    ),
    "a buffer goes back before it has been read": (
        Arrivals, "_give_back", "copied.synchronize()", "pass",
    ),
    "who gives buffers back is GPU 0's thread": (
        Arrivals, "_give_back", "torch.cuda.set_device(self._device)", "pass",
    ),
    "a piece's buffer goes back before it has been read": (
        Receiver, "_put_together", "self._give_back(header.frame)",
        "self._release_frame(header.frame)",
    ),
}  # fmt: skip
"""Faults of links by host memory."""


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


@pytest.mark.ci
@pytest.mark.parametrize("kind", BY_HOST)
@pytest.mark.parametrize(
    "plant",
    BY_HOST_HAZARDS.values(),
    ids=[name.replace(" ", "-") for name in BY_HOST_HAZARDS],
)
def test_a_hazard_planted_in_a_link_by_host_memory_is_found(monkeypatch, plant, kind):
    def wrong(seed):
        if run(monkeypatch, seed, plant=plant, kind=kind):
            return True
        with monkeypatch.context() as patched:
            plant_hazard(patched, *plant)
            return wrong_while_stages_stand_still(patched, seed, kind, 9)

    assert any(map(wrong, TRIES)), "no schedule has found it"

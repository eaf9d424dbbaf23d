"""Links of GPUs, tried on the emulated device: between good GPUs, and stand-ins that refuse, corrupt, hang.

The engine's part and both stages' are real; the engine's calls go to stages in threads of this process.
"""

from __future__ import annotations

import ctypes
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from tests.ipc.link.wire import Wire
from tests.worker.emulated_cuda import Event, Stream
from tests.worker.emulated_tensors import Driver, Factories, FactoriesThread, install, pointed

from sipipe.config import SiPipeConfig
from sipipe.engine import link_opener
from sipipe.engine.link_opener import LinkOpener
from sipipe.errors import UnsupportedError
from sipipe.ipc.link import trial, zeromq
from sipipe.ipc.link.cuda_device import gpu_name
from sipipe.ipc.link.cuda_ipc import CudaIpcReceiving
from sipipe.ipc.link.schema import TOKENS, TensorSchema, TensorSpec
from sipipe.messages.link import LinkEndpoint, LinkTrial, transports
from sipipe.messages.stage_place import StagePlace
from sipipe.messages.start_records import StageDescription
from sipipe.tools import link_trials
from sipipe.worker.links import LinkEnds, Links

HAND_OVER = 60  # seconds; a bug in the test itself
TOKENS_OF_A_BUFFER = 6
SCHEMA = TensorSchema(
    (
        TensorSpec("hidden_states", "bfloat16", (TOKENS, 10)),
        TensorSpec("residual", "float32", (TOKENS, 10)),
    )
)
SEEDS = range(8)


class Pipeline:
    """As many stages as the machine has GPUs, each with its ends of links; in place of ``Calls``."""

    def __init__(self, machine, kinds):
        self.machine = machine
        self.lost = []
        self.stages = len(machine.own)
        self.places = [
            StagePlace(stage=stage, stages=self.stages, tp_rank=0, tp_size=1)
            for stage in range(self.stages)
        ]
        sockets = [[] for _ in self.places]
        for sender in range(self.stages - 1):
            for _ in range(kinds):
                ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                sockets[sender].append(((sender, sender + 1), ours))
                sockets[sender + 1].append(((sender, sender + 1), theirs))
        self.ends = [
            LinkEnds(place, pairs, self.lost.append)
            for place, pairs in zip(self.places, sockets, strict=True)
        ]

    def ask(self, request, _seconds):
        def try_out(rank):
            self.machine.device = rank
            return self.ends[rank].try_out(request.trials, request.hung)

        with ThreadPoolExecutor(self.stages) as pool:
            return list(pool.map(try_out, range(self.stages)))

    def open(self, transport="auto"):
        """What the engine does at its start; returns the transports."""
        setup = SimpleNamespace(stages=self.stages, ranks=1, slots=3)
        setup.link_tokens = TOKENS_OF_A_BUFFER
        setup.config = SiPipeConfig(transport=transport, stall_timeout=HAND_OVER)
        described = [
            StageDescription(takes=SCHEMA.encode(), gpu=gpu_name(stage))
            for stage in range(self.stages)
        ]
        return [link.kind for link in LinkOpener(setup, self, {}, described).join_stages()]

    def carry(self):
        """Hidden states of some iterations cross every link as they should."""
        links = []
        for place, ends in zip(self.places, self.ends, strict=True):
            self.machine.device = place.rank
            links.append(Links.of(place, ends))
        for iteration, tokens in enumerate([3, 9, 1, 6, 2]):  # 9 in pieces
            for sender in range(self.stages - 1):
                sent = torch.arange(10.0 * tokens).view(tokens, 10) + iteration
                self.machine.device = sender
                hidden = {
                    "hidden_states": sent.bfloat16().to(f"cuda:{sender}"),
                    "residual": sent.to(f"cuda:{sender}"),
                }
                links[sender].send(iteration, tokens, hidden)
                self.machine.device = sender + 1
                came = links[sender + 1].take(iteration, tokens)
                assert came["residual"].cpu().tolist() == sent.tolist()
                links[sender + 1].release(iteration)
        assert self.lost == []
        for each in links:
            each.close()

    def close(self):
        for ends in self.ends:
            ends.close()


@pytest.fixture
def pipeline(monkeypatch):
    """Makes a pipeline of so many emulated GPUs; what it has is closed in the end."""
    made = []
    threads = SimpleNamespace(**vars(threading) | {"Thread": FactoriesThread})
    monkeypatch.setattr(trial, "threading", threads)
    monkeypatch.setattr(link_opener, "current_platform", SimpleNamespace(is_cpu=lambda: False))
    monkeypatch.setattr(link_opener, "logger", SimpleNamespace(warning=say, info=lambda *_: None))
    lines.clear()

    def make(seed=0, gpus=2, transport="auto"):
        machine = install(monkeypatch, seed, gpus)
        machine.stepped = machine.calm = False
        made.append(Pipeline(machine, len(transports(transport, "cuda"))))
        return made[-1]

    with Factories():
        yield make
        for each in made:
            each.close()


@pytest.fixture
def hung(monkeypatch):
    """Ends that are left as they are."""
    ends = []
    leave = trial.TriedEnd.leave

    def note(end):
        ends.append(end)
        leave(end)

    monkeypatch.setattr(trial.TriedEnd, "leave", note)
    return ends


lines = []


def say(text, *args):
    lines.append(text % args)


def is_clean(machine):
    assert not machine.errors
    assert not machine.foreign, "a context on a GPU that is not the stage's"
    assert not machine.strangers, "work in a stage's own stream"


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("transport", ["auto", "shm"])
def test_between_good_gpus_every_link_passes(pipeline, seed, transport):
    made = pipeline(seed, gpus=3, transport=transport)
    kind = "cuda_ipc" if transport == "auto" else "shm"
    assert made.open(transport) == [kind] * 2
    assert not lines
    is_clean(made.machine)
    made.carry()


@pytest.mark.parametrize("seed", SEEDS)
def test_a_link_between_hosts_is_tried_from_gpu_to_gpu(pipeline, monkeypatch, seed):
    monkeypatch.setattr(zeromq, "Connection", Wire)
    monkeypatch.setattr(Wire, "ends", Wire.ends.copy())
    made = pipeline(seed)
    link = LinkEndpoint(
        kind="zeromq", buffer_tokens=6, device="cuda", port=1, stall_timeout=HAND_OVER
    )
    order = LinkTrial(pair=(0, 1), endpoint=link, tensors=SCHEMA.encode(), seconds=HAND_OVER)
    reports = made.ask(SimpleNamespace(trials=[order], hung=()), None)
    assert not any(report.failure for ends in reports for report in ends), reports
    is_clean(made.machine)
    made.carry()


@pytest.mark.parametrize("kind", ["cuda_ipc", "shm"])
def test_gpu_check_tries_a_pair_of_gpus(pipeline, kind):
    machine = pipeline().machine
    link = LinkEndpoint(kind=kind, buffer_tokens=6, device="cuda", stall_timeout=HAND_OVER)
    order = LinkTrial(pair=(0, 1), endpoint=link, tensors=SCHEMA.encode(), seconds=HAND_OVER)
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def try_end(rank):
        machine.device = rank
        return link_trials.try_end(order, rank, ends[rank])

    with ThreadPoolExecutor(2) as pool:
        sent, came = pool.map(try_end, range(2))
    assert sent["passed"], sent
    assert came["passed"], came
    is_clean(machine)


def test_a_stage_may_not_see_the_next_ones_gpu(pipeline, monkeypatch):
    """Each has a CUDA_VISIBLE_DEVICES of its own: the trial says whether CUDA joins them."""
    monkeypatch.setattr(trial.torch.cuda, "device_count", lambda: 1)
    made = pipeline()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert made.open() == ["cuda_ipc"]
    made.carry()


@pytest.mark.parametrize("seed", SEEDS)
def test_two_islands_are_joined_by_host_memory(pipeline, monkeypatch, seed):
    made = pipeline(seed, gpus=4)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: a // 2 == b // 2)
    assert made.open() == ["cuda_ipc", "shm", "cuda_ipc"]
    (line,) = lines
    assert "link stage1-2.r0 from GPU gpu-1 to GPU gpu-2: shm" in line
    assert "cannot reach the memory of cuda:2" in line
    made.carry()
    is_clean(made.machine)


def refuse(monkeypatch, function, error, reason):
    """Have a function of the driver fail."""

    def error_string(_, __, text):
        pointed(text).value = reason

    monkeypatch.setattr(Driver, function, lambda *_: error)
    monkeypatch.setattr(Driver, "cuGetErrorString", error_string, raising=False)


def refuse_to_map(monkeypatch):
    refuse(monkeypatch, "cuIpcOpenMemHandle_v2", 801, b"operation not supported")
    return "CUDA: cuIpcOpenMemHandle_v2 on cuda:0 failed: operation not supported (801)"


def refuse_memory(monkeypatch):
    refuse(monkeypatch, "cuMemAlloc_v2", 2, b"out of memory")
    return "CUDA: cuMemAlloc_v2 on cuda:1 failed: out of memory (2)"


def refuse_events(monkeypatch):
    def refuse(device, handle):
        raise RuntimeError("CUDA error: invalid device ordinal\nCompile with TORCH_USE_CUDA_DSA")

    monkeypatch.setattr(Event, "from_ipc_handle", staticmethod(refuse))
    return "RuntimeError: CUDA error: invalid device ordinal"


def lose_bytes(monkeypatch):
    """Peer copies that arrive as zeros."""

    def copy(self, to, source, nbytes, stream):
        machine = install.__globals__["Machine"].current
        machine.put(
            machine.streams[stream.value - 1], lambda: ctypes.memset(to.value, 0, nbytes.value)
        )
        return 0

    monkeypatch.setattr(Driver, "cuMemcpyAsync", copy)
    return "bytes in buffer 0 were not those that were sent"


def forget_events(monkeypatch):
    """Events of another GPU that nobody waits for."""
    wait_event = Stream.wait_event

    def wait(self, event):
        if event in self.machine.shared and event.place and event.place[0].index != self.index:
            return
        wait_event(self, event)

    monkeypatch.setattr(Stream, "wait_event", wait)
    return "bytes in buffer"


REFUSALS = [refuse_to_map, refuse_memory, refuse_events, lose_bytes]


@pytest.mark.parametrize("plant", REFUSALS)
@pytest.mark.parametrize("seed", SEEDS)
def test_what_refuses_or_corrupts_is_replaced_by_host_memory(
    pipeline, hung, monkeypatch, plant, seed
):
    made = pipeline(seed)
    reason = plant(monkeypatch)
    assert made.open() == ["shm"]
    (line,) = lines
    assert line.startswith("link stage0-1.r0 from GPU gpu-0 to GPU gpu-1: shm")
    assert reason in line
    assert not hung, "what has ended is closed, and its memory freed"
    is_clean(made.machine)
    made.carry()


@pytest.mark.parametrize("plant", REFUSALS)
def test_a_user_who_wants_it_so_is_told_which_pair_cannot(pipeline, monkeypatch, plant):
    made = pipeline(transport="cuda_ipc")
    reason = plant(monkeypatch)
    with pytest.raises(UnsupportedError, match=r"cannot cross link stage0-1\.r0 from GPU") as error:
        made.open("cuda_ipc")
    assert reason in str(error.value)
    assert made.lost == []


def test_events_of_another_gpu_that_do_not_order_are_found(pipeline, monkeypatch):
    """In some schedule the copy is late, and the later stage reads what was there before."""
    forget_events(monkeypatch)
    assert any(pipeline(seed).open() == ["shm"] for seed in SEEDS)


class Hanging:
    """Something of CUDA's that never comes back, until the test has ended."""

    def __init__(self, monkeypatch, machine):
        self.monkeypatch, self.machine = monkeypatch, machine
        self.forever = threading.Event()

    def block(self, *_):
        self.forever.wait(HAND_OVER)
        raise RuntimeError("the test has ended")

    def the_map(self):
        self.monkeypatch.setattr(Driver, "cuIpcOpenMemHandle_v2", self.block)

    def the_copy(self):
        """Asking for it returns at once; it never ends, nor does what waits for it."""
        machine = self.machine
        never = Stream(0)
        wait = machine.wait

        def copy(driver, to, source, nbytes, stream):
            machine.put(machine.streams[stream.value - 1], (never, 1))
            return 0

        def behind(stream, place):
            return any(
                operation == (never, 1) or behind(*operation)
                for operation in stream.operations[stream.done : place]
                if isinstance(operation, tuple)
            )

        def waits(what, place):
            if behind(*place):
                self.block()
            wait(what, place)

        self.monkeypatch.setattr(Driver, "cuMemcpyAsync", copy)
        self.monkeypatch.setattr(machine, "wait", waits)


@pytest.mark.parametrize("what", ["the_map", "the_copy"])
@pytest.mark.parametrize("seed", SEEDS)
def test_what_hangs_is_left_and_host_memory_takes_its_place(
    pipeline, hung, monkeypatch, what, seed
):
    made = pipeline(seed)
    hanging = Hanging(monkeypatch, made.machine)
    getattr(hanging, what)()
    closed = []
    monkeypatch.setattr(Driver, "cuIpcCloseMemHandle", lambda *_: closed.append("mapping") or 0)
    close = CudaIpcReceiving.close

    def note(transport):
        closed.append("memory")
        close(transport)

    monkeypatch.setattr(CudaIpcReceiving, "close", note)
    monkeypatch.setattr(link_opener, "TRIAL_SECONDS", 0.5)
    try:
        assert made.open() == ["shm"]
        (line,) = lines
        assert "had not finished after 0.5 s" in line
        made.carry()
        assert {type(end) for end in hung} == {trial.TriedSender, trial.TriedReceiver}
        assert not closed, "unmapping and freeing would wait"
    finally:
        hanging.forever.set()
        for thread in threading.enumerate():
            if thread.name.startswith("sipipe-trial-"):
                thread.join(HAND_OVER)
        for end in hung:
            end.close()
    assert "memory" in closed, "now it is freed"

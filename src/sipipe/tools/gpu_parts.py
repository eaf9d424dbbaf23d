"""Parts that ``sipipe gpu-check`` tries before any engine: ``python -m sipipe.tools.gpu_parts FD``."""

import mmap
import multiprocessing
import socket
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from typing import Any

import torch

from sipipe.errors import SiPipeError
from sipipe.ipc.link.endpoint import open_receiver, open_sender
from sipipe.messages.link import LinkEndpoint
from sipipe.tools.child import answer

TOKENS, WIDTH, TIMES, FEW = 256, 4096, 100, 8
"""Of a hand-over of hidden states, and how many there are; as often a few copies of logits, so few
that none waits for room in the device's queue."""


def draws(rows: int, vocabulary: int) -> dict[str, float]:
    """Microseconds a row of one sampler, by mix of parameters."""
    from sipipe.sampler.warmup import measure  # Numba

    took = measure(rows, vocabulary, "bfloat16")
    return {mix: seconds / rows * 1e6 for mix, seconds in took.items()}


def copies() -> dict[str, float]:
    """Logits to page-locked host memory, whole and a rank's columns: GB/s, and microseconds that
    held up who launched them; and how late a thread wakes up that waits for an event."""
    from sipipe.worker.device import CudaStageDevice

    device, memory = CudaStageDevice(torch.device("cuda:0")), memoryview(mmap.mmap(-1, 1 << 26))
    device.use()
    device.lock_pages(memory)
    host = torch.frombuffer(memory, dtype=torch.bfloat16).view(TOKENS, -1)
    logits, found = torch.randn(host.shape, device="cuda:0").bfloat16(), dict[str, float]()
    for name, last in (("whole", host.shape[1]), ("columns", host.shape[1] // 2)):
        target, source = host[:, :last], logits[:, :last]
        device.wait(device.fetch(source, target, device.mark()))
        _must_equal(name, target, source.cpu())
        held_up = took = 0.0
        for _ in range(TIMES):
            began = time.perf_counter()
            marks = [device.fetch(source, target, device.mark()) for _ in range(FEW)]
            held_up += time.perf_counter() - began
            device.wait(marks[-1])
            took += time.perf_counter() - began
        found[f"{name} GB/s"] = FEW * TIMES * source.nbytes / took / 1e9
        found[f"{name} us to launch"] = held_up / (FEW * TIMES) * 1e6
    late = []
    for _ in range(TIMES):
        began, first = time.perf_counter(), device.mark()
        device.occupy(1e-3)
        device.wait(end := device.mark())
        late.append(time.perf_counter() - began - device.nanoseconds(first, end) / 1e9)
    return found | {"us to wake up": statistics.median(late) * 1e6}


def links() -> dict[str, float]:
    """Microseconds of a hand-over between two processes, by pairs of GPUs; none: in host memory."""
    found, gpus = dict[str, float](), torch.cuda.device_count()
    on: Any = "cuda" if gpus else "cpu"
    kind: Any = "cuda_ipc" if gpus else "shm"
    for first in range(gpus or 1):
        second = (first + 1) % max(1, gpus)
        link = LinkEndpoint(kind=kind, buffer_tokens=TOKENS, device=on, stall_timeout=60)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if gpus:
            torch.cuda.set_device(first)
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, context) as later, closing(open_sender(link, ours)) as sender:
            received = later.submit(_receive, link, theirs, second)
            for number in range(1 + TIMES):
                hidden = torch.full((TOKENS, WIDTH), number, dtype=torch.int16, device=on)
                # wait: 60 s; the other process, or its end
                sender.send(number, TOKENS, {"hidden_states": hidden})
            # wait: 60 s; the other process, or its end
            found[f"{first}-{second}"] = received.result(60) / TIMES * 1e6
    return found


def _receive(link: LinkEndpoint, sock: socket.socket, gpu: int) -> float:
    """Seconds from the first that has come to the last."""
    if link.device == "cuda":
        torch.cuda.set_device(gpu)
    began = 0.0
    with closing(open_receiver(link, sock)) as receiver:
        for number in range(1 + TIMES):
            hidden = receiver.take(number, TOKENS)["hidden_states"]
            _must_equal("hidden states", hidden, torch.full_like(hidden, number))
            receiver.release(number)
            began = began or time.perf_counter()
    return time.perf_counter() - began


def _must_equal(what: str, found: torch.Tensor, sent: torch.Tensor) -> None:
    if not torch.equal(found, sent):
        raise SiPipeError(f"{what}: what arrived is not what was sent")


PARTS: dict[str, Callable[..., Any]] = {"draws": draws, "copies": copies, "links": links}

if __name__ == "__main__":
    answer(lambda job: PARTS[job.pop("part")](**job))

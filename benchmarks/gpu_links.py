"""Links between each two GPUs: ``python -m benchmarks.gpu_links``. Without one, in host memory."""

import multiprocessing
import socket
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from typing import Any

import torch

from benchmarks.harness import report
from sipipe.errors import SiPipeError
from sipipe.ipc.link.endpoint import open_receiver, open_sender
from sipipe.messages.link import LinkEndpoint

TOKENS, WIDTH, TIMES = 256, 4096, 100


def links() -> dict[str, float]:
    """Microseconds of a hand-over between two processes, by pairs of GPUs; none: in host memory."""
    found, gpus = dict[str, float](), torch.cuda.device_count()
    on, kind = ("cuda", "cuda_ipc") if gpus else ("cpu", "shm")
    for first in range(gpus or 1):
        second = (first + 1) % max(1, gpus)
        told: Any = {"kind": kind, "device": on}
        link = LinkEndpoint(buffer_tokens=TOKENS, stall_timeout=60, **told)
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
            if not torch.equal(hidden, torch.full_like(hidden, number)):
                raise SiPipeError("hidden states: what arrived is not what was sent")
            receiver.release(number)
            began = began or time.perf_counter()
    return time.perf_counter() - began


if __name__ == "__main__":
    rows = [{"what": f"link {pair}, us", "found": round(us)} for pair, us in links().items()]
    report("one-gpu-parts", f"A hand-over of {2 * TOKENS * WIDTH >> 20} MiB, check included", rows)

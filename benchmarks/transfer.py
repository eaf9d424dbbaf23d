"""Hidden states from one stage to the next: ours beside vLLM's isend/irecv_tensor_dict.

Two processes, each on a core of its own; the earlier one makes fresh hidden states as a forward
pass would, notes the time, sends, notes the time again ("blocked"); the later one, which waits for
them, notes when it holds usable tensors. The clocks are one clock. "copy" is one ``memcpy`` of as
many bytes, made by the same operations just before (so as far in the caches), into one of three
mapped buffers in turn, measured in the sender in the same loop; "beyond copy" is the median of
usable minus copy. "Next stage late": the later stage is still busy with an earlier iteration when
the earlier one sends, as it is in a full pipeline.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import multiprocessing
import os
import socket
import time
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from benchmarks.harness import report

HIDDEN = 4096
_COPIES = 3  # places the reference copy goes to in turn, as a link's three buffers
_LATE = 0.02  # seconds that the later stage lags where it is late: one and a half iterations
PATHS = {
    "sipipe shm": "shm",
    "vLLM, CPU shared memory": "vllm_shm",
    "vLLM, gloo": "vllm_gloo",
}


class _Ours:
    """A SiPipe link behind the calls that the loops below make."""

    def __init__(self, endpoint: Any, sock: socket.socket, *, sends: bool) -> None:
        from sipipe.ipc.link.endpoint import open_receiver, open_sender

        if sends:
            self._end: Any = open_sender(endpoint, sock)
            self.send = self._end.send
        else:
            self._end = open_receiver(endpoint, sock)

    def receive(self, iteration: int, num_tokens: int) -> dict[str, Any]:
        tensors: dict[str, Any] = self._end.take(iteration, num_tokens, 60.0)
        return tensors

    def done(self, iteration: int) -> None:
        self._end.release(iteration)

    def close(self) -> None:
        self._end.close()


class _Stock:
    """vLLM's own pipeline group of two processes."""

    def __init__(self, port: int, *, rank: int, shared_memory: bool) -> None:
        from vllm.config import VllmConfig, set_current_vllm_config
        from vllm.distributed import parallel_state
        from vllm.platforms import current_platform

        os.environ["VLLM_DIST_IDENT"] = f"sipipe-bench-{port}"
        current_platform.import_kernels()
        with set_current_vllm_config(VllmConfig()):
            parallel_state.init_distributed_environment(
                2, rank, f"tcp://127.0.0.1:{port}", rank, backend="gloo"
            )
            parallel_state.initialize_model_parallel(1, 2)
        self._state = parallel_state
        self._group = parallel_state.get_pp_group()
        if shared_memory and not self._group.use_cpu_custom_send_recv:
            raise RuntimeError("vLLM does not take its CPU shared-memory path on this machine")
        self._group.use_cpu_custom_send_recv = shared_memory

    def send(self, iteration: int, num_tokens: int, tensors: dict[str, Any]) -> None:
        self._group.isend_tensor_dict(tensors)

    def receive(self, iteration: int, num_tokens: int) -> dict[str, Any]:
        tensors, handles, postprocess = self._group.irecv_tensor_dict()
        for handle in handles:
            handle.wait()
        for call in postprocess:
            call()
        return tensors

    def done(self, iteration: int) -> None:
        pass

    def close(self) -> None:
        self._state.destroy_model_parallel()
        self._state.destroy_distributed_environment()


def _open(path: str, place: Any, rank: int) -> _Ours | _Stock:
    if path.startswith("vllm"):
        return _Stock(place, rank=rank, shared_memory=path == "vllm_shm")
    endpoint, sockets = place
    return _Ours(endpoint, sockets[rank], sends=rank == 0)


def _stage(rank: int, path: str, place: Any, plan: list[tuple[int, int]], pipe: Connection) -> None:
    import torch

    torch.set_num_threads(1)
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) > 1:  # as vLLM binds its workers: a core for each stage
        os.sched_setaffinity(0, {cores[rank]})
    end = _open(path, place, rank)
    results = []
    start = 0
    for num_tokens, count in plan:
        for late in (False, True):
            run = _sends if rank == 0 else _receives
            results.append(run(end, start, num_tokens, count // 4 if late else count, late))
            start += count
    pipe.send(results)
    pipe.recv()  # both are done: nobody leaves a collective early
    end.close()


def _sends(end: Any, start: int, num_tokens: int, count: int, late: bool) -> list[Any]:
    import torch

    base = torch.randn(num_tokens, HIDDEN).to(torch.bfloat16)
    copies = mmap.mmap(-1, _COPIES * 2 * base.nbytes)
    target = torch.frombuffer(copies, dtype=torch.uint8)
    target.zero_()
    times = []
    for iteration in range(start, start + count):
        time.sleep(_LATE / 2 if late else 0.004)  # a forward pass
        # The copy and the hand-over each get hidden states made by the same operations just now,
        # so that as much of either lies in the caches.
        joint = torch.stack([base + iteration % 7, base - iteration % 7])
        to = target.data_ptr() + iteration % _COPIES * joint.nbytes
        began = time.perf_counter()
        for half in (0, 1):
            ctypes.memmove(to + half * base.nbytes, joint[half].data_ptr(), base.nbytes)
        copied = time.perf_counter() - began
        joint = torch.stack([base - iteration % 5, base + iteration % 5])
        made = {"hidden_states": joint[0], "residual": joint[1]}
        began = time.perf_counter()
        end.send(iteration, num_tokens, made)
        times.append((began, time.perf_counter() - began, copied))
    return times


def _receives(end: Any, start: int, num_tokens: int, count: int, late: bool) -> list[Any]:
    times = []
    if late:
        time.sleep(_LATE)
    for iteration in range(start, start + count):
        tensors = end.receive(iteration, num_tokens)
        times.append(time.perf_counter())
        assert tensors["residual"].shape == (num_tokens, HIDDEN)
        if late:
            time.sleep(_LATE / 2)  # this stage's own forward pass
        end.done(iteration)
    return times


def measure(path: str, plan: list[tuple[int, int]]) -> list[dict[str, float]]:
    """One row of medians for each (tokens, iterations) of ``plan``."""

    if path.startswith("vllm"):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            place: Any = probe.getsockname()[1]
    else:
        from sipipe.messages.link import LinkEndpoint

        link = LinkEndpoint(kind=path, buffer_tokens=max(t for t, _ in plan), name="stage0-1.r0")  # type: ignore[arg-type]
        place = link, socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for rank in (0, 1):
        ours, theirs = context.Pipe()
        process = context.Process(target=_stage, args=(rank, path, place, plan, theirs))
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    try:
        sent, received = (pipe.recv() for pipe in pipes)
        for pipe in pipes:
            pipe.send(None)
        for process in processes:
            process.join(30)
    finally:
        for process in processes:
            process.kill()
    rows = []
    pairs = list(zip(sent, received, strict=True))
    for (sends, arrivals), (late_sends, _) in zip(pairs[::2], pairs[1::2], strict=True):
        warm = slice(len(sends) // 5, None)
        began, blocked, copied = np.array(sends)[warm].T
        usable = np.array(arrivals)[warm] - began
        rows.append(
            {
                "blocked p50 µs": float(np.median(blocked) * 1e6),
                "blocked p99 µs": float(np.percentile(blocked, 99) * 1e6),
                "blocked, next stage late p50 µs": float(
                    np.median([blocked for _, blocked, _ in late_sends[2:]]) * 1e6
                ),
                "usable p50 µs": float(np.median(usable) * 1e6),
                "usable p99 µs": float(np.percentile(usable, 99) * 1e6),
                "copy µs": float(np.median(copied) * 1e6),
                "beyond copy p50 µs": float(np.median(usable - copied) * 1e6),
            }
        )
    return rows


def main() -> None:
    """Measure every path in turn and print one table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer iterations")
    parser.add_argument("--tokens", type=int, nargs="+", default=[4, 32, 256, 1024])
    parser.add_argument("--paths", nargs="+", default=list(PATHS.values()))
    options = parser.parse_args()
    count = 60 if options.quick else 400
    plan = [(tokens, count) for tokens in options.tokens]
    rows = []
    for title, path in PATHS.items():
        if path not in options.paths:
            continue
        try:
            measured = measure(path, plan)
        except EOFError:
            print(f"{title}: a process failed, see above; left out")
            continue
        for (tokens, _), row in zip(plan, measured, strict=True):
            rows.append({"path": title, "B": tokens, **row})
    rows.sort(key=lambda row: row["B"])
    report(
        "transfer",
        f"hidden_states and residual, B × {HIDDEN} bf16 each, from one stage to the next",
        rows,
        note="blocked: the sending stage's time in send; usable: until the next stage holds tensors",
    )


if __name__ == "__main__":
    main()

"""Latency and CPU time of SiPipe's channels, beside vLLM's ``MessageQueue`` in the same run.

``python -m benchmarks.channels [--quick]``. Every reader and sender is a process of its own. A
message's latency runs from just before the call that sends it to the moment the reader has it in
hand; both clocks are the machine's monotonic clock. Messages are a millisecond or two apart, as
iterations are, so that readers wait for each of them.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import socket
import struct
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from benchmarks.harness import report
from sipipe.ipc.errors import ChannelClosed
from sipipe.ipc.gather import GatherReceiver, GatherSender
from sipipe.ipc.ring.dispatch import DispatchProducer, DispatchReader
from sipipe.ipc.ring.logits import LogitsChannel, LogitsReader, LogitsWriter
from sipipe.messages.logits import LogitsShape

SPAWN = multiprocessing.get_context("spawn")
READERS = multiprocessing.get_context("forkserver")  # imports vLLM once, not in every reader
PACE = 0.002  # seconds between messages
IDLE = 3.0


def _cpu() -> float:
    """CPU seconds of this process so far."""
    return time.process_time()


# One channel, several readers: both sides behind the same two functions.


def _open(side: str, handle: Any, rank: int) -> Any:
    if side == "sipipe":
        reader = DispatchReader(handle, f"reader{rank}")

        def receive() -> int:
            with reader.receive() as message:
                message.parts[0][-1]  # in place: what is received is there
                return time.perf_counter_ns()

    else:
        from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

        queue = MessageQueue.create_from_handle(handle, rank)
        queue.wait_until_ready()

        def receive() -> int:
            queue.dequeue()
            return time.perf_counter_ns()

    return receive


def _bind(rank: int) -> None:
    """To a core of its own as far as they go, as vLLM binds stage workers. The writer is not."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})


def _reader(side: str, handle: Any, rank: int, count: int, back: Connection) -> None:
    _bind(rank)
    receive = _open(side, handle, rank)
    back.send("ready")
    receive()  # the first message brings everything into the caches
    times = np.empty(count, np.int64)
    began = _cpu()
    for i in range(count):
        times[i] = receive()
    spent = _cpu() - began
    began = _cpu()
    with contextlib.suppress(ChannelClosed):
        receive()  # idle: the last message comes after IDLE seconds
    back.send((times, spent, _cpu() - began))


def _dispatch(side: str, size: int, readers: int, count: int) -> dict[str, Any]:
    names = [f"reader{i}" for i in range(readers)]
    body = os.urandom(size)
    producer = queue = None
    handle: Any
    if side == "sipipe":
        producer = DispatchProducer("bench", entries=16, entry_bytes=size + 4096, readers=names)
        handle = producer.endpoint

        def send() -> None:
            producer.publish([body], 10)

    else:
        from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

        queue = MessageQueue(readers, readers, max_chunk_bytes=size + 4096, max_chunks=16)
        handle = queue.export_handle()

        def send() -> None:
            queue.enqueue(body, 10)

    pipes, children = [], []
    for rank in range(readers):
        here, there = READERS.Pipe()
        child = READERS.Process(target=_reader, args=(side, handle, rank, count, there))
        child.start()
        pipes.append(here)
        children.append(child)
    if queue is not None:
        queue.wait_until_ready()
    for pipe in pipes:
        pipe.recv()
    send()
    time.sleep(0.1)
    sent = np.empty(count, np.int64)
    began = _cpu()
    for i in range(count):
        time.sleep(PACE)
        sent[i] = time.perf_counter_ns()
        send()
    spent = _cpu() - began
    time.sleep(IDLE)
    send()
    results = [pipe.recv() for pipe in pipes]
    for child in children:
        child.join()
    if producer is not None:
        producer.close()
    latency = np.concatenate([times - sent for times, _, _ in results]) / 1e3
    first = np.min([times for times, _, _ in results], axis=0)
    last = np.max([times for times, _, _ in results], axis=0)
    return {
        "channel": "SiPipe dispatch" if side == "sipipe" else "vLLM MessageQueue",
        "message": f"{size // 1024:,} KB",
        "readers": readers,
        "p50 µs": float(np.percentile(latency, 50)),
        "p99 µs": float(np.percentile(latency, 99)),
        "first reader p50 µs": float(np.percentile((first - sent) / 1e3, 50)),
        "last reader p50 µs": float(np.percentile((last - sent) / 1e3, 50)),
        "writer CPU µs/msg": spent / count * 1e6,
        "reader CPU µs/msg": float(np.mean([cpu for _, cpu, _ in results])) / count * 1e6,
        "reader idle CPU %": float(np.mean([cpu for _, _, cpu in results])) / IDLE * 100,
    }


def _dispatches(
    sides: list[str], kind: tuple[int, int], count: int, repeat: int = 1
) -> list[dict[str, Any]]:
    """A row for each side: the median of each figure, the sides in turn."""
    runs = [[_dispatch(side, *kind, count) for side in sides] for _ in range(repeat)]
    return [
        {
            key: float(np.median([row[key] for row in rows])) if isinstance(value, float) else value
            for key, value in rows[0].items()
        }
        for rows in zip(*runs, strict=True)
    ]


# Logits: 40 MB handed over in place, against 40 MB through a queue.


def _logits_reader(handle: Any, count: int, back: Connection) -> None:
    reader = LogitsReader(handle, "sampler")
    back.send("ready")
    times = np.empty(count, np.int64)
    for i in range(count):
        with reader.receive() as received:
            times[i] = time.perf_counter_ns()
            assert received.array[-1, -1] == received.iteration
            assert not received.array.flags.owndata
    back.send(times)
    reader.close()


def _logits(count: int) -> dict[str, Any]:
    vocab, batch = 151_936, 66
    channel = LogitsChannel(
        "bench", LogitsShape(vocab=vocab), rows=2 * batch, entries=3, readers=["sampler"]
    )
    writer = LogitsWriter(channel.endpoint)
    here, there = SPAWN.Pipe()
    child = SPAWN.Process(target=_logits_reader, args=(channel.endpoint, count, there))
    child.start()
    here.recv()
    sent = np.empty(count, np.int64)
    fill = np.empty(count)
    for i in range(count):
        with writer.acquire(i, batch, i % 2 * batch, 10) as region:
            began = time.perf_counter()
            region[...] = i
            fill[i] = time.perf_counter() - began
            time.sleep(PACE)
            sent[i] = time.perf_counter_ns()
    times = here.recv()
    child.join()
    writer.close()
    channel.close()
    return {
        "channel": "SiPipe logits, in place",
        "bytes": vocab * batch * 4,
        "p50 µs": float(np.percentile((times - sent) / 1e3, 50)),
        "p99 µs": float(np.percentile((times - sent) / 1e3, 99)),
        "writing the logits, ms": float(np.median(fill)) * 1e3,
    }


def _queue_logits(count: int) -> dict[str, Any]:
    row = _dispatch_array(151_936 * 66 * 4, count)
    return {
        "channel": "vLLM MessageQueue, pickled array",
        "bytes": 151_936 * 66 * 4,
        "p50 µs": float(np.percentile(row, 50)),
        "p99 µs": float(np.percentile(row, 99)),
        "writing the logits, ms": None,
    }


def _queue_reader(handle: Any, count: int, back: Connection) -> None:
    receive = _open("vllm", handle, 0)
    back.send("ready")
    times = np.empty(count, np.int64)
    for i in range(count):
        times[i] = receive()
    back.send(times)


def _dispatch_array(size: int, count: int) -> np.ndarray[Any, Any]:
    from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

    queue = MessageQueue(1, 1, max_chunk_bytes=size + (1 << 20), max_chunks=3)
    here, there = SPAWN.Pipe()
    child = SPAWN.Process(target=_queue_reader, args=(queue.export_handle(), count, there))
    child.start()
    queue.wait_until_ready()
    here.recv()
    array = np.ones(size // 4, np.float32)
    sent = np.empty(count, np.int64)
    for i in range(count):
        time.sleep(PACE)
        sent[i] = time.perf_counter_ns()
        queue.enqueue(array)
    times = here.recv()
    child.join()
    return np.asarray((times - sent) / 1e3)


# Gather: each sampler answers a dispatched message, as it does in an iteration.


def _sender(dispatch: Any, gather: socket.socket, name: str, payload: int) -> None:
    reader = DispatchReader(dispatch, name)
    sender = GatherSender(gather)
    body = bytes(payload)
    sender.send(0, b"")
    with contextlib.suppress(ChannelClosed):
        while True:
            with reader.receive() as message:
                iteration = message.sequence + 1
            sender.send(iteration, struct.pack("<q", time.perf_counter_ns()) + body)
    sender.close()


def _gather(samplers: int, count: int) -> dict[str, Any]:
    names = [f"sampler{i}" for i in range(samplers)]
    producer = DispatchProducer("bench", readers=names)
    pairs = [socket.socketpair() for _ in names]
    receiver = GatherReceiver([here for here, _ in pairs])
    children = [
        SPAWN.Process(target=_sender, args=(producer.endpoint, there, name, 64 * 4))
        for name, (_, there) in zip(names, pairs, strict=True)
    ]
    receiver.expect(0, range(samplers))
    for child, (_, there) in zip(children, pairs, strict=True):
        child.start()
        there.close()
    receiver.collect()  # all of them are there
    latency, loop = np.empty(count), np.empty(count)
    spent = 0.0
    for i in range(-20, count):
        time.sleep(PACE)
        cpu, began = _cpu(), time.perf_counter_ns()
        receiver.expect(i + 21, range(samplers))
        producer.publish([b"go"], 10)
        _, answers = receiver.collect()
        now = time.perf_counter_ns()
        if i >= 0:
            last = max(struct.unpack_from("<q", frames[0])[0] for frames in answers.values())
            latency[i], loop[i] = (now - last) / 1e3, (now - began) / 1e3
            spent += _cpu() - cpu
    producer.close()
    receiver.close()
    for child in children:
        child.join()
    return {
        "samplers": samplers,
        "last send to complete p50 µs": float(np.percentile(latency, 50)),
        "p99 µs": float(np.percentile(latency, 99)),
        "dispatch to complete p50 µs": float(np.percentile(loop, 50)),
        "dispatcher CPU µs/iteration": spent / count * 1e6,
    }


@contextlib.contextmanager
def _awake() -> Iterator[None]:
    """Keep every core from halting, as forward passes and sampling do: a process each that runs
    when nothing else wants to."""
    cores = sorted(os.sched_getaffinity(0))
    busy = [READERS.Process(target=_burn, args=(core,), daemon=True) for core in cores]
    for process in busy:
        process.start()
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.join()


def _burn(core: int) -> None:
    os.sched_setaffinity(0, {core})
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    parent = os.getppid()
    while os.getppid() == parent:
        for _ in range(100_000):
            pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer messages, 4 KB only")
    parser.add_argument("--without-vllm", action="store_true", help="SiPipe's side only")
    arguments = parser.parse_args()
    count = 500 if arguments.quick else 2000
    kinds = [(4096, 2)]
    if not arguments.quick:
        kinds += [(4096, 1), (4096, 4), (4096, 9), (1 << 16, 2), (1 << 20, 2)]
    sides = ["sipipe"] if arguments.without_vllm else ["sipipe", "vllm"]
    vllm = [] if arguments.without_vllm else ["vllm.distributed.device_communicators.shm_broadcast"]
    READERS.set_forkserver_preload(["numpy", "sipipe.ipc.ring.dispatch", *vllm])

    rows = _dispatches(sides, kinds[0], count // 2, repeat=1 if arguments.quick else 7)
    for kind in kinds[1:]:
        rows += _dispatches(sides, kind, count // 4)
    report(
        "channels",
        "One producer, its readers",
        rows,
        note="each reader bound to a core; first row: medians of seven runs, the sides in turn",
        file="channels-dispatch",
    )
    with _awake():
        rows = _dispatches(sides, kinds[0], count // 2, repeat=1 if arguments.quick else 3)
    report(
        "channels",
        "The same while the cores do something else",
        rows,
        note="a process of the idle scheduling class on every core keeps it from halting",
        file="channels-awake",
    )
    rows = [_logits(100)] + ([] if arguments.without_vllm else [_queue_logits(50)])
    report("channels", "40 MB of logits to one sampler", rows, file="channels-logits")
    rows = [_gather(samplers, count // 2) for samplers in (1, 8)]
    report("channels", "Samplers answer a dispatched message", rows, file="channels-gather")


if __name__ == "__main__":
    main()

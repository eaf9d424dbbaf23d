"""What travels, counted: one message a microbatch and rank, and nothing else after the first."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import threading
import time

import pytest
import torch

from sipipe.errors import ResourceError
from sipipe.ipc.link.cuda_ipc import CudaIpcSending
from sipipe.ipc.link.endpoint import create_link, open_receiver, open_sender
from sipipe.ipc.link.nccl import NcclSending
from sipipe.ipc.link.records import RECORD_BYTES
from sipipe.ipc.link.sender import Sender
from sipipe.ipc.link.shm import ShmSending
from sipipe.ipc.link.shm_connection import PacketConnection
from sipipe.ipc.link.tcp import TcpSending

BOUND = 60.0


class Counting:
    """A transport that counts how often the sender waits for a buffer."""

    def __init__(self, inner):
        self.inner = inner
        self.waits = 0

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def collect_releases(self, timeout):
        self.waits += timeout > 0
        return self.inner.collect_releases(timeout)


@pytest.fixture
def counting(endpoint):
    kinds = {
        "shm": ShmSending,
        "socket": TcpSending,
        "cuda_ipc": CudaIpcSending,
        "nccl": NcclSending,
    }
    return Counting(kinds[endpoint.kind](endpoint))


@pytest.fixture
def wire(endpoint, monkeypatch):
    """The endpoint to send to, and a function: bytes and messages that have arrived so far."""
    if endpoint.kind in ("shm", "cuda_ipc"):
        sizes = []
        next_packet = PacketConnection.next_packet

        def count(self, *arguments):
            sizes.append(next_packet(self, *arguments))
            return sizes[-1]

        monkeypatch.setattr(PacketConnection, "next_packet", count)
        yield endpoint, lambda: (sum(sizes), len(sizes))
        return
    seen = [0]
    with socket.create_server(("127.0.0.1", 0)) as server:

        def forward(source, target, counts):
            with contextlib.suppress(OSError):  # at the end both sides hang up
                while data := source.recv(1 << 16):
                    seen[0] += len(data) * counts
                    target.sendall(data)
                target.shutdown(socket.SHUT_WR)

        def relay():
            near = server.accept()[0]
            far = socket.create_connection(endpoint.address)
            back = threading.Thread(target=forward, args=(far, near, False))
            back.start()
            forward(near, far, True)
            back.join(BOUND)
            near.close()
            far.close()

        relaying = threading.Thread(target=relay)
        relaying.start()
        address = server.getsockname()
        yield dataclasses.replace(endpoint, address=address), lambda: (seen[0], None)
        relaying.join(BOUND)


def test_no_metadata_after_the_first_iteration(endpoint, wire, hidden):
    """Counted on the wire: a record a microbatch, on sockets with the data and a seal."""
    to, arrived = wire
    with open_receiver(endpoint) as receiver, open_sender(to) as sender:
        for iteration in range(200):
            num_tokens = 1 + iteration * 7 % 64
            width = 24 if iteration < 100 else 6000  # inline, then by the thread
            sent = hidden(num_tokens, iteration, width)
            before = arrived()
            receiver.post(iteration, num_tokens)
            sender.send(iteration, num_tokens, sent)
            receiver.take(iteration, BOUND)
            receiver.release(iteration)
            if iteration in (0, 100):  # a structure is described once
                continue
            assert sender.statistics().metadata_messages == 1 + (iteration > 100)
            data = sum(tensor.nbytes for tensor in sent.values())
            after = arrived()
            if endpoint.kind in ("shm", "cuda_ipc"):
                assert (after[0] - before[0], after[1] - before[1]) == (RECORD_BYTES, 1)
            elif endpoint.kind == "socket":
                assert after[0] - before[0] == RECORD_BYTES + data + 8
            else:  # the data go through the process group
                assert after[0] - before[0] == RECORD_BYTES


def test_a_slow_last_stage_blocks_only_at_the_bound_and_then_in_the_kernel(
    endpoint, counting, hidden
):
    with Sender(endpoint, counting) as sender, open_receiver(endpoint) as receiver:
        receiver.post(0, 4)
        sender.send(0, 4, hidden(4))
        receiver.take(0, BOUND)
        for iteration in range(1, endpoint.depth):
            sender.send(iteration, 4, hidden(4))
        assert (counting.waits, sender.statistics().waits) == (0, 0)
        releasing = threading.Timer(0.3, receiver.release, [0])
        releasing.start()
        cpu = time.thread_time()
        sender.send(endpoint.depth, 4, hidden(4))
        cpu = time.thread_time() - cpu
        releasing.join()
        statistics = sender.statistics()
        assert statistics.waits == 1
        assert statistics.waited_seconds > 0
        # One call that sleeps in poll(); a loop that looked again and again would show in both.
        assert counting.waits <= 2
        assert cpu < statistics.waited_seconds / 2


def test_buffers_grow_for_a_larger_structure_while_older_ones_are_held(endpoint):
    small, large = {"h": torch.randn(4, 2)}, {"h": torch.randn(4, 3000)}
    with open_sender(endpoint) as sender, open_receiver(endpoint) as receiver:
        for iteration, tensors in enumerate([small, large, small]):
            receiver.post(iteration, 4)
            sender.send(iteration, 4, tensors)
        taken = [receiver.take(iteration, BOUND)["h"] for iteration in range(3)]
        for got, tensors in zip(taken, [small, large, small], strict=True):
            assert torch.equal(got, tensors["h"])
        for iteration in range(3):
            receiver.release(iteration)
        for iteration in range(3, 9):
            receiver.post(iteration, 4)
            sender.send(iteration, 4, large)
            assert torch.equal(receiver.take(iteration, BOUND)["h"], large["h"])
            receiver.release(iteration)


@pytest.mark.parametrize("shards", [2, 3])
def test_ranks_send_their_part_and_gather(endpoint, hidden, shards):
    """Rank r sends 1/t to rank r; what does not divide, and what ranks do not share, goes whole."""
    links = [
        create_link(
            endpoint.kind,
            max_tokens=64,
            device=endpoint.device,
            name=f"stage0-1.r{rank}",
            shards=shards,
            shard=rank,
            whole=frozenset({"private"}),
        )
        for rank in range(shards)
    ]
    parts: list[torch.Tensor | None] = [None] * shards
    barrier = threading.Barrier(shards)
    results: list[list[dict[str, torch.Tensor]]] = [[] for _ in range(shards)]
    sizes = [1, 7, 64, 5]

    def inputs(iteration: int, rank: int) -> dict[str, torch.Tensor]:
        return {
            **hidden(sizes[iteration], iteration),
            "odd": torch.arange(sizes[iteration] * 5).view(sizes[iteration], 5),
            "private": torch.full((sizes[iteration], 6), float(rank)),
        }

    def last_stage(rank: int) -> None:
        def all_gather(part: torch.Tensor) -> torch.Tensor:
            parts[rank] = part
            barrier.wait(BOUND)
            whole = torch.cat([part for part in parts if part is not None])
            barrier.wait(BOUND)
            return whole

        with open_receiver(links[rank], all_gather=all_gather) as receiver:
            for iteration, size in enumerate(sizes):
                receiver.post(iteration, size)
                taken = receiver.take(iteration, BOUND)
                results[rank].append({key: tensor.clone() for key, tensor in taken.items()})
                receiver.release(iteration)

    threads = [threading.Thread(target=last_stage, args=(rank,)) for rank in range(shards)]
    for thread in threads:
        thread.start()
    senders = [open_sender(link) for link in links]
    for iteration, size in enumerate(sizes):
        for rank, sender in enumerate(senders):
            sender.send(iteration, size, inputs(iteration, rank))
    for thread in threads:
        thread.join(BOUND)
    whole = sum(tensor.nbytes for i in range(len(sizes)) for tensor in hidden(sizes[i]).values())
    sent = senders[0].statistics().bytes_sent
    assert sent == whole // shards + sum(size * (5 * 8 + 6 * 4) for size in sizes)
    for sender in senders:
        sender.close()
    for rank in range(shards):
        for iteration in range(len(sizes)):
            for key, tensor in inputs(iteration, rank).items():
                assert torch.equal(results[rank][iteration][key], tensor), (rank, iteration, key)


def test_strangers_at_the_port_do_no_harm(hidden):
    """A scanner that says nothing useful, and a link with another secret; then the real sender."""
    endpoint = create_link("socket", max_tokens=8)
    with open_receiver(endpoint) as receiver:
        with socket.create_connection(endpoint.address) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(30))
            stranger.settimeout(BOUND)
            while stranger.recv(100):
                pass
        with open_sender(endpoint) as sender:
            receiver.post(0, 3)
            sender.send(0, 3, hidden(3))
            assert torch.equal(receiver.take(0, BOUND)["residual"], hidden(3)["residual"])


def test_a_port_that_another_engine_answers():
    mine = create_link("socket", max_tokens=8, name="stage0-1.r0")
    other = create_link("socket", max_tokens=8, address=mine.address)
    with open_receiver(other), open_sender(mine) as sender:

        def send() -> None:  # the refusal may be there before the first frame
            sender.send(0, 1, {"h": torch.zeros(1, 2)})
            sender.wait_sent(BOUND)

        with pytest.raises(ResourceError, match=r"stage0-1\.r0.*another program uses the port"):
            send()


def test_more_structures_than_are_remembered(endpoint):
    """Forgotten ones are announced again; memory of them is bounded."""
    with open_sender(endpoint) as sender, open_receiver(endpoint) as receiver:
        for iteration in range(150):
            tensors = {f"key{iteration % 40}": torch.full((2, 3), iteration)}
            receiver.post(iteration, 2)
            sender.send(iteration, 2, tensors)
            for key, got in receiver.take(iteration, BOUND).items():
                assert torch.equal(got, tensors[key])
            receiver.release(iteration)
        assert sender.statistics().metadata_messages == 150  # 40 in turn never stay among 32

"""Any interleaving of send, take and release: what is received is what was sent, in order.

The rules below are every legal next call of either side; hypothesis chooses among them, which is
what delays on either side amount to. Schemas are drawn from a pool, repeat, and change size. The
transport between GPUs runs with a stand-in, whose copies come late.
"""

from __future__ import annotations

import os
import socket
from collections import deque
from typing import Any
from unittest import mock

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from tests.ipc.link import stand_in
from tests.ipc.link.conftest import BETWEEN_HOSTS, HERE, free_port

from sipipe.errors import StallError
from sipipe.ipc.link import cuda_ipc, shm
from sipipe.ipc.link.endpoint import open_receiver, open_sender
from sipipe.ipc.link.nixl_agent import nixl_reach
from sipipe.messages.link import LinkEndpoint

MAX_TOKENS = 40
BUFFER_TOKENS = 16  # more crosses in pieces
BOUND = 60.0

dtypes = st.sampled_from(
    [torch.bfloat16, torch.float32, torch.float16, torch.int64, torch.bool, torch.float8_e4m3fn]
)
shapes = st.sampled_from([(-1, 8), (-1, 33), (-1,), (-1, 2, 3), (3, -1, 4), (5, 7), (8, 8), ()])
schemas = st.dictionaries(
    st.sampled_from(["hidden_states", "residual", "positions", "deepstack_0"]),
    st.tuples(dtypes, shapes),
    min_size=1,
    max_size=4,
)
tokens = st.one_of(st.integers(0, MAX_TOKENS), st.sampled_from([0, 1, 5, 8, MAX_TOKENS]))


def fill(schema: dict[str, Any], num_tokens: int, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for key, (dtype, shape) in schema.items():
        sizes = tuple(num_tokens if size == -1 else size for size in shape)
        values = torch.randint(0, 2, sizes, generator=generator).float()
        values += torch.randint(0, 2, sizes, generator=generator) * 30
        tensors[key] = values.to(dtype)
    return tensors


class Link(RuleBasedStateMachine):
    """Two real ends in one process beside the obvious model: a queue."""

    kind = "shm"
    depth = 3

    def __init__(self) -> None:
        super().__init__()
        self.pool: list[dict[str, Any]] = []
        self.next_send = 0
        self.sent: deque[tuple[int, int, dict[str, torch.Tensor]]] = deque()
        self.held: dict[int, tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]] = {}

    @initialize(
        pool=st.lists(schemas, min_size=1, max_size=4),
        quick=st.sampled_from([0, shm.QUICK_BYTES]),
    )
    def start(self, pool: list[dict[str, Any]], quick: int) -> None:
        self.pool = pool
        on_gpu = self.kind == "cuda_ipc"
        self.patches = [
            mock.patch.object(cuda_ipc, "CudaDevice", stand_in.StandInDevice),
            mock.patch.dict(os.environ, {"SIPIPE_SECRET": "a secret of the tests"}),
            mock.patch.object(shm, "QUICK_BYTES", quick),  # 0: as if these were large frames
        ]
        for patch in self.patches:
            patch.start()
        endpoint = LinkEndpoint(
            kind=self.kind,  # type: ignore[arg-type]
            buffer_tokens=BUFFER_TOKENS,
            device="cuda" if on_gpu else "cpu",
            depth=self.depth,
            stall_timeout=BOUND,
            address=HERE,
            port=free_port(HERE) if self.kind in BETWEEN_HOSTS else 0,
            data_port=free_port() if self.kind == "nixl" else 0,
        )
        ours = theirs = None
        if self.kind not in BETWEEN_HOSTS:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.receiver, self.sender = open_receiver(endpoint, theirs), open_sender(endpoint, ours)

    def teardown(self) -> None:
        if self.pool:
            self.sender.close()
            self.receiver.close()
            for patch in self.patches:
                patch.stop()

    def oldest(self) -> int:
        """The first frame that the receiver has not released."""
        frames = [iteration for iteration, _, _ in self.sent] + list(self.held)
        return min(frames, default=self.next_send)

    @precondition(lambda self: self.next_send - self.oldest() < self.depth)
    @rule(which=st.integers(0, 3), size=tokens)
    def send(self, which: int, size: int) -> None:
        tensors = fill(self.pool[which % len(self.pool)], size, self.next_send)
        self.sender.send(self.next_send, size, tensors)
        self.sent.append((self.next_send, size, tensors))
        self.next_send += 1

    @precondition(lambda self: self.next_send - self.oldest() == self.depth and not self.sent)
    @rule()
    def send_too_much(self) -> None:
        with pytest.raises(StallError):
            self.sender.send(self.next_send, 1, fill(self.pool[0], 1, 0), timeout=0.0)

    @precondition(lambda self: self.sent and (self.sent[0][1] <= BUFFER_TOKENS or not self.held))
    @rule()
    def take(self) -> None:
        iteration, size, tensors = self.sent.popleft()
        got = self.receiver.take(iteration, size, BOUND)
        assert list(got) == list(tensors)
        self.held[iteration] = (got, {key: tensor.clone() for key, tensor in tensors.items()})

    @precondition(lambda self: not self.sent)
    @rule()
    def take_too_early(self) -> None:
        with pytest.raises(StallError):
            self.receiver.take(self.next_send, 1, timeout=0.0)

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 10))
    def release(self, which: int) -> None:
        iteration = sorted(self.held)[which % len(self.held)]
        got, _ = self.held.pop(iteration)
        for tensor in got.values():
            tensor.zero_()  # the model may compute in place, and keeps nothing
        got.clear()
        self.receiver.release(iteration)

    @invariant()
    def held_data_are_untouched(self) -> None:
        for got, expected in self.held.values():
            for key, tensor in expected.items():
                assert got[key].dtype == tensor.dtype
                assert got[key].shape == tensor.shape
                assert torch.equal(bytes_of(got[key]), bytes_of(tensor))


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


class CudaIpcLink(Link):
    kind = "cuda_ipc"
    depth = 2


class ZeromqLink(Link):
    kind = "zeromq"


class NixlLink(Link):
    kind = "nixl"


TestShm = pytest.mark.ci(Link.TestCase)
TestCudaIpc = CudaIpcLink.TestCase
TestZeromq = pytest.mark.ci(ZeromqLink.TestCase)
NIXL = pytest.mark.skipif(not nixl_reach(), reason="NIXL is not installed")
TestNixl = NIXL(NixlLink.TestCase)
SETTINGS = {"deadline": None, "suppress_health_check": list(HealthCheck)}
TestShm.settings = settings(max_examples=25, stateful_step_count=40, **SETTINGS)
TestCudaIpc.settings = settings(max_examples=8, stateful_step_count=40, **SETTINGS)
TestZeromq.settings = settings(max_examples=8, stateful_step_count=40, **SETTINGS)
TestNixl.settings = settings(max_examples=8, stateful_step_count=40, **SETTINGS)


@pytest.mark.slow
@pytest.mark.parametrize(
    "machine",
    [Link, CudaIpcLink, ZeromqLink, pytest.param(NixlLink, marks=NIXL)],
)
def test_for_longer(machine: type[Link]) -> None:
    run_state_machine_as_test(
        machine, settings=settings(max_examples=400, stateful_step_count=60, **SETTINGS)
    )

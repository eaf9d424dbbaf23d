"""Any interleaving of send, post, take and release: what is received is what was sent, in order.

The rules below are every legal next call of either side; hypothesis chooses among them, which is
what delays on either side amount to. Structures are drawn from a pool, repeat, and change size.
The transports between GPUs run with stand-ins, whose copies come late.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import hypothesis.strategies as st
import torch
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from tests.ipc.link import stand_ins

from sipipe.ipc.link.endpoint import create_link, open_receiver, open_sender

MAX_TOKENS = 40
BOUND = 60.0

dtypes = st.sampled_from(
    [torch.bfloat16, torch.float32, torch.float16, torch.int64, torch.bool, torch.float8_e4m3fn]
)
shapes = st.sampled_from([(-1, 8), (-1, 33), (-1,), (-1, 2, 3), (3, -1, 4), (5, 7), (8, 8), ()])
structures = st.dictionaries(
    st.sampled_from(["hidden_states", "residual", "positions", "deepstack_0"]),
    st.tuples(dtypes, shapes),
    min_size=1,
    max_size=4,
)
tokens = st.one_of(st.integers(0, MAX_TOKENS), st.sampled_from([0, 1, 5, 8, MAX_TOKENS]))


def fill(structure: dict[str, Any], num_tokens: int, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for key, (dtype, shape) in structure.items():
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
        self.next_send = self.next_post = 0
        self.sent: deque[tuple[int, dict[str, torch.Tensor]]] = deque()
        self.sizes: dict[int, int] = {}
        self.held: dict[int, tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]] = {}

    @initialize(
        pool=st.lists(structures, min_size=1, max_size=4),
        hint=st.sampled_from([0, 200]),
        inline=st.booleans(),
    )
    def start(self, pool: list[dict[str, Any]], hint: int, inline: bool) -> None:
        self.pool = pool
        on_gpu = self.kind in ("cuda_ipc", "nccl")
        if on_gpu:
            stand_ins.use()
        endpoint = create_link(
            self.kind,  # type: ignore[arg-type]
            max_tokens=MAX_TOKENS,
            device="cuda" if on_gpu else "cpu",
            depth=self.depth,
            bytes_per_token_hint=hint,
            stall_timeout=BOUND,
        )
        self.sender, self.receiver = open_sender(endpoint), open_receiver(endpoint)
        if not inline and not on_gpu:
            self.sender._transport.inline_bytes = 0  # as if these were large frames

    def teardown(self) -> None:
        if self.pool:
            self.sender.close()
            self.receiver.close()

    def outstanding(self) -> int:
        return len(self.sent) + len(self.held)

    @precondition(lambda self: self.outstanding() < self.depth)
    @rule(which=st.integers(0, 3), size=tokens)
    def send(self, which: int, size: int) -> None:
        size = self.sizes.setdefault(self.next_send, size)
        tensors = fill(self.pool[which % len(self.pool)], size, self.next_send)
        self.sender.send(self.next_send, size, tensors)
        self.sent.append((self.next_send, tensors))
        self.next_send += 1

    @rule(ahead=st.integers(0, 3), size=tokens, honest=st.sampled_from([True, True, False]))
    def announce(self, ahead: int, size: int, honest: bool) -> None:
        iteration = self.next_send + ahead
        if honest:
            size = self.sizes.setdefault(iteration, size)
        self.sender.post(iteration, size)

    @precondition(lambda self: self.next_post < self.next_send + 5)
    @rule(size=tokens)
    def post(self, size: int) -> None:
        self.receiver.post(self.next_post, self.sizes.setdefault(self.next_post, size))
        self.next_post += 1

    @precondition(lambda self: self.sent and self.sent[0][0] < self.next_post)
    @rule()
    def take(self) -> None:
        iteration, tensors = self.sent.popleft()
        got = self.receiver.take(iteration, BOUND)
        assert list(got) == list(tensors)
        self.held[iteration] = (got, {key: tensor.clone() for key, tensor in tensors.items()})

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 10))
    def release(self, which: int) -> None:
        iteration = sorted(self.held)[which % len(self.held)]
        del self.held[iteration]
        self.receiver.release(iteration)

    @invariant()
    def held_data_are_untouched(self) -> None:
        for got, expected in self.held.values():
            for key, tensor in expected.items():
                assert got[key].dtype == tensor.dtype
                assert got[key].shape == tensor.shape
                assert torch.equal(got[key].contiguous().view(-1).view(torch.uint8),
                                   tensor.contiguous().view(-1).view(torch.uint8))  # fmt: skip

    @invariant()
    def memory_is_bounded(self) -> None:
        if self.pool:
            assert self.sender.statistics().in_flight <= self.depth
            assert self.receiver.statistics().held == len(self.held)


class SocketLink(Link):
    kind = "socket"
    depth = 2


class CudaIpcLink(Link):
    kind = "cuda_ipc"


class NcclLink(Link):
    kind = "nccl"
    depth = 2


TestShm = Link.TestCase
TestSocket = SocketLink.TestCase
TestCudaIpc = CudaIpcLink.TestCase
TestNccl = NcclLink.TestCase
for case in (TestShm, TestSocket, TestCudaIpc, TestNccl):
    case.settings = settings(
        max_examples=25 if case in (TestShm, TestSocket) else 8,
        stateful_step_count=40,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
del case  # or pytest collects it as one more

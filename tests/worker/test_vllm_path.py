"""Hidden states between stages whose vLLM runner pads its batches: real rows alone travel."""

from __future__ import annotations

import socket
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm", reason="the module belongs to sipipe.worker")

from sipipe.ipc.link.endpoint import open_receiver, open_sender  # noqa: E402
from sipipe.messages.link import LinkEndpoint  # noqa: E402
from sipipe.messages.places import StagePlace  # noqa: E402
from sipipe.worker.loop import StageLoop  # noqa: E402

WIDTH, MOST = 6, 16


@pytest.fixture
def loops():
    """The ends of a link, as two stages' loops have them."""
    endpoint = LinkEndpoint(kind="shm", buffer_tokens=MOST, stall_timeout=10)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sender, receiver = StageLoop.__new__(StageLoop), StageLoop.__new__(StageLoop)
    sender._sender, receiver._receiver = (
        open_sender(endpoint, ours),
        open_receiver(endpoint, theirs),
    )
    kept = {key: torch.zeros(MOST, WIDTH) for key in ("hidden_states", "residual")}
    runner = SimpleNamespace(intermediate_tensors=SimpleNamespace(tensors=kept))
    receiver._worker = SimpleNamespace(model_runner=runner)
    for loop in (sender, receiver):
        loop._place = StagePlace(stage=0, stages=2, tp_rank=0, tp_size=1)
        loop._second, loop._cuts = None, False
    yield sender, receiver, kept
    sender._sender.close()
    receiver._receiver.close()


def test_each_stage_pads_as_its_own_graphs_want_it(loops):
    sender, receiver, kept = loops
    for iteration, (tokens, padded) in enumerate([(5, 8), (3, 3), (11, 16), (1, 2), (5, 8)]):
        for loop in loops[:2]:
            loop._iteration, loop._tokens = iteration, tokens
        result = {key: torch.randn(padded, WIDTH) for key in kept}
        # What vLLM's worker waits for before its next step may overwrite the result.
        wait = sender._send_vllm(result)
        found = receiver._receive_vllm()
        wait()
        assert found is kept, "in the buffer that the runner's graphs read, which has rows to pad"
        for key, tensor in result.items():
            assert torch.equal(found[key][:tokens], tensor[:tokens])
            # As vLLM's runners take it, with its own padding: onto itself.
            found[key][:MOST].copy_(found[key][:MOST])

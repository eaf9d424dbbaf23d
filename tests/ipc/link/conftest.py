"""Ends of one link, and hidden states to send."""

from __future__ import annotations

import pytest
import torch
from tests.ipc.link import stand_ins

from sipipe.ipc.link import cuda_ipc, nccl
from sipipe.ipc.link.endpoint import LinkEndpoint, create_link

BOUND = 60.0  # seconds; of a machine at its worst


@pytest.fixture(params=["shm", "socket", "cuda_ipc", "nccl"])
def endpoint(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> LinkEndpoint:
    """One link of each kind; those between GPUs with a stand-in for the device."""
    on_gpu = request.param in ("cuda_ipc", "nccl")
    if on_gpu:
        monkeypatch.setattr(cuda_ipc, "_device", stand_ins.StandInDevice)
        monkeypatch.setattr(nccl, "_lane", stand_ins.StandInLane)
    return create_link(
        request.param,
        max_tokens=64,
        depth=3,
        name="stage0-1.r0",
        device="cuda" if on_gpu else "cpu",
        stall_timeout=BOUND,
    )


@pytest.fixture
def hidden():
    """Makes the hidden states of a Llama: [num_tokens, width] twice, reproducibly."""

    def make(num_tokens: int, seed: int = 0, width: int = 24) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return {
            key: torch.randn(num_tokens, width, generator=generator).to(torch.bfloat16)
            for key in ("hidden_states", "residual")
        }

    return make

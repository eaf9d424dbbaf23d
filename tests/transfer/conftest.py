"""Ends of one link, and hidden states to send."""

from __future__ import annotations

import pytest
import torch

from sipipe.transfer import LinkEndpoint, create_link

BOUND = 60.0  # seconds; of a machine at its worst


@pytest.fixture(params=["shm", "socket"])
def endpoint(request: pytest.FixtureRequest) -> LinkEndpoint:
    """One link of each kind that runs on a CPU."""
    return create_link(
        request.param, max_tokens=64, depth=3, name="stage0-1.r0", stall_timeout=BOUND
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

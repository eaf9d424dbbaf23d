"""Parts of hidden states: what the ranks send together is one copy, and joins to what they had."""

import pytest

pytest.importorskip("vllm")

import torch

from sipipe.worker.links import cut, join


@pytest.mark.parametrize("tokens", [0, 1, 7])
@pytest.mark.parametrize("ranks", [2, 4])
def test_parts_join_to_the_whole(tokens, ranks):
    wide = torch.randn(tokens, 16)
    tensors = {
        "hidden_states": torch.randn(tokens, 8).to(torch.bfloat16),
        "residual": wide[:, ::2],  # not contiguous
        "deepstack": torch.randn(3, tokens, 4),
        "odd": torch.randn(tokens, 5),
    }
    parts = [cut(tensors, rank, ranks) for rank in range(ranks)]
    assert parts[0]["odd"] is tensors["odd"]
    sent = sum(part[f"hidden_states/{ranks}"].numel() for part in parts)
    assert sent == tensors["hidden_states"].numel()
    # A rank's gather finds the tensor of the same key of every rank.
    for rank in range(ranks):
        keys = {id(tensor): key for key, tensor in parts[rank].items()}
        joined = join(
            parts[rank],
            ranks,
            lambda tensor, keys=keys: torch.cat([part[keys[id(tensor)]] for part in parts]),
        )
        assert list(joined) == list(tensors)
        for key, tensor in tensors.items():
            assert torch.equal(joined[key], tensor), key


def test_tensors_that_were_not_cut_are_left_alone():
    tensors = {"hidden_states": torch.randn(2, 8)}
    assert join(tensors, 2, pytest.fail) == tensors

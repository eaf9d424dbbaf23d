"""Hidden states between hosts: each tensor-parallel rank sends its part of what all ranks have.

The ranks of a stage hold the same hidden states. Between hosts, rank r of t sends the r-th part, and
the receiving ranks gather the parts among themselves, as stock vLLM does: the network carries one
copy, not t. A part has a t-th of the last dimension, and a key that says so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

Gather = Callable[[torch.Tensor], torch.Tensor]
"""Concatenates a tensor of all ranks along its first dimension, in order of rank."""


def cut(tensors: Mapping[str, torch.Tensor], rank: int, ranks: int) -> dict[str, torch.Tensor]:
    """The part of ``rank`` of each tensor [..., h] whose h can be divided, as [..., h / ranks]."""
    parts = {}
    for key, tensor in tensors.items():
        width, rest = divmod(tensor.shape[-1], ranks)
        if rest:
            parts[key] = tensor
        else:
            whole = tensor.contiguous().view(ranks, *tensor.shape[:-1], width)
            parts[f"{key}/{ranks}"] = whole[rank]
    return parts


def join(
    tensors: Mapping[str, torch.Tensor], ranks: int, gather: Gather
) -> dict[str, torch.Tensor]:
    """The inverse of :func:`cut`; called by all ranks at once."""
    whole = {}
    for key, tensor in tensors.items():
        name, _, parts = key.partition("/")
        whole[name] = (
            gather(tensor).view(*tensor.shape[:-1], tensor.shape[-1] * ranks) if parts else tensor
        )
    return whole

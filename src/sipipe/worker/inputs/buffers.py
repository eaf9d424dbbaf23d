"""One set of input buffers: every tensor that a model or its attention reads.

The paper keeps two sets (section 4.2): set ``i mod 2`` is written while the device reads the other.
:mod:`sipipe.worker.double_buffer` says when, and ``TokenSafety`` can check it; nothing here does.
On a CPU the host array is the device tensor.
"""

from collections.abc import Sequence
from typing import Any

import torch
from numpy.typing import NDArray


class Buffer:
    """A tensor, and the NumPy array on the same memory."""

    def __init__(self, dtype: torch.dtype, *shape: int) -> None:
        self.tensor = torch.zeros(shape, dtype=dtype)
        self.np: NDArray[Any] = self.tensor.numpy()


class InputBuffers:
    """One set.

    Args:
        tokens: most tokens a batch can have, T.
        requests: most requests a batch can have, B.
        widths: columns of the block table of each KV cache group, W.
    """

    def __init__(self, tokens: int, requests: int, widths: Sequence[int]) -> None:
        self.input_ids = Buffer(torch.int32, tokens)
        self.positions = Buffer(torch.int64, tokens)
        self.query_start_loc = Buffer(torch.int32, requests + 1)
        self.seq_lens = Buffer(torch.int32, requests)
        self.is_prefilling = Buffer(torch.bool, requests)
        self.logits_indices = Buffer(torch.int64, requests)
        """[n] the last token of each request that samples: its logits come from that row."""
        self.block_tables = [Buffer(torch.int32, requests, width) for width in widths]
        self.slot_mappings = [Buffer(torch.int64, tokens) for _ in widths]

"""One set of input buffers: every array of an iteration that the device, or who launches it, reads.

The paper keeps two sets (section 4.2): set ``i mod 2`` is written while the device reads the other.
:mod:`sipipe.worker.double_buffer` says when; nothing here checks it.
On a CPU the host array is the device tensor; for a GPU the memory is page-locked, and
:mod:`sipipe.worker.inputs.placement` copies it.
"""

from collections.abc import Sequence
from typing import Any

import torch
from numpy.typing import NDArray


class Buffer:
    """A tensor, and the NumPy array on the same memory."""

    def __init__(self, dtype: torch.dtype, *shape: int, pinned: bool = False) -> None:
        self.tensor = torch.zeros(shape, dtype=dtype, pin_memory=pinned)
        self.np: NDArray[Any] = self.tensor.numpy()


class InputBuffers:
    """One set.

    Args:
        tokens: most tokens a batch can have, T.
        requests: most requests a batch can have, B.
        widths: columns of the block table of each KV cache group, W; there are G of them.
        pinned: whether a device other than the host copies from here.
    """

    def __init__(
        self, tokens: int, requests: int, widths: Sequence[int], *, pinned: bool = False
    ) -> None:
        def shared(dtype: torch.dtype, *shape: int) -> Buffer:
            return Buffer(dtype, *shape, pinned=pinned)

        # What the model and its attention read.
        self.rows = shared(torch.int64, requests)
        """[B] vLLM's ``idx_mapping``: the row of each request's state."""
        self.input_ids = shared(torch.int32, tokens)
        self.positions = shared(torch.int64, tokens)
        self.query_start_loc = shared(torch.int32, requests + 1)
        self.seq_lens = shared(torch.int32, requests)
        self.num_computed_tokens = shared(torch.int32, requests)
        self.logits_indices = shared(torch.int64, requests)
        """[B] the last token of each request, whether or not it samples."""
        self.block_tables = [shared(torch.int32, requests, width) for width in widths]
        self.slot_mappings = shared(torch.int64, len(widths), tokens)
        self.is_padding = shared(torch.bool, tokens)
        # What only who launches reads. Not page-locked: vLLM's builders copy some of it, and torch
        # stages a copy from ordinary memory before it returns.
        self.num_scheduled_tokens = Buffer(torch.int32, requests)
        self.lengths = Buffer(torch.int32, requests)
        """[B] as ``seq_lens``, for vLLM's ``seq_lens_cpu_upper_bound``."""
        self.starts = Buffer(torch.int32, requests + 1)
        """[B + 1] as ``query_start_loc``."""
        self.prefill_lens = Buffer(torch.int32, requests)
        self.num_computed_prefill_tokens = Buffer(torch.int32, requests)
        self.is_prefilling = Buffer(torch.bool, requests)
        self.runs_as_decode = Buffer(torch.bool, requests)
        """[B] whether a request that is in its prompt computes like a decoding one."""

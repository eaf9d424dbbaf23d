"""One set of input buffers: every array of an iteration that the device or its launching thread reads.

There are two sets (paper section 4.2); :mod:`sipipe.worker.double_buffer` says when each is written.
On a CPU the host array is the device tensor. For a GPU all arrays that it reads lie in one piece of
page-locked memory, :class:`Packed`. :mod:`sipipe.worker.inputs.placement` copies it at once into a
piece with the same layout, :class:`PackedInputBuffers`, whose addresses graphs hold.
"""

from collections.abc import Sequence
from typing import Any

import torch
from numpy.typing import NDArray
from vllm.v1.worker.gpu import input_batch

_ALIGN = 64
"""Bytes to which each array is aligned. A line of a GPU's cache is twice that, and torch aligns what it
allocates to more."""


class Packed:
    """The arrays of a batch that a device reads, in one piece of memory.

    A batch of T' tokens takes the front of the memory, up to the end of its positions, so it is one
    copy. Flags and ids of all T tokens are always in it, 5 bytes each.

    Args:
        tokens: most tokens that a batch can have, T.
        requests: most requests that a batch can have, B.
        logits: most rows of logits, L.
        device: the device of the memory.
        pinned: true if a device other than the host copies from it.
    """

    def __init__(
        self, tokens: int, requests: int, logits: int, *, device: Any = "cpu", pinned: bool = False
    ) -> None:
        fields = {
            "is_padding": (torch.bool, tokens),
            "input_ids": (torch.int32, tokens),
            "rows": (torch.int64, requests),
            "logits_indices": (torch.int64, logits),
            "query_start_loc": (torch.int32, requests + 1),
            "seq_lens": (torch.int32, requests),
            "num_computed_tokens": (torch.int32, requests),
            "positions": (torch.int64, tokens),  # last, so that unused ones are not copied
        }
        starts = {}
        end = 0
        for name, (dtype, count) in fields.items():
            starts[name] = end
            end += -(-count * dtype.itemsize // _ALIGN) * _ALIGN
        self._positions = starts["positions"]
        self.memory = torch.zeros(end, dtype=torch.uint8, device=device, pin_memory=pinned)
        self.tensors = {
            name: self.memory[starts[name] :][: count * dtype.itemsize].view(dtype)
            for name, (dtype, count) in fields.items()
        }

    def batch(self, tokens: int) -> torch.Tensor:
        """The front of the memory that a batch of ``tokens`` tokens takes, uint8."""
        return self.memory[: self._positions + tokens * torch.int64.itemsize]


class PackedInputBuffers(input_batch.InputBuffers):
    """vLLM's input buffers with their arrays in one piece of memory. They are in place before graphs
    are captured."""

    def __init__(self, requests: int, tokens: int, logits: int, device: torch.device) -> None:
        super().__init__(requests, tokens, device)
        self.packed = Packed(tokens, requests, logits, device=device)
        tensors = self.packed.tensors
        self.input_ids = tensors["input_ids"]
        self.positions = tensors["positions"]
        self.is_padding = tensors["is_padding"]
        self.query_start_loc = tensors["query_start_loc"]
        self.seq_lens = tensors["seq_lens"]


class Buffer:
    """A tensor, and the NumPy array on the same memory."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.np: NDArray[Any] = tensor.numpy()


class InputBuffers:
    """One set of input buffers.

    Args:
        tokens, requests, logits, pinned: as :class:`Packed` takes them; with drafts L is above B.
        widths: columns of the block table, W, of each of the G groups of KV cache.
    """

    def __init__(
        self, tokens: int, requests: int, logits: int, widths: Sequence[int], pinned: bool = False
    ) -> None:
        def zeros(dtype: torch.dtype, *shape: int) -> Buffer:
            return Buffer(torch.zeros(shape, dtype=dtype))

        # Arrays that the model and its attention read.
        self.packed = Packed(tokens, requests, logits, pinned=pinned)
        shared = {name: Buffer(tensor) for name, tensor in self.packed.tensors.items()}
        self.rows = shared["rows"]
        """Row of each request's state, [B]; vLLM's ``idx_mapping``."""
        self.input_ids = shared["input_ids"]
        self.positions = shared["positions"]
        self.query_start_loc = shared["query_start_loc"]
        self.seq_lens = shared["seq_lens"]
        self.num_computed_tokens = shared["num_computed_tokens"]
        self.logits_indices = shared["logits_indices"]
        """Tokens with logits, [L]: of each request its last one, whether or not it samples, and behind
        that its drafts."""
        self.is_padding = shared["is_padding"]
        # Block tables are for CPUs. On a GPU vLLM keeps its own, and a set has none.
        self.block_tables = [zeros(torch.int32, requests, width) for width in widths]
        self.slot_mappings = zeros(torch.int64, len(widths), tokens)
        # Arrays that only the launching thread reads. They are not page-locked: vLLM's builders copy
        # some of them, and torch stages a copy from ordinary memory before it returns.
        self.num_scheduled_tokens = zeros(torch.int32, requests)
        self.num_drafts = zeros(torch.int32, requests)
        self.first_logits = zeros(torch.int32, requests + 1)
        """Index in ``logits_indices`` at which each request begins, [B + 1]."""
        self.lengths = zeros(torch.int32, requests)
        """Copy of ``seq_lens``, [B], for vLLM's ``seq_lens_cpu_upper_bound``."""
        self.starts = zeros(torch.int32, requests + 1)
        """Copy of ``query_start_loc``, [B + 1]."""
        self.prefill_lens = zeros(torch.int32, requests)
        self.num_computed_prefill_tokens = zeros(torch.int32, requests)
        self.is_prefilling = zeros(torch.bool, requests)
        self.runs_as_decode = zeros(torch.bool, requests)
        """True for a request that is in its prompt and computes like a decoding one, [B]."""

"""One set of input buffers: every array of an iteration that the device, or who launches it, reads.

There are two sets (paper section 4.2); :mod:`sipipe.worker.double_buffer` says when which is
written. On a CPU the host array is the device tensor. For a GPU all arrays that it reads lie in one
piece of page-locked memory, :class:`Packed`, which :mod:`sipipe.worker.inputs.placement` copies at
once into a piece with the same order, :class:`PackedInputBuffers`, whose addresses graphs know.
"""

from collections.abc import Sequence
from typing import Any

import torch
from numpy.typing import NDArray
from vllm.v1.worker.gpu import input_batch

_ALIGN = 64
"""Bytes; a row of a GPU's cache is twice that, and torch aligns what it allocates to more."""


class Packed:
    """What a device reads of a batch, in one piece of memory.

    A batch of T' tokens takes the front of it, up to the end of its positions: one copy. Flags and
    ids of all T tokens are always in it, 5 bytes each.

    Args:
        tokens: most tokens a batch can have, T.
        requests: most requests a batch can have, B.
        logits: most rows of logits, L.
        device: where it lies.
        pinned: whether a device other than the host copies from here.
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
            "positions": (torch.int64, tokens),  # last: what is not used of them is not copied
        }
        starts, end = {}, 0
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
        """The bytes that a batch of so many tokens takes."""
        return self.memory[: self._positions + tokens * torch.int64.itemsize]


class PackedInputBuffers(input_batch.InputBuffers):
    """vLLM's, packed; in their place from before graphs are captured."""

    def __init__(self, requests: int, tokens: int, logits: int, device: torch.device) -> None:
        super().__init__(requests, tokens, device)
        self.packed = Packed(tokens, requests, logits, device=device)
        found = self.packed.tensors
        self.input_ids, self.positions = found["input_ids"], found["positions"]
        self.is_padding = found["is_padding"]
        self.query_start_loc, self.seq_lens = found["query_start_loc"], found["seq_lens"]


class Buffer:
    """A tensor, and the NumPy array on the same memory."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.np: NDArray[Any] = tensor.numpy()


class InputBuffers:
    """One set; sizes and ``pinned`` as :class:`Packed` has them, L being more than B with drafts.
    ``widths``: columns of the block table of each KV cache group, W; there are G of them."""

    def __init__(
        self, tokens: int, requests: int, logits: int, widths: Sequence[int], pinned: bool = False
    ) -> None:
        def own(dtype: torch.dtype, *shape: int) -> Buffer:
            return Buffer(torch.zeros(shape, dtype=dtype))

        # What the model and its attention read.
        self.packed = Packed(tokens, requests, logits, pinned=pinned)
        shared = {name: Buffer(tensor) for name, tensor in self.packed.tensors.items()}
        self.rows = shared["rows"]
        """[B] vLLM's ``idx_mapping``: the row of each request's state."""
        self.input_ids = shared["input_ids"]
        self.positions = shared["positions"]
        self.query_start_loc = shared["query_start_loc"]
        self.seq_lens = shared["seq_lens"]
        self.num_computed_tokens = shared["num_computed_tokens"]
        self.logits_indices = shared["logits_indices"]
        """[L] the last token of each request, whether or not it samples, and its drafts behind it."""
        self.is_padding = shared["is_padding"]
        # On a CPU; on a GPU vLLM keeps its own, and a set has none.
        self.block_tables = [own(torch.int32, requests, width) for width in widths]
        self.slot_mappings = own(torch.int64, len(widths), tokens)
        # What only who launches reads. Not page-locked: vLLM's builders copy some of it, and torch
        # stages a copy from ordinary memory before it returns.
        self.num_scheduled_tokens = own(torch.int32, requests)
        self.num_drafts = own(torch.int32, requests)
        self.first_logits = own(torch.int32, requests + 1)
        """[B + 1] where in ``logits_indices`` a request begins."""
        self.lengths = own(torch.int32, requests)
        """[B] as ``seq_lens``, for vLLM's ``seq_lens_cpu_upper_bound``."""
        self.starts = own(torch.int32, requests + 1)
        """[B + 1] as ``query_start_loc``."""
        self.prefill_lens = own(torch.int32, requests)
        self.num_computed_prefill_tokens = own(torch.int32, requests)
        self.is_prefilling = own(torch.bool, requests)
        self.runs_as_decode = own(torch.bool, requests)
        """[B] whether a request that is in its prompt computes like a decoding one."""

"""Versioned device inputs: every tensor that a model or its attention reads, ``versions`` times.

The paper keeps two (section 4.2): the CPU executor writes version i mod 2 while the device reads
the other. On a CPU device the host array *is* the device tensor. On CUDA the host side is pinned,
:meth:`InputVersion.upload` copies it on a stream of its own, and two events order the copies
against the forward passes that read them.

Who runs here: the CPU executor's thread writes (``wait_until_free``, the arrays, ``upload``); the
device executor's thread reads (``wait_until_ready``, the tensors, ``release``). The order between
the two is the state machine's (:mod:`sipipe.stage.machine`); ``TokenSafety`` checks it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch


class DualTensor:
    """A host array and the device tensor that it is copied to; the same memory on a CPU."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self.host = torch.zeros(tuple(shape), dtype=dtype, pin_memory=pinned)
        self.device = (
            self.host
            if device.type == "cpu"
            else torch.zeros(tuple(shape), dtype=dtype, device=device)
        )
        self.np: np.ndarray = self.host.numpy()

    def upload(self, count: int) -> None:
        """Copy the first ``count`` rows to the device, without waiting."""
        if self.device is not self.host:
            self.device[:count].copy_(self.host[:count], non_blocking=True)


class InputVersion:
    """One version of all device inputs.

    Args:
        tokens: most tokens a batch can have, padding included.
        sequences: most sequences a batch can have.
        widths: columns of the block table of each KV cache group.
        device: where the model runs.
    """

    def __init__(
        self, tokens: int, sequences: int, widths: Sequence[int], device: torch.device
    ) -> None:
        self.input_ids = DualTensor((tokens,), torch.int32, device)
        self.positions = DualTensor((tokens,), torch.int64, device)
        self.query_start = DualTensor((sequences + 1,), torch.int32, device)
        self.seq_lens = DualTensor((sequences,), torch.int32, device)
        self.prefilling = DualTensor((sequences,), torch.bool, device)
        self.padding = DualTensor((tokens,), torch.bool, device)
        self.tables = [DualTensor((sequences, width), torch.int32, device) for width in widths]
        self.slots = [DualTensor((tokens,), torch.int64, device) for _ in widths]
        self._stream: Any = None
        self._uploaded: Any = None
        self._released: Any = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)
            self._uploaded = torch.cuda.Event()
            self._released = torch.cuda.Event()

    def wait_until_free(self) -> None:
        """Block until the device is done with what was last put here."""
        if self._released is not None:
            self._released.synchronize()

    def upload(self, tokens: int, sequences: int) -> None:
        """Start the copies of a batch of ``tokens`` (padded) tokens and ``sequences`` rows."""
        if self._stream is None:
            return
        with torch.cuda.stream(self._stream):
            for per_token in (self.input_ids, self.positions, self.padding, *self.slots):
                per_token.upload(tokens)
            for per_row in (self.seq_lens, self.prefilling, *self.tables):
                per_row.upload(sequences)
            self.query_start.upload(sequences + 1)
            self._uploaded.record()

    def wait_until_ready(self) -> None:
        """Order the device's current stream behind the copies."""
        if self._uploaded is not None:
            torch.cuda.current_stream().wait_event(self._uploaded)

    def release(self) -> None:
        """All that reads this version has been launched on the device's current stream."""
        if self._released is not None:
            self._released.record()

"""Versioned device inputs: every tensor that a model or its attention reads, ``versions`` times.

The paper keeps two (section 4.2): the CPU executor writes version i mod 2 while the device reads
the other. On a CPU device the host array *is* the device tensor. On CUDA the host side is pinned,
:meth:`InputVersion.upload` copies it on a stream of its own, and two events order the copies
against the forward passes that read them.

Who runs here
    The CPU executor's thread writes: ``wait_until_free``, the arrays, ``upload``. The device
    executor's thread reads: ``wait_until_ready``, the tensors, ``release``.
Guarantees, on CUDA
    The copies of a version start when every kernel launched before its last ``release`` is done
    (the host waits for that event before it even writes the pinned arrays, so staging is never
    written under a copy either), and what is launched after ``wait_until_ready`` starts when the
    copies are done.
Relies on
    The state machine (:mod:`sipipe.worker.machine`): between two ``upload`` of a version its device
    side was taken and released, so that ``_released`` is of the iteration that read it last.
    ``TokenSafety`` checks it. Whatever reads the version's tensors is launched between
    ``wait_until_ready`` and ``release``, on one stream.
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
        self.last_tokens = DualTensor((sequences,), torch.int64, device)
        """[n] the token of each sequence that samples whose hidden state its logits come from."""
        self.tables = [DualTensor((sequences, width), torch.int32, device) for width in widths]
        self.slots = [DualTensor((tokens,), torch.int64, device) for _ in widths]
        self._device = device
        self._stream: Any = None
        self._uploaded: Any = None
        self._released: Any = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)
            # The tensors above are being zeroed on the current stream.
            self._stream.wait_stream(torch.cuda.current_stream(device))
            self._uploaded = torch.cuda.Event()
            # Blocking: the CPU executor sleeps for it, outside the GIL, rather than spins.
            self._released = torch.cuda.Event(blocking=True)

    def wait_until_free(self) -> None:
        """Block until the device is done with what was last put here."""
        if self._released is not None:
            self._released.synchronize()

    def pad(self, tokens: int, padded: int, rows: int, padded_rows: int) -> None:
        """Fill what a captured size has more than the batch: no tokens, no KV cache slots.

        ``tokens`` to ``padded`` and ``rows`` to ``padded_rows``.
        """
        self.input_ids.np[tokens:padded] = 0
        self.positions.np[tokens:padded] = 0
        self.padding.np[tokens:padded] = True
        for mapping in self.slots:
            mapping.np[tokens:padded] = -1
        self.query_start.np[rows + 1 : padded_rows + 1] = tokens
        self.seq_lens.np[rows:padded_rows] = 0
        self.prefilling.np[rows:padded_rows] = False
        for table in self.tables:
            table.np[rows:padded_rows] = 0  # vLLM's null block

    def pose(self, size: int) -> None:
        """Write and upload ``size`` made-up sequences of one token, with nothing running.

        Returns when the copies are done: the next pose writes the same host arrays.
        """
        self.input_ids.np[:size] = 0
        self.positions.np[:size] = 0
        self.padding.np[:size] = False
        self.query_start.np[: size + 1] = np.arange(size + 1)
        self.seq_lens.np[:size] = 1
        self.prefilling.np[:size] = False
        for table, mapping in zip(self.tables, self.slots, strict=True):
            table.np[:size] = 0
            mapping.np[:size] = -1
        self.upload(size, size)
        if self._uploaded is not None:
            self._uploaded.synchronize()

    def upload(self, tokens: int, sequences: int) -> None:
        """Start the copies of a batch of ``tokens`` (padded) tokens and ``sequences`` rows."""
        if self._stream is None:
            return
        with torch.cuda.stream(self._stream):
            for per_token in (self.input_ids, self.positions, self.padding, *self.slots):
                per_token.upload(tokens)
            for per_row in (self.seq_lens, self.prefilling, self.last_tokens, *self.tables):
                per_row.upload(sequences)
            self.query_start.upload(sequences + 1)
            self._uploaded.record(self._stream)

    def wait_until_ready(self) -> None:
        """Order the device's current stream behind the copies."""
        if self._uploaded is not None:
            torch.cuda.current_stream(self._device).wait_event(self._uploaded)

    def release(self) -> None:
        """All that reads this version has been launched on the device's current stream."""
        if self._released is not None:
            self._released.record(torch.cuda.current_stream(self._device))

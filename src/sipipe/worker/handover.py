"""Logits of the last stage into their BIC-L slot (SiPipe paper, "Column-Wise CPU Sampling").

On a CPU the projection writes them there itself (:mod:`sipipe.worker.logits`). On a CUDA device
the slots are page-locked, so that the device's copy engine writes into the memory that the samplers
read, without a bounce through pageable memory. Untested on a GPU.

Who runs here: the device executor's thread alone, between ``open`` and ``close``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from vllm.logger import init_logger

from sipipe.ipc.ring.logits import LogitsWriter

logger = init_logger(f"vllm.{__name__}")


class LogitsHandover:
    """This rank's writer of BIC-L.

    Args:
        writer: The channel's end; closed with this.
        layout: ``"rows"`` for slots [B, V], ``"columns"`` for [V, B].
        device: Where the logits come from.
    """

    def __init__(self, writer: LogitsWriter, layout: str, device: torch.device) -> None:
        self._writer = writer
        self._layout = layout
        self._unlock: Callable[[], None] | None = None
        if device.type == "cuda":
            self._unlock = page_lock(writer.buffer, torch.cuda.cudart())

    def ahead(self, rows: int) -> torch.Tensor:
        """Where the next :meth:`store` puts logits [rows, V of this rank]: compute them in there,
        and it has nothing to copy."""
        return self._tensor(self._writer.ahead(rows))

    def store(self, iteration: int, logits: torch.Tensor, timeout: float) -> None:
        """``logits`` [n, V of this rank] into the slot of ``iteration``; done on return."""
        with self._writer.acquire(iteration, logits.shape[0], timeout) as region:
            target = self._tensor(region)
            if logits.data_ptr() != target.data_ptr():
                target.copy_(logits)

    def _tensor(self, region: npt.NDArray[Any]) -> torch.Tensor:
        tensor = torch.from_numpy(region)
        if tensor.dtype in (torch.uint16, torch.int16):
            # bfloat16 has no NumPy type: its bits travel.
            tensor = tensor.view(torch.bfloat16)
        return tensor if self._layout == "rows" else tensor.T

    def close(self) -> None:
        """Let the memory go."""
        if self._unlock is not None:
            self._unlock()
        self._writer.close()


def page_lock(buffer: memoryview, runtime: Any) -> Callable[[], None] | None:
    """Page-lock ``buffer`` for the device; returns what undoes it, or None where it is refused.

    ``runtime`` is ``torch.cuda.cudart()``. A refusal costs speed only, so it is a warning.
    """
    address = np.frombuffer(buffer, np.uint8).ctypes.data
    refused = int(runtime.cudaHostRegister(address, buffer.nbytes, 0))
    if refused:
        logger.warning(
            "SiPipe: the logits slots (%.0f MiB) could not be page-locked (CUDA error %d); copies "
            "to them go through pageable memory. Check ulimit -l",
            buffer.nbytes / 2**20,
            refused,
        )
        return None
    return lambda: runtime.cudaHostUnregister(address)

"""Logits of the last stage: this rank's columns of the vocabulary, without an all-gather.

vLLM gathers the tensor-parallel shards of the logits on every rank (or on one) so that its own
sampler sees whole rows. SiPipe's samplers read shards from shared memory, where rank r's columns
concatenate with the others' (design: tensor-parallel shards concatenate without an all-gather).
The seam is one method of vLLM's ``LogitsProcessor``, ``_gather_logits``, replaced on the model's
instance; scaling and soft caps, which are element-wise, stay vLLM's.

Who runs here: the device executor's thread, alone.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.logits_processor import LogitsProcessor


class StageLogits:
    """Computes logits of hidden-state rows.

    Args:
        stock: the vLLM runner with the loaded model.
        shard: whether a rank may return its own columns only. Where the model does not allow it
            (LoRA, several heads, added vocabulary), rows are gathered all the same.
    """

    def __init__(self, stock: Any, *, shard: bool) -> None:
        self._model = stock.model
        self._whole_rows = True
        self.vocab_size: int = stock.model_config.get_vocab_size()
        """Columns of a whole row."""
        processors = [m for m in self._model.modules() if isinstance(m, LogitsProcessor)]
        if len(processors) == 1:
            self.vocab_size = int(processors[0].org_vocab_size)
        self.columns: tuple[int, int] = (0, self.vocab_size)
        """Which columns of the vocabulary :meth:`compute` returns on this rank, first and last + 1.
        The ranks' ranges follow one another and cover the vocabulary; a range may be empty."""
        head = getattr(self._model, "lm_head", None)
        indices = getattr(head, "shard_indices", None)
        if (
            shard
            and len(processors) == 1
            and indices is not None
            and head.tp_size > 1
            and stock.lora_config is None
            and indices.num_added_elements == 0
        ):
            self.columns = (
                min(int(indices.org_vocab_start_index), self.vocab_size),
                min(int(indices.org_vocab_end_index), self.vocab_size),
            )
            gather = processors[0]._gather_logits
            processors[0]._gather_logits = lambda logits: (
                gather(logits) if self._whole_rows else logits
            )

    @property
    def sharded(self) -> bool:
        """Whether :meth:`compute` returns less than whole rows."""
        return self.columns != (0, self.vocab_size)

    def compute(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, H] to [n, columns of this rank], in the head's dtype."""
        if not self.sharded:
            return self._model.compute_logits(hidden)
        self._whole_rows = False
        try:
            logits = self._model.compute_logits(hidden)
        finally:
            self._whole_rows = True
        start, stop = self.columns
        return logits[:, : stop - start]  # the rest is padding of the shard

    def compute_whole(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, H] to [n, vocabulary]; gathers, so all ranks of the stage must call it."""
        return self._model.compute_logits(hidden)

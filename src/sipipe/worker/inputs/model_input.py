"""What the two threads of a worker call a prepared iteration: names, counts, and where its rows are.

Written by the preparing thread, read by the device thread, which fills in what only it may build
(attention metadata). The arrays themselves are in the input buffers.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

_EMPTY: NDArray[np.int64] = np.zeros(0, np.int64)
_EMPTY.flags.writeable = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptChunk:
    """Prompt tokens of one request in a batch whose log-probabilities were asked for."""

    req_id: str
    first_row: int
    """Row in the hidden states of the first prompt token that predicts another one."""
    start: int
    """Its position in the prompt; row ``first_row + j`` predicts prompt token ``start + j + 1``."""
    targets: NDArray[np.int32]
    """[n], the prompt tokens that the n rows predict."""
    num_logprobs: int
    """How many of the most likely tokens to report beside the target; -1 for the vocabulary."""
    prompt_len: int
    done: bool
    """Whether this is the last chunk of the prompt."""


class LayerMetadata(dict[str, Any]):
    """Attention metadata by layer. vLLM asks for a layer's where its attention begins, compiled or
    not: the one moment between two layers at which something else can be done."""

    between: Callable[[float], None] | None = None
    """Called then, once a layer, with the share of the layers that is left, this one included."""
    _asked = 0
    _layer = ""

    def __getitem__(self, layer: str) -> Any:
        if self.between is not None and layer != self._layer:
            self.between(1 - self._asked / len(self))
            self._layer, self._asked = layer, self._asked + 1
        return super().__getitem__(layer)


@dataclass(slots=True, kw_only=True)
class ModelInput:
    """A prepared iteration of B requests and ``num_tokens`` tokens."""

    iteration: int
    slot: int
    buffer_set: int
    req_ids: list[str] = field(default_factory=list)
    """[B] in batch order: the scheduling order, except where the attention backend wants decodes
    in front. Not to be changed: it is the slot's own list."""
    num_reqs: int = 0
    num_tokens: int = 0
    max_query_len: int = 0
    """Most tokens of one request in this iteration."""
    max_seq_len: int = 0
    """Most tokens of one request so far, this iteration's included."""
    sampled: NDArray[np.int64] = field(default_factory=lambda: _EMPTY)
    """[n] batch rows that produce a token this iteration, in the order of the scheduling output's
    ``num_scheduled_tokens``; the others are in the middle of their prompt."""
    all_sample: bool = False
    """Whether every token of the batch is the last of a request that samples, in the order of
    ``sampled``: the hidden states are then the rows of the logits as they are."""
    logits_indices: torch.Tensor | None = None
    """[n] int64, the hidden-state row of each sampled request; on the last stage, once ``forward``
    has run, unless ``all_sample``. A copy: the buffers may be written again."""
    prompt_chunks: list[PromptChunk] = field(default_factory=list)
    finished: set[str] = field(default_factory=set)
    """Requests that finished since the scheduling output before."""
    attn_metadata: LayerMetadata = field(default_factory=LayerMetadata)
    """By layer; built by the device thread."""
    slot_mapping: dict[str, torch.Tensor] = field(default_factory=dict)
    """By layer; built by the device thread."""
    lora: tuple[tuple[int, ...], tuple[int, ...], set[Any]] | None = None
    """Adapter of each sampled row, of each token, and the requests for them."""
    blocks_to_zero: list[int] | None = None
    block_copies: Any = None

"""What a prepared iteration is called between the executors: names, counts, and where its rows are.

Written by the CPU executor, read by the device executor, which fills in what only it may build
(attention metadata). The arrays themselves are in the input version.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

_NOBODY: np.ndarray = np.zeros(0, np.int64)
_NOBODY.flags.writeable = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRows:
    """Prompt tokens of one request in a batch whose log-probabilities were asked for."""

    req_id: str
    first_row: int
    """Row in the hidden states of the first prompt token that predicts another one."""
    start: int
    """Its position in the prompt; row ``first_row + j`` predicts prompt token ``start + j + 1``."""
    targets: np.ndarray
    """[n] int32, the prompt tokens that the n rows predict."""
    num_logprobs: int
    """How many of the most likely tokens to report beside the target; -1 for the vocabulary."""
    prompt_len: int
    done: bool
    """Whether this is the last chunk of the prompt."""


@dataclass(slots=True, kw_only=True)
class ModelInput:
    """The light description of a prepared iteration; the arrays are in the input version."""

    iteration: int
    slot: int
    version: int
    req_ids: list[str] = field(default_factory=list)
    """[B] the microbatch in batch order: the scheduling order, except where the attention backend
    wants decodes in front. Not to be changed: it is the slot's own list."""
    num_reqs: int = 0
    num_tokens: int = 0
    num_tokens_padded: int = 0
    """Rows of the hidden states; equals ``num_tokens`` unless a captured graph or sequence
    parallelism needs more."""
    longest_query: int = 0
    """Most tokens of one sequence in this iteration."""
    longest_seq: int = 0
    """Most tokens of one sequence so far, this iteration's included."""
    sampled: np.ndarray = field(default_factory=lambda: _NOBODY)
    """[n] batch rows that produce a token this iteration, in the order of the scheduling output's
    ``num_scheduled_tokens``; the others are in the middle of their prompt."""
    logits_rows: torch.Tensor | None = None
    """[n] int64 on the device, the hidden-state row of each sampled sequence; on the last stage,
    once ``forward`` has run, unless ``all_sample``. A copy: the version may be written again."""
    all_sample: bool = False
    """Whether every token of the batch is the last of a sequence that samples, in the order of
    ``sampled``: the hidden states are then the rows of the logits as they are."""
    steady: bool = False
    """Whether the batch took the steady path: the same sequences, one token each."""
    prompt_rows: list[PromptRows] = field(default_factory=list)
    finished: set[str] = field(default_factory=set)
    """Requests that finished since the scheduling output before."""
    attn_metadata: dict[str, Any] = field(default_factory=dict)
    """By layer; built by the device executor."""
    slot_mapping: dict[str, torch.Tensor] = field(default_factory=dict)
    """By layer; built by the device executor."""
    batch_descriptor: Any = None
    graph_size: int | None = None
    """The captured batch size that the batch is padded to, or None to run it as it is."""
    lora: tuple[tuple[int, ...], tuple[int, ...], set[Any]] | None = None
    """Adapter of each sampled row, of each token, and the requests for them."""
    blocks_to_zero: list[int] | None = None
    block_copies: Any = None

    @property
    def sampled_req_ids(self) -> list[str]:
        """[n] names of the sampled sequences, in the order of the logits' rows."""
        return [self.req_ids[row] for row in self.sampled]

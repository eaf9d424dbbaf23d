"""A prepared iteration, as it goes between the two threads of a worker: names, counts and its set.

The preparing thread writes it, and the device thread reads it. Its arrays are in the set of input
buffers, and belong to this iteration until the set is written again.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(slots=True, kw_only=True)
class ModelInput:
    """A prepared iteration of B requests and ``num_tokens`` tokens."""

    iteration: int
    slot: int
    buffer_set: int
    output: Any
    """vLLM's scheduling output, which both threads only read."""
    awaits: bool = False
    """True while its tokens, one of each request, are still to come."""
    new_rows: list[int] = field(default_factory=list)
    """Rows of the request states of ``output.scheduled_new_reqs``."""
    req_ids: list[str] = field(default_factory=list)
    """Names of the requests, [B], in batch order. It is the slot's own list, so nobody may change it."""
    num_reqs: int = 0
    num_tokens: int = 0
    max_query_len: int = 0
    """Most tokens of one request in this iteration."""
    has_prefill: bool = False
    """True if a request is in its prefill."""
    decode_graph_eligible: bool = True
    """True if every request decodes, or computes like one that does."""
    num_logits: int = 0
    """Rows of logits that the batch could have: one for each request, and one for each draft."""
    logits_rows: NDArray[np.int64] | None = None
    """Rows of logits that tokens are drawn from, [n], in the order of the scheduling output's
    ``num_scheduled_tokens``. The other rows are of requests amid their prefill. None where vLLM
    prepares."""
    samples: int = 0
    """Rows of logits that samplers get."""
    logits_row: int = -1
    """First row of them in BIC-L; -1 if samplers get none."""
    following: NDArray[np.int64] | None = None
    """Token of each request's prompt behind those of this iteration, [B], in batch order; 0 where there
    is none. None if no request is in its prefill, or nobody reads it."""
    state: Any = None
    """State of the batch between vLLM's hooks (:mod:`sipipe.worker.hooks.preparation`)."""
    batch: Any = None
    """vLLM's ``InputBatch`` without padding, if it was made ahead."""

"""What the two threads of a worker call a prepared iteration: names, counts, and where its arrays are.

Written by the preparing thread, read by the device thread. The arrays are in the input buffers, and
belong to this iteration until its set is written again.
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
    """Whether its tokens, one of each request, are still to come."""
    new_rows: list[int] = field(default_factory=list)
    """Rows of the request states of ``output.scheduled_new_reqs``."""
    req_ids: list[str] = field(default_factory=list)
    """[B] in batch order. Not to be changed: it is the slot's own list."""
    num_reqs: int = 0
    num_tokens: int = 0
    max_query_len: int = 0
    """Most tokens of one request in this iteration."""
    has_prefill: bool = False
    """Whether a request is in its prefill."""
    decode_graph_eligible: bool = True
    """Whether every request decodes, or computes like one that does."""
    num_logits: int = 0
    """Rows of logits that the batch could have: one a request, and one a draft."""
    logits_rows: NDArray[np.int64] | None = None
    """[n] those that tokens are drawn from, in the order of the scheduling output's
    ``num_scheduled_tokens``; the others are of requests amid their prefill. None: vLLM prepares."""
    samples: int = 0
    """Rows of logits that samplers get."""
    logits_row: int = -1
    """The first of them in BIC-L; -1: samplers get none."""
    following: NDArray[np.int64] | None = None
    """[B] the token of each request's prompt behind those of this iteration, in batch order; 0 where
    there is none. None: no request is in its prefill, or nobody reads it."""
    state: Any = None
    batch: Any = None
    """vLLM's ``InputBatch`` without padding, if it was made ahead."""

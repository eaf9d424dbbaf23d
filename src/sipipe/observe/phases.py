"""The phases of one iteration that SiPipe records, and the roles of the processes that do.

The same names serve stock vLLM, so that two timelines lie side by side.
"""

from enum import IntEnum
from typing import Literal, get_args

Role = Literal["stage", "sampler", "executor"]
ROLES: tuple[str, ...] = get_args(Role)


class Phase(IntEnum):
    """Work of a process between two instants, for one iteration.

    Trace files store the number: members may be added, never renumbered.
    """

    SCHEDULE = 0
    """Executor: vLLM's scheduler made the scheduling output."""
    DISPATCH = 1
    """Executor: the scheduling output was published to stages and samplers."""
    WAIT_SCHEDULING = 2
    """Stage: nothing to prepare, waiting for the next scheduling output."""
    PREPARE = 3
    """Stage: device inputs of the microbatch were prepared."""
    WAIT_HIDDEN = 4
    """Stage 1 and up: the hidden states of the stage before had not arrived."""
    FORWARD = 5
    """Stage: the device ran the layers of this stage."""
    SEND = 6
    """Stage: the sender was occupied with handing hidden states to the next stage."""
    LOGITS = 7
    """Last stage: the device computed the vocabulary projection, into the memory that the samplers
    read; where that is shared out, every stage: the device computed its part of it."""
    WAIT_LOGITS = 8
    """Sampler: waiting for the logits of the next microbatch."""
    SAMPLE = 9
    """Sampler: tokens were drawn. On a stage: it sampled itself, as stock vLLM does."""
    GATHER = 10
    """Executor: waiting for the tokens of the iteration."""
    UPDATE = 11
    """Executor: vLLM's scheduler took the tokens in."""
    IDLE = 12
    """Executor: there was no request. Of no iteration."""


DEVICE_PHASES = (Phase.FORWARD, Phase.LOGITS)
"""Phases in which the stage's device does the model's work: the device is *busy*."""

COUNTED_PHASES: dict[Role, tuple[Phase, ...]] = {
    "stage": (Phase.FORWARD, Phase.LOGITS, Phase.SEND),
    "sampler": (Phase.SAMPLE,),
    "executor": (Phase.SCHEDULE, Phase.DISPATCH, Phase.UPDATE),
}
"""Phases that keep a process from its next microbatch: what the number of microbatches is
chosen by. A stage's preparation is hidden behind them."""

MAIN_PHASE: dict[Role, Phase] = {
    "stage": Phase.FORWARD,
    "sampler": Phase.SAMPLE,
    "executor": Phase.GATHER,
}
"""The phase of a role that ends a batch; its record brings the batch's sequences and tokens."""

WAIT_PHASES = (
    Phase.WAIT_SCHEDULING, Phase.WAIT_HIDDEN, Phase.WAIT_LOGITS, Phase.GATHER, Phase.IDLE,
)  # fmt: skip
"""Phases in which a process sleeps until something arrives."""

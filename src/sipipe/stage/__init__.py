"""Token-safe execution: inputs of the next microbatch prepared while the device runs this one.

The core is free of vLLM: state machine (:mod:`~sipipe.stage.machine`), queues
(:mod:`~sipipe.stage.communicator`), threads (:mod:`~sipipe.stage.executor`), sequence cache and
kernels, the debug check and the bank of captured graphs. ``docs/execution.md`` explains.
"""

from sipipe.stage.communicator import StageStoppedError, Statistics
from sipipe.stage.executor import StageCalls, StageExecutor
from sipipe.stage.graph_bank import GraphBank
from sipipe.stage.safety import TokenSafety, TokenSafetyError
from sipipe.stage.sequence_cache import Counters, SequenceCache

__all__ = [
    "Counters",
    "GraphBank",
    "SequenceCache",
    "StageCalls",
    "StageExecutor",
    "StageStoppedError",
    "Statistics",
    "TokenSafety",
    "TokenSafetyError",
]

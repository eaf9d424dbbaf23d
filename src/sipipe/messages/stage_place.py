"""Where a stage worker stands in the pipeline."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class StagePlace:
    """Where a worker stands: stage ``stage`` of ``stages``, tensor-parallel rank ``tp_rank``."""

    stage: int
    stages: int
    tp_rank: int
    tp_size: int

    @property
    def rank(self) -> int:
        """The rank that vLLM gives this worker: stages outside, tensor-parallel ranks inside."""
        return self.stage * self.tp_size + self.tp_rank

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.stages - 1

    @property
    def name(self) -> str:
        """How channels and logs name this worker."""
        return f"stage{self.stage}.{self.tp_rank}"

"""Place of a stage worker in the pipeline."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class StagePlace:
    """Place of a worker: stage ``stage`` of ``stages``, tensor-parallel rank ``tp_rank``."""

    stage: int
    stages: int
    tp_rank: int
    tp_size: int

    @property
    def rank(self) -> int:
        """Rank that vLLM gives this worker: stages outside, tensor-parallel ranks inside."""
        return self.stage * self.tp_size + self.tp_rank

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.stages - 1

    @property
    def name(self) -> str:
        """Name of this worker in channels and logs."""
        return f"stage{self.stage}.{self.tp_rank}"

"""Result of a search: engines on pipeline and tensor degrees, ranked, and why others cannot."""

import dataclasses
import math
from typing import NamedTuple

from sipipe.engine.layers.facts import ModelFacts
from sipipe.tools.planner.hardware import Cluster, Engine, FrontEnd
from sipipe.tools.planner.pipeline import Iteration
from sipipe.tools.planner.placement import Memory, Placement
from sipipe.tools.planner.workload import Workload

OURS = "sipipe"
"""SiPipe's key among engines."""


class End(NamedTuple):
    """A choice with every assumed input at one end of its range: with as many sequences, or as many
    as the KV cache then holds, whichever is farther from the choice."""

    throughput: float
    """Output tokens per second."""
    delay: float
    """Mean time per output token, seconds."""
    kv_tokens: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """An engine on a (p, t) that can serve the workload, with its best number of sequences."""

    engine: Engine
    placement: Placement
    cut: tuple[int, ...]
    """Layers of each stage, as the engine cuts them; ``placement`` has them where memory is left."""
    memory: Memory
    kv_loss: float
    """Share of the KV cache's tokens that the uneven cut, or a shared projection, costs."""
    iteration: Iteration
    quickest: End
    slowest: End
    inflight: int
    """Microbatches in flight that the engine is told; fewer are, where there are fewer sequences."""
    batch: int
    """Sequences running at once."""
    lowest_tpot: float
    """TPOT of a single running sequence, seconds: no budget below it can be met."""
    capped_by: str
    samplers: int
    """CPU sampler processes; 0 where the engine samples on the device."""
    communication_bytes: float
    """Bytes that one device sends for one token of every running sequence: C(p, t)."""

    @property
    def p(self) -> int:
        return self.placement.p

    @property
    def t(self) -> int:
        return self.placement.t

    @property
    def vocabulary(self) -> str:
        """Place of the output projection: ``"shared"`` or ``"last"``."""
        return "shared" if self.placement.shares_projection else "last"

    @property
    def throughput(self) -> float:
        """Output tokens per second of the whole deployment: T(p, t)."""
        return self.batch / self.iteration.delay

    @property
    def tpot(self) -> float:
        """Mean time per output token, seconds: D(p, t)."""
        return self.iteration.delay


class Rejected(NamedTuple):
    """An engine that cannot on a (p, t), and why."""

    engine: str
    p: int
    t: int
    reason: str


class Gain(NamedTuple):
    """SiPipe's fastest choice over the other engine's: throughputs divided; at the ends with one
    side's own assumed inputs at their slowest and the other's at their quickest."""

    stated: float
    low: float
    high: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DraftWorth:
    """SiPipe's fastest choice with a draft head on its last stage."""

    drafts: int
    """Drafts of each sequence in each iteration."""
    batch: int
    """Sequences at once: those of the choice, or as many as the head leaves room for."""
    acceptance: float
    """Probability that a draft is right if those before it are."""
    tokens_a_pass: float
    """Tokens that a sequence gets in an iteration."""
    layers: tuple[int, ...]
    """Layers of each stage, as the engine cuts them beside the head."""
    longer: float
    """Time of an iteration, as a multiple of that without drafts."""
    throughput: float
    """Output tokens per second of the whole deployment."""
    tpot: float
    """Mean time per output token, seconds."""
    gain: float
    """Throughput, as a multiple of that without drafts."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    facts: ModelFacts
    cluster: Cluster
    workload: Workload
    front_end: FrontEnd
    choices: tuple[Choice, ...]
    """Choices of both engines that meet the budget, the fastest first."""
    rejected: tuple[Rejected, ...]
    gain: Gain | None = None
    """None where one of the engines has no choice."""
    drafts: DraftWorth | None = None
    """None where nobody asked, or none fit."""

    @property
    def best(self) -> Choice | None:
        """The fastest choice, whichever engine's; None where nothing fits."""
        return self.choices[0] if self.choices else None

    def api_servers(self, choice: Choice, stream_interval: int = 1) -> int:
        """API servers that the streams of ``choice`` need, 1 or more."""
        rate = self.front_end.tokens_per_second(stream_interval)
        return math.ceil(choice.throughput / rate)

    def fastest(self, ours: bool) -> Choice | None:
        """The fastest choice of SiPipe, or of the engine that it is compared with."""
        return next((c for c in self.choices if (c.engine.key == OURS) == ours), None)

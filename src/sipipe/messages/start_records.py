"""What the processes of an engine start from, and what a worker says of itself for its channels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from sipipe.config import SiPipeConfig
from sipipe.messages.logits import LogitsShape
from sipipe.messages.params import LogprobsMode
from sipipe.messages.stage_place import StagePlace
from sipipe.messages.step import Snapshot

if TYPE_CHECKING:
    from vllm.config import VllmConfig

GRACE_SECONDS = 10.0
"""How long a worker may take to end by itself before it is told to, and then made to."""

Path = Literal["sipipe", "device"]
"""Who draws: SiPipe's samplers, or vLLM's sampler (or pooler) on the last stage's device."""


@dataclass(frozen=True, kw_only=True)
class Watched:
    """What every process of an engine is told of its traces and figures."""

    stages: int
    inflight: int
    """Microbatches in flight, m."""
    model: str
    run: str
    """The same in all processes of an engine, different between engines."""
    trace: str | None = None
    trace_bytes: int | None = None
    """That the trace of one process may take; None: no limit."""
    live: str | None = None
    clock_offset_ns: int = 0
    """What to add to this host's wall clock to have the main host's."""


@dataclass(frozen=True, kw_only=True)
class WorkerBoot:
    """What a worker process starts from."""

    vllm_config: VllmConfig
    config: SiPipeConfig
    place: StagePlace
    path: Path
    local_rank: int
    """Among the workers of its host."""
    distributed_init_method: str
    watched: Watched
    of_main_thread: bool
    """Whether the engine's main thread starts it, with which the engine ends."""
    layers: tuple[int, ...]
    cut_evenly: bool
    """Whether ``layers`` is what vLLM gives the stages by itself."""
    parts: tuple[float, ...] = ()
    """Of the output projection, expected of each stage; empty: it is not to be shared out."""
    measures: bool = False
    """Whether it is measured, on the loaded model, if CPU samplers draw; until then vLLM's does."""
    sampler_kernels: bool = True
    """Whether the device has the kernels of vLLM's sampler of its second runner."""
    rows: int
    """Of logits that a microbatch has at most."""
    speculates: bool = False
    """Whether some of them may be behind drafts."""
    cpus: tuple[int, ...] = ()
    """What a GPU's worker is bound to once warmed up; empty: nothing. vLLM binds a CPU's itself."""


@dataclass(frozen=True, kw_only=True)
class ProjectionOffer:
    """A last stage's rank's rows of the output projection, for other stages to take theirs."""

    memory: Any
    """Endpoint of the shared memory: rows [tokens, hidden] from its second page on, in the model's dtype."""
    columns: tuple[int, int]
    """The first of the tokens, and the one behind the last."""
    hidden: int
    scale: float
    soft_cap: float | None


@dataclass(frozen=True, kw_only=True)
class StageDescription:
    """What the engine has to know of a rank to make its channels."""

    logits: LogitsShape | None = None
    """What the stage writes to BIC-L; None on ranks that write no logits."""
    offer: ProjectionOffer | str = ""
    """The last stage's rank's, where the output projection is to be shared out; or why not."""
    reaches: bool = True
    """Whether the rank's GPU can map the memory of the others of its host."""


@dataclass(frozen=True, kw_only=True)
class NGramSettings:
    """How drafts are found in a sequence's own tokens, as vLLM's ``--speculative-config`` has it."""

    num_speculative_tokens: int
    prompt_lookup_max: int
    prompt_lookup_min: int


@dataclass(frozen=True, kw_only=True)
class SuffixSettings:
    """How they are found by Arctic Inference's suffix trees, as vLLM has it."""

    num_speculative_tokens: int
    suffix_decoding_max_tree_depth: int
    suffix_decoding_max_cached_requests: int
    suffix_decoding_max_spec_factor: float
    suffix_decoding_min_token_prob: float


@dataclass(frozen=True, kw_only=True)
class SamplerSettings:
    """What all samplers of an engine are told."""

    vocab_size: int
    logprobs_mode: LogprobsMode
    reasoning: tuple[list[int], list[int], list[int]]
    """Token ids that begin thinking, that are forced to end it, and that a model ends it with."""
    speculation: NGramSettings | SuffixSettings | None = None
    """How drafts are found; None: there are none."""
    watched: Watched


@dataclass(frozen=True, kw_only=True)
class SamplerBoot:
    """What a sampler process starts from; its end of BIC-O it inherits."""

    index: int
    settings: SamplerSettings
    bic_i: Any
    bic_l: Any
    measure: int = 0
    """Rows of a microbatch to measure drawing with, before the first one comes."""
    snapshot: Snapshot | None = None
    """Where the sampler takes the place of one that died: what that one knew and owed."""


SPARE = "spare"
"""Name of a sampler process that has no place yet."""


def sampler_name(index: int) -> str:
    """How channels and logs name a sampler."""
    return f"sampler{index}"

"""Records from which the processes of an engine start, and a worker's description of itself.

The description is what the engine needs to make the worker's channels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from sipipe.config import SiPipeConfig
from sipipe.messages.link import NixlReach, Pair
from sipipe.messages.logits import LogitsShape
from sipipe.messages.params import LogprobsMode
from sipipe.messages.stage_place import StagePlace
from sipipe.messages.step import Snapshot

if TYPE_CHECKING:
    from vllm.config import VllmConfig

GRACE_SECONDS = 10.0
"""Seconds that a worker has to end by itself before it is signalled, and again before it is killed."""

Path = Literal["sipipe", "device"]
"""Drawer of the tokens: SiPipe's samplers, or vLLM's sampler (or pooler) on the last stage's device."""


@dataclass(frozen=True, kw_only=True)
class Watched:
    """Settings of traces and live figures, the same for every process of an engine."""

    stages: int
    inflight: int
    """Microbatches in flight, m."""
    model: str
    run: str
    """Name of this run of the engine: equal in all its processes, different between engines."""
    trace: str | None = None
    """Directory of the trace; None: no trace is written."""
    trace_bytes: int | None = None
    """Bytes that the trace of one process may take; None: no limit."""
    live: str | None = None
    """Path of the page of live figures; None: there is none."""
    clock_offset_ns: int = 0
    """Nanoseconds to add to this host's wall clock to have the main host's."""


@dataclass(frozen=True, kw_only=True)
class WorkerBoot:
    """Record from which a worker process starts."""

    vllm_config: VllmConfig
    config: SiPipeConfig
    place: StagePlace
    path: Path
    local_rank: int
    """Number of the worker among those of its host."""
    distributed_init_method: str
    watched: Watched
    of_main_thread: bool
    """True where the engine's main thread starts the worker, so that the worker can end with it."""
    layers: tuple[int, ...]
    """Decoder layers of each stage."""
    cut_evenly: bool
    """True where ``layers`` is what vLLM gives the stages by itself."""
    parts: tuple[float, ...] = ()
    """Share of the output projection that each stage is expected to compute; empty: the last has all."""
    measures: bool = False
    """True where it is measured on the loaded model whether CPU samplers draw; vLLM's do until then."""
    sampler_kernels: bool = True
    """True where the device has the kernels of the sampler of vLLM's second runner."""
    rows: int
    """Rows of logits that a microbatch has at most."""
    speculates: bool = False
    """True where some of these rows may stand behind drafts."""
    links: tuple[Pair, ...] = ()
    """Link of each socket that the worker inherits, in their order: a link has a socket for each transport
    that may be tried on it."""
    head: Any = None
    """vLLM's ``SpeculativeConfig`` where a head on the last stage proposes drafts; else None."""
    cpus: tuple[int, ...] = ()
    """CPUs that a GPU's worker is bound to once it is warmed up; empty: none. On CPUs vLLM binds it."""

    @property
    def draws(self) -> bool:
        """True if CPU samplers draw the tokens, from the model's warm-up on."""
        return self.path == "sipipe" and not self.measures

    @property
    def own_sampler(self) -> bool:
        """True if a second runner has its own sampler."""
        return self.sampler_kernels and not self.draws

    @property
    def proposes(self) -> bool:
        """True if the runner has the head propose by itself, since vLLM's sampler draws."""
        return self.head is not None and self.path == "device"


@dataclass(frozen=True, kw_only=True)
class ProjectionOffer:
    """Rows of the output projection that a rank of the last stage has, for other stages to take some."""

    memory: Any
    """Endpoint of the shared memory: rows [tokens, hidden] from its second page on, in the model's dtype."""
    columns: tuple[int, int]
    """The first of the tokens, and the one behind the last."""
    hidden: int
    """Columns of a row: the model's hidden size."""
    scale: float
    """Factor of the logits, as vLLM's ``LogitsProcessor`` has it."""
    soft_cap: float | None
    """Bound that the logits are bent to, as vLLM's ``LogitsProcessor`` has it; None: no bound."""


@dataclass(frozen=True, kw_only=True)
class StageDescription:
    """Facts of a rank that the engine needs to make its channels."""

    logits: LogitsShape | None = None
    """Shape of what the rank writes to BIC-L; None where it writes no logits."""
    offer: ProjectionOffer | str = ""
    """Rows of the output projection that a rank of the last stage offers, or why it cannot; else empty."""
    takes: bytes = b""
    """Schema of the hidden states that the rank takes from the stage before, encoded as links announce
    it; empty on the first stage."""
    gpu: str = ""
    """UUID of the rank's GPU, as ``nvidia-smi -L`` lists it: it names the GPU in every process, whatever
    the process's CUDA_VISIBLE_DEVICES; empty where the rank computes on a CPU."""
    nixl: NixlReach = ""
    """Way by which NIXL reaches other hosts from the rank's; empty: it is not installed there."""


@dataclass(frozen=True, kw_only=True)
class NGramSettings:
    """Settings of drafts found in a sequence's own tokens, as in vLLM's ``--speculative-config``."""

    num_speculative_tokens: int
    prompt_lookup_max: int
    prompt_lookup_min: int


@dataclass(frozen=True, kw_only=True)
class SuffixSettings:
    """Settings of drafts found by Arctic Inference's suffix trees, as in vLLM's ``--speculative-config``."""

    num_speculative_tokens: int
    suffix_decoding_max_tree_depth: int
    suffix_decoding_max_cached_requests: int
    suffix_decoding_max_spec_factor: float
    suffix_decoding_min_token_prob: float


@dataclass(frozen=True, kw_only=True)
class SamplerSettings:
    """Settings that all samplers of an engine have."""

    vocab_size: int
    logprobs_mode: LogprobsMode
    reasoning: tuple[list[int], list[int], list[int]]
    """Token ids that begin thinking, that are forced to end it, and that a model ends it with."""
    speculation: NGramSettings | SuffixSettings | None = None
    """Settings of the search for drafts; None: there are no drafts."""
    watched: Watched


@dataclass(frozen=True, kw_only=True)
class SamplerBoot:
    """Record from which a sampler process starts. It inherits its end of BIC-O."""

    index: int
    settings: SamplerSettings
    bic_i: Any
    """Endpoint of BIC-I."""
    bic_l: Any
    """Endpoint of BIC-L."""
    measure: int = 0
    """Rows of a microbatch with which drawing is measured before the first iteration; 0: it is not."""
    snapshot: Snapshot | None = None
    """Sequences and undrawn iterations of a sampler that died and whose place this one takes."""


SPARE = "spare"
"""Name of a sampler process that has no place yet."""


def sampler_name(index: int) -> str:
    """Name of a sampler in channels and logs."""
    return f"sampler{index}"

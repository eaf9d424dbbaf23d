"""What the processes of an engine start from, and the first word of a worker."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, Literal

from sipipe.config import SiPipeConfig
from sipipe.messages.params import LogprobsMode
from sipipe.messages.places import StagePlace
from sipipe.messages.step import Snapshot

if TYPE_CHECKING:
    from vllm.config import VllmConfig

GRACE_SECONDS = 10.0
"""How long a worker may take to end by itself before it is told to, and then made to."""

Path = Literal["sipipe", "vllm"]
"""Who runs the model: SiPipe's runner and samplers, or vLLM's unmodified ones."""


@dataclass(frozen=True, kw_only=True)
class WorkerBoot:
    """What a worker process starts from."""

    vllm_config: VllmConfig
    config: SiPipeConfig
    place: StagePlace
    path: Path
    local_rank: int
    distributed_init_method: str
    slots: int
    run: str
    """The same in all processes of an engine; names it in traces."""
    live: str
    """Where the page of live figures is."""
    times: Any
    """Endpoint of the stage times that the scheduler reads."""
    layers: tuple[int, ...]
    """Decoder layers of each stage."""
    cut_evenly: bool
    """Whether ``layers`` is what vLLM gives the stages by itself."""


@dataclass(frozen=True, kw_only=True)
class Ready:
    """What a worker says when its model is loaded."""

    rank: int


@dataclass(frozen=True, kw_only=True)
class LogitsFormat:
    """What a rank of the last stage writes for each sequence."""

    width: int
    """Columns of all ranks together."""
    dtype: Literal["float32", "float16", "bfloat16"]
    shard: int | None
    """Columns of each rank; None where the first rank has gathered whole rows."""


@dataclass(frozen=True, kw_only=True)
class StageDescription:
    """What the engine has to know of a rank to make its channels."""

    unsupported: str = ""
    """Why SiPipe's stage runner does not take the loaded model; empty: it does."""
    activation_bytes: int
    """Bytes for each token that the link to the next stage has to be ready for."""
    logits: LogitsFormat | None = None
    """None on ranks that write no logits."""


@dataclass(frozen=True, kw_only=True)
class SamplerBoot:
    """What a sampler process starts from; endpoints are the channels' own."""

    index: int
    name: str
    incarnation: int
    bic_i: Any
    bic_l: Any
    bic_o: Any
    vocab_size: int
    layout: Literal["rows", "columns"]
    logprobs_mode: LogprobsMode
    reasoning: tuple[list[int], list[int]]
    """Token ids that begin and end thinking."""
    stages: int
    inflight: int
    run: str
    trace: str | None = None
    live: str | None = None
    times: Any = None
    snapshot: Snapshot | None = None


def run_worker(boot: WorkerBoot, pipe: Connection) -> None:
    """Entry point of a worker's process, by name: the engine does not import the worker's room."""
    importlib.import_module("sipipe.worker.main").worker_main(boot, pipe)

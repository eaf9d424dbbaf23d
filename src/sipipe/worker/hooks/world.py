"""A stage is a world of its own: torch.distributed holds one stage's tensor-parallel ranks only.

Stock vLLM makes one process group over all p x t workers. Here a worker joins a world of its stage's
t ranks, and a stand-in answers what vLLM's models ask of the pipeline group (am I first, am I last,
which layers are mine). Hidden states go through :mod:`sipipe.ipc.link`, so that a dead stage is an
error rather than a hung collective, and no collective ever waits for another stage.

vLLM makes more than a dozen process groups in every worker, and torch gives each gloo group a
device with a thread that wakes up a hundred times a second, whether anything happens or not. Here they
share one.

Rejected: keeping vLLM's world and only bypassing its sends. Start-up then needs all stages to meet, and
gloo or NCCL hold every stage to one life.
"""

import fcntl
import functools
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch.distributed import ProcessGroupGloo, Store, distributed_c10d
from vllm import envs
from vllm.config import VllmConfig
from vllm.distributed import parallel_state
from vllm.distributed.device_communicators.all_reduce_utils import gpu_p2p_access_check
from vllm.distributed.ec_transfer import ensure_ec_transfer_initialized
from vllm.model_executor.determinism.batch_invariant import init_batch_invariance

from sipipe.errors import ResourceError
from sipipe.messages.stage_place import StagePlace

Tensors = Mapping[str, torch.Tensor]

PARTITION = "VLLM_PP_LAYER_PARTITION"
"""Variable by which vLLM's models cut their layers, and a draft head would, too."""
_TUNED = "VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR"
"""Variable by which vLLM finds tuned kernels."""


class PipelineStandIn:
    """Pipeline group that ``get_pp_group()`` returns in a SiPipe worker: a place, and no collectives.

    ``receive`` and ``send`` serve vLLM's own ``Worker.execute_model``, which asks for hidden states
    when it needs them and no earlier, and waits for those it sent before its next step. The worker
    sets both: for a warm-up at first, then to the links.
    """

    def __init__(self, place: StagePlace) -> None:
        self.rank_in_group = place.stage
        self.world_size = place.stages
        self.rank = place.rank
        self.ranks = [stage * place.tp_size + place.tp_rank for stage in range(place.stages)]
        self.local_rank = place.tp_rank
        self.is_first_rank = place.is_first
        self.is_last_rank = place.is_last
        self.receive: Callable[[], dict[str, torch.Tensor]] | None = None
        """Waits for the previous stage's hidden states of the next iteration, and returns them by name."""
        self.send: Callable[[Tensors], Callable[[], None]] | None = None
        """Sends hidden states; returns a function that waits until the tensors may be overwritten."""

    @property
    def last_rank(self) -> int:
        return self.ranks[-1]

    def irecv_tensor_dict(
        self, *_: Any, **__: Any
    ) -> tuple[dict[str, torch.Tensor], list[Any], list[Callable[[], None]]]:
        """Hidden states of the previous stage, in a dictionary that is filled at its first use."""
        tensors: dict[str, torch.Tensor] = {}

        def fill() -> None:
            assert self.receive is not None, "the worker sets it when its model is loaded"
            tensors.update(self.receive())

        return tensors, [], [fill]

    def isend_tensor_dict(self, tensors: Tensors, *_: Any, **__: Any) -> list[Any]:
        """Hand hidden states to the next stage; vLLM waits for all handles but the first."""
        assert self.send is not None, "the worker sets it when its model is loaded"
        return [None, SimpleNamespace(wait=self.send(tensors))]

    @contextmanager
    def graph_capture(self, context: Any = None) -> Iterator[Any]:
        """Prepare nothing for vLLM's capture of CUDA graphs: there is no collective in them."""
        yield context

    def broadcast_object(self, value: Any = None, src: int = 0) -> Any:  # noqa: ARG002
        """Return ``value``: vLLM sends the KV connectors' engine id, which all stages have from one
        configuration."""
        return value

    def destroy(self) -> None:
        """Do nothing at vLLM's tear-down: there is no process group to destroy."""

    def __getattr__(self, name: str) -> Any:
        raise NotImplementedError(
            f"SiPipe's stages share no process group, so the pipeline group has no {name!r}; "
            "a feature that needs a collective across stages must use --distributed-executor-backend mp"
        )


@contextmanager
def stage_world(place: StagePlace, worker_module: ModuleType) -> Iterator[None]:
    """While active, vLLM's worker initialisation makes a world of this stage's ranks only.

    ``init_device`` of vLLM's worker calls ``init_worker_distributed_environment`` by name from its
    module, ``worker_module``; that name is replaced for the duration: no seam is narrower.
    """

    def join_stage(
        vllm_config: VllmConfig,
        rank: int,  # noqa: ARG001 - the pipeline-wide rank; a stage counts its own
        distributed_init_method: str | None = None,
        local_rank: int = -1,
        backend: str = "nccl",
    ) -> None:
        parallel = vllm_config.parallel_config
        init_batch_invariance()
        parallel_state.set_custom_all_reduce(not parallel.disable_custom_all_reduce)
        seconds = parallel.distributed_timeout_seconds
        if not envs.VLLM_SKIP_P2P_CHECK and place.tp_size > 1:
            find_peers()
        parallel_state.init_distributed_environment(
            place.tp_size,
            place.tp_rank,
            distributed_init_method or "env://",
            local_rank,
            backend,
            None if seconds is None else timedelta(seconds=seconds),
        )
        parallel_state.ensure_model_parallel_initialized(place.tp_size, 1, 1, 1)
        group = parallel_state._PP
        parallel_state._PP = PipelineStandIn(place)
        if group is not None:
            group.destroy()
        ensure_ec_transfer_initialized(vllm_config)

    with (
        one_gloo_device(),
        patch.object(worker_module, "init_worker_distributed_environment", join_stage),
    ):
        yield


class _SharingGloo(ProcessGroupGloo):
    """Gloo group on one device that all groups of the process share.

    Args:
        newer: Options that newer releases of torch have, by name.
    """

    def __init__(
        self, store: Store, rank: int, size: int, timeout: timedelta, **newer: Any
    ) -> None:
        options = ProcessGroupGloo._Options()
        options._timeout = timeout
        options._devices = _gloo_devices()
        for name, value in newer.items():
            setattr(options, name, value)
        try:
            super().__init__(store, rank, size, options)
        except RuntimeError as error:
            # Rejected: another try. The other ranks may be connected, or wait for the whole timeout
            # of the group, so that all of them would have to agree on it first.
            raise ResourceError(
                f"the ranks of a stage cannot connect to each other by gloo ({_reason(error)}): one has "
                "ended, GLOO_SOCKET_IFNAME names a wrong interface, or something else has connected "
                "to their ports; start again, and in a container with a network of its own if it "
                "happens again"
            ) from error


def _reason(error: RuntimeError) -> str:
    """gloo's reason, without the place in gloo's source and without gloo's advice."""
    return re.sub(r"\[/\S+\] |\. This is typically.*", "", str(error), flags=re.DOTALL)


@functools.cache
def _gloo_devices() -> list[Any]:
    """Devices of the process's gloo groups: those of ``GLOO_SOCKET_IFNAME``, as torch would make them for
    each group; without it, one on the loopback address.

    Rejected: torch's own default, which listens on the host name's address without authentication. A
    stage's ranks share a host.
    """
    interfaces = os.environ.get("GLOO_SOCKET_IFNAME")
    if interfaces:
        return [ProcessGroupGloo.create_device(interface=name) for name in interfaces.split(",")]
    return [ProcessGroupGloo.create_device(hostname="127.0.0.1")]


@contextmanager
def one_gloo_device() -> Iterator[None]:
    """While active, gloo groups that torch makes share one device."""
    with patch.object(distributed_c10d, "ProcessGroupGloo", _SharingGloo):
        yield


def keep_caches_apart(place: StagePlace) -> None:
    """Have each stage keep its tuned kernels in a directory of its own. Call before vLLM tunes.

    vLLM names the file by the rank in the world, which here is that of one stage: all stages would
    share one, and the next start load another stage's.
    """
    directory = envs.VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR
    if directory is None:
        try:
            made_by = version("flashinfer-python")
        except PackageNotFoundError:
            return
        directory = os.path.join(envs.VLLM_CACHE_ROOT, "flashinfer_autotune_cache", made_by)
    os.environ[_TUNED] = os.path.join(directory, f"stage{place.stage}of{place.stages}")


def find_peers() -> None:
    """Make vLLM's file that says which GPUs reach each other, if it is not there yet.

    Once a world is made, only local rank 0 writes it, which no stage but the first has; before that,
    any process does that misses it. Every rank of a stage calls this: a rank that has read the file
    does not enter vLLM's barrier for those that have not.
    """
    os.makedirs(envs.VLLM_CACHE_ROOT, exist_ok=True)
    with open(os.path.join(envs.VLLM_CACHE_ROOT, "gpu_p2p_access_cache.lock"), "w") as file:
        # wait: `start_timeout`; another stage's worker, which asks each pair of GPUs, or its end
        fcntl.flock(file, fcntl.LOCK_EX)
        gpu_p2p_access_check(0, 0)


def cut_model(layers: tuple[int, ...]) -> None:
    """Have vLLM cut the model by ``layers``, the number of each stage. Call before the model is made.

    It is set in the worker's own environment, so that nothing of the choice stays behind in the process
    that holds the engine.
    """
    os.environ[PARTITION] = ",".join(map(str, layers))

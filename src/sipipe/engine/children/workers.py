"""The stage workers of a host: one process per stage and tensor-parallel rank.

A worker is told, in this order: what ``multiprocessing`` would tell a spawned process, its boot
record, and once all have loaded where BIC-I is. Everything after that travels on BIC-I.
"""

import copy
import os
import socket
import threading
from functools import partial
from multiprocessing import resource_tracker, spawn
from typing import Any

import cloudpickle
from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.utils.network_utils import get_file_store_init_method
from vllm.utils.ompmultiprocessing import OMPProcessManager
from vllm.utils.system_utils import get_mp_context
from vllm.v1.executor.multiproc_executor import set_multiprocessing_worker_envs

from sipipe.engine.children.children import Child, Children
from sipipe.engine.children.forking import begin_worker, may_fork, waiting
from sipipe.engine.layers.cut import layer_split
from sipipe.engine.scheduling.speculation import without_speculation
from sipipe.engine.setup.compatibility import device_may_draw
from sipipe.engine.setup.record import Setup
from sipipe.ipc.rendezvous import remove_rendezvous
from sipipe.ipc.ring.layout import RingEndpoint
from sipipe.messages.stage_place import StagePlace
from sipipe.messages.start_records import Watched, WorkerBoot


class Workers:
    """A host's worker processes. A CPU's are bound to their cores by vLLM, a GPU's bind themselves."""

    def __init__(self, children: Children, setup: Setup, watched: Watched) -> None:
        tp, layers = setup.ranks, setup.layers
        self._children = children
        self._rendezvous = [get_file_store_init_method() for _ in setup.here]
        """One torch.distributed address for the ranks of each stage."""
        self.remove_rendezvous = partial(remove_rendezvous, self._rendezvous)
        """Removes the files through which the ranks found each other; nobody opens them again."""
        self.all: list[Child] = []
        """By rank."""
        set_multiprocessing_worker_envs(len(setup.here) * tp)  # for GPUs alone
        spawned = get_mp_context().get_start_method() == "spawn"
        on_cpu = current_platform.is_cpu()
        with setup.worker_threads():
            threads = OMPProcessManager(_of_this_host(setup))
        places = [
            StagePlace(stage=stage, stages=setup.stages, tp_rank=rank, tp_size=tp)
            for stage in setup.here
            for rank in range(tp)
        ]
        # Local rank r sends to local rank r + tp of the next stage, if that is on this host.
        links = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in places[tp:]]
        # Where the output projection is shared out, each rank of the last stage, all of them being
        # on this host, also sends to the same rank of every other.
        receivers = places[:-tp] if setup.vocabulary.parts else ()
        finals = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in receivers]
        for local_rank, place in enumerate(places):
            ends = [links[local_rank - tp][1]] if local_rank >= tp else []
            ends += [links[local_rank][0]] if local_rank < len(links) else []
            ends += [finals[local_rank][1]] if local_rank < len(finals) else []
            ends += [pair[0] for pair in finals[place.tp_rank :: tp]] if place.is_last else []
            tracking = resource_tracker.getfd()
            assert tracking is not None, "it is started where there is none"
            tracker = os.fdopen(os.dup(tracking), "wb")
            with threads.configure_omp_envs(rank=place.rank, local_rank=local_rank):
                environ = {**os.environ, **waiting(shared=on_cpu and setup.cores.shared)}
            begin = None
            if may_fork(environ) and threads.cpu_lists:  # it is bound
                cpus = threads.cpu_lists[local_rank]
                begin = partial(begin_worker, len(cpus), cpus)
            worker = children.start(
                place.name, "sipipe.worker", ends=[tracker, *ends], environment=environ, begin=begin
            )
            self.all.append(worker)
        for local_rank, (place, worker) in enumerate(zip(places, self.all, strict=True)):
            boot = WorkerBoot(
                vllm_config=without_speculation(setup.vllm_config),
                config=setup.config,
                place=place,
                path=setup.path,
                local_rank=local_rank,
                distributed_init_method=self._rendezvous[local_rank // tp],
                watched=watched,
                of_main_thread=threading.current_thread() is threading.main_thread(),
                layers=layers,
                cut_evenly=layers == layer_split(sum(layers), len(layers)),
                parts=setup.vocabulary.parts,
                measures=setup.measures,
                sampler_kernels=device_may_draw(),
                rows=setup.rows,
                speculates=setup.drafts > 0,
                cpus=() if on_cpu else setup.cores.workers[local_rank // tp][place.tp_rank],
            )
            worker.say(_preparation(f"SiPipeWorker-{place.name}", spawned))
            # Where vLLM forks, nothing has been imported again in the engine's own process, so
            # what the user's main module defines travels by value; as it came from another host.
            worker.say(boot if spawned and not setup.node else cloudpickle.dumps(boot))

    @property
    def names(self) -> list[str]:
        """As readers of BIC-I, by rank."""
        return [worker.name for worker in self.all]

    def wait_loaded(self, bus: RingEndpoint, deadline: float) -> None:
        """Wait until all have loaded the model; tell them where BIC-I is. Raises Exception: what
        a worker raised first. WorkerDiedError: a process ended. StallError: ``deadline`` passed."""
        self._children.wait_ready(self.names, deadline)
        for worker in self.all:
            worker.say(bus)
        self.remove_rendezvous()


def _of_this_host(setup: Setup) -> VllmConfig:
    """vLLM's configuration for its thread binding, with the ranks of this host alone."""
    config = copy.copy(setup.vllm_config)
    config.parallel_config = copy.copy(config.parallel_config)
    config.parallel_config.world_size = len(setup.here) * setup.ranks
    return config


def _preparation(name: str, spawned: bool) -> dict[str, Any]:
    """What ``multiprocessing`` tells a spawned process, for the same effect. The user's main module is
    imported again only where vLLM spawns: a script that vLLM may fork needs no ``if __name__ ==
    "__main__"``, and would start a second engine."""
    data = spawn.get_preparation_data(name)
    data["authkey"] = bytes(data["authkey"])  # pickles only inside of Process.start() otherwise
    if not spawned:
        data = {key: value for key, value in data.items() if not key.startswith("init_main")}
    return data

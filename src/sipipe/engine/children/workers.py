"""The stage workers of a host: one process per stage and tensor-parallel rank.

A worker receives three messages on its control pipe, in this order: what ``multiprocessing`` sends
to a process that it spawns, its start record, and, once all workers have loaded the model, the
endpoint of BIC-I. After that only questions what it does come there, and requests for drafts.
"""

import copy
import os
import socket
import threading
from collections.abc import Sequence
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

from sipipe import layer_names
from sipipe.engine.children.children import Child, Children
from sipipe.engine.children.forking import begin_worker, may_fork, waiting
from sipipe.engine.layers.cut import layer_split
from sipipe.engine.setup.compatibility import device_may_draw
from sipipe.engine.setup.draft_head import head_of
from sipipe.engine.setup.record import Setup
from sipipe.engine.setup.speculative_config import without_speculation
from sipipe.gpu_slices import slice_for_worker
from sipipe.ipc.rendezvous import remove_rendezvous
from sipipe.ipc.ring.layout import RingEndpoint
from sipipe.messages.link import DeviceKind, Pair, transports
from sipipe.messages.stage_place import StagePlace
from sipipe.messages.start_records import Watched, WorkerBoot


class Workers:
    """A host's worker processes, started by the constructor. vLLM binds those that compute on a CPU to
    their cores; those of a GPU bind themselves."""

    def __init__(self, children: Children, setup: Setup, watched: Watched) -> None:
        self._children = children
        self._setup = setup
        self._rendezvous = [get_file_store_init_method() for _ in setup.host_stages]
        """Addresses of torch.distributed, one for the ranks of each stage."""
        self.remove_rendezvous = partial(remove_rendezvous, self._rendezvous)
        """Removes the files through which the ranks found each other; nobody opens them again."""
        set_multiprocessing_worker_envs(
            len(setup.host_stages) * setup.ranks
        )  # it does so on GPUs only
        places = [
            StagePlace(stage=stage, stages=setup.stages, tp_rank=rank, tp_size=setup.ranks)
            for stage in setup.host_stages
            for rank in range(setup.ranks)
        ]
        device: DeviceKind = "cpu" if current_platform.is_cpu() else "cuda"
        self._link_ends = _link_ends(
            places,
            shares=bool(setup.vocabulary.parts),
            each=len(transports(setup.config.transport, device)),
        )
        """Sockets of links that each rank inherits, with the pair of ranks that the link joins."""
        self.all: list[Child] = self._start_all(places)
        """The processes, by local rank."""
        # All are started before the first gets its start record. A record that fills the pipe's buffer
        # waits until its worker reads, and the others import meanwhile.
        spawned = get_mp_context().get_start_method() == "spawn"
        for local_rank, (place, worker) in enumerate(zip(places, self.all, strict=True)):
            boot = self._boot(local_rank, place, watched)
            worker.say(_preparation(f"SiPipeWorker-{place.name}", spawned))
            # Where vLLM forks, a worker imports the user's main module no more, so what that defines
            # travels by value. So does what came from another host.
            worker.say(boot if spawned and not setup.node else cloudpickle.dumps(boot))

    def _start_all(self, places: Sequence[StagePlace]) -> list[Child]:
        """Start the processes of ``places`` in order, each with its threads' environment."""
        setup = self._setup
        with setup.worker_threads():
            threads = OMPProcessManager(_config_of_this_host(setup))
        shared = current_platform.is_cpu() and setup.cores.shared
        replica = setup.vllm_config.parallel_config.data_parallel_index
        before = replica * len(places)  # workers of other replicas on this host
        workers = []
        for local_rank, place in enumerate(places):
            descriptor = resource_tracker.getfd()
            assert descriptor is not None, "it starts the tracker where there is none"
            tracker = os.fdopen(os.dup(descriptor), "wb")
            with threads.configure_omp_envs(rank=place.rank, local_rank=local_rank):
                environment = {**os.environ, **waiting(shared=shared)}
            environment |= slice_for_worker(before + local_rank, setup.config.devices)
            begin = None
            if may_fork(environment) and threads.cpu_lists:  # its threads are bound
                cpus = threads.cpu_lists[local_rank]
                begin = partial(begin_worker, len(cpus), cpus)
            elif current_platform.is_cpu():
                # A fork has imported vLLM already, and keeps the names that it has.
                environment = layer_names.variables(setup.stages) | environment
            worker = self._children.start(
                place.name,
                "sipipe.worker",
                ends=[tracker, *(sock for _, sock in self._link_ends[place.rank])],
                environment=environment,
                begin=begin,
            )
            workers.append(worker)
        return workers

    def _boot(self, local_rank: int, place: StagePlace, watched: Watched) -> WorkerBoot:
        """The record from which the worker of ``place`` starts."""
        setup = self._setup
        layers = setup.layers
        local_stage = local_rank // setup.ranks
        on_cpu = current_platform.is_cpu()
        config = setup.vllm_config
        head = head_of(config)
        # Where vLLM's own sampler draws, or may, its runner verifies a head's drafts on the last stage.
        verifies = head is not None and (setup.path == "device" or setup.measures)
        if not (verifies and place.is_last):
            config = without_speculation(config)
        return WorkerBoot(
            vllm_config=config,
            config=setup.config,
            place=place,
            path=setup.path,
            local_rank=local_rank,
            distributed_init_method=self._rendezvous[local_stage],
            watched=watched,
            of_main_thread=threading.current_thread() is threading.main_thread(),
            layers=layers,
            cut_evenly=layers == layer_split(sum(layers), len(layers)),
            parts=setup.vocabulary.parts,
            measures=setup.measures,
            sampler_kernels=device_may_draw(),
            rows=setup.rows,
            speculates=setup.drafts > 0,
            links=tuple(pair for pair, _ in self._link_ends[place.rank]),
            head=head,
            cpus=() if on_cpu else setup.cores.workers[local_stage][place.tp_rank],
        )

    @property
    def names(self) -> list[str]:
        """Names of the workers, by local rank, which they also have as readers of BIC-I."""
        return [worker.name for worker in self.all]

    def wait_loaded(self, bus: RingEndpoint, deadline: float) -> None:
        """Wait until all have loaded the model, and tell them where BIC-I is.

        Raises Exception: what a worker raised first. WorkerDiedError: a process ended. StallError:
        ``deadline`` (``time.monotonic()``) passed."""
        self._children.wait_ready(self.names, deadline)
        for worker in self.all:
            worker.say(bus)
        self.remove_rendezvous()


def _link_ends(
    places: Sequence[StagePlace], *, shares: bool, each: int
) -> dict[int, list[tuple[Pair, socket.socket]]]:
    """Sockets over which the workers of this host set up their links (:mod:`sipipe.worker.links`): by
    rank those that it inherits, each with the pair of ranks that its link joins.

    Args:
        places: the workers of this host, by local rank.
        shares: True where the output projection is shared out. All ranks of the last stage are on this
            host then, and each also sends its hidden states to the same rank of every other stage.
        each: sockets of a link, one for each transport that may be tried on it. The one of a transport
            that failed may have half a conversation in it, or be held by a thread that hangs.
    """
    ranks = places[0].tp_size
    first = places[0].rank
    last_stage = (places[0].stages - 1) * ranks
    pairs = [(place.rank - ranks, place.rank) for place in places if place.rank - ranks >= first]
    if shares:
        receivers = [place for place in places if not place.is_last]
        pairs += [(last_stage + place.tp_rank, place.rank) for place in receivers]
    ends: dict[int, list[tuple[Pair, socket.socket]]] = {place.rank: [] for place in places}
    for sender, receiver in pairs:
        for _ in range(each):
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            ends[sender].append(((sender, receiver), ours))
            ends[receiver].append(((sender, receiver), theirs))
    return ends


def _config_of_this_host(setup: Setup) -> VllmConfig:
    """vLLM's configuration for its thread binding, with the ranks of this host alone."""
    config = copy.copy(setup.vllm_config)
    config.parallel_config = copy.copy(config.parallel_config)
    config.parallel_config.world_size = len(setup.host_stages) * setup.ranks
    return config


def _preparation(name: str, spawned: bool) -> dict[str, Any]:
    """The message that ``multiprocessing`` sends to a process that it spawns, for the same effect. The
    user's main module is imported again only where vLLM spawns: a script that vLLM may fork needs no
    ``if __name__ == "__main__"``, and would start a second engine."""
    data = spawn.get_preparation_data(name)
    data["authkey"] = bytes(data["authkey"])  # its own class pickles inside of Process.start() only
    if not spawned:
        data = {key: value for key, value in data.items() if not key.startswith("init_main")}
    return data

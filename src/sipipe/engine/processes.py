"""Stage worker processes as the executor sees them: start, ready, replies, death, end.

A worker has one duplex pipe with the executor. It carries, in order: READY and what the worker
learned while loading its model, the channel endpoints, OPEN; then replies only. Calls do not go
through the pipe: they are CONTROL messages of BIC-I, in order with the iterations.

A worker that loses the pipe ends itself, so that a killed executor leaves nothing behind; the
executor sees a dead worker through its sentinel.
"""

from __future__ import annotations

import multiprocessing.connection
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.utils.ompmultiprocessing import OMPProcessManager
from vllm.utils.system_utils import get_mp_context

from sipipe.config import SiPipeConfig
from sipipe.engine.layers.cut import layer_split
from sipipe.errors import StallError, WorkerDiedError
from sipipe.ipc.memory import Endpoint
from sipipe.messages.boots import GRACE_SECONDS, Path, WorkerBoot, run_worker
from sipipe.messages.places import StagePlace

logger = init_logger(f"vllm.{__name__}")


class StageProcess:
    """One worker process."""

    def __init__(self, place: StagePlace, process: BaseProcess, pipe: Connection) -> None:
        self.place = place
        self.process = process
        self.pipe = pipe

    @property
    def name(self) -> str:
        return self.place.name

    def receive(self, deadline: float) -> Any:
        """The next message of the worker, before ``deadline`` (``time.monotonic()``).

        Raises:
            WorkerDiedError: the process ended first.
            StallError: the deadline passed.
            Exception: what the worker raised while it started.
        """
        left = max(0.0, deadline - time.monotonic())
        ready = multiprocessing.connection.wait([self.pipe, self.process.sentinel], left)
        if self.pipe in ready:
            try:
                message = self.pipe.recv()
            except (EOFError, OSError):
                message = None
            if isinstance(message, Exception):
                raise message
            if message is not None:
                return message
            self.process.join(1.0)
        if not self.process.is_alive():
            raise WorkerDiedError(
                f"worker {self.name} (pid {self.process.pid}) ended while starting, exit code "
                f"{self.process.exitcode}: see its log lines above"
            )
        raise StallError(
            f"worker {self.name} (pid {self.process.pid}) was not ready in time: raise "
            '"start_timeout" in the sipipe config if its model takes longer to load'
        )


def start_workers(
    vllm_config: VllmConfig,
    config: SiPipeConfig,
    path: Path,
    *,
    slots: int,
    run: str,
    live: str,
    times: Endpoint,
    layers: tuple[int, ...],
    init_methods: Sequence[str],
) -> list[StageProcess]:
    """Start one process per stage and tensor-parallel rank, each bound to its cores.

    ``init_methods`` has one torch.distributed address per stage.
    """
    parallel = vllm_config.parallel_config
    tp, stages = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    context = get_mp_context()
    threads = OMPProcessManager(vllm_config)
    workers: list[StageProcess] = []
    try:
        for rank in range(tp * stages):
            place = StagePlace(stage=rank // tp, stages=stages, tp_rank=rank % tp, tp_size=tp)
            boot = WorkerBoot(
                vllm_config=vllm_config,
                config=config,
                place=place,
                path=path,
                local_rank=rank,
                distributed_init_method=init_methods[place.stage],
                slots=slots,
                run=run,
                live=live,
                times=times,
                layers=layers,
                cut_evenly=layers == layer_split(sum(layers), len(layers)),
            )
            ours, theirs = context.Pipe(duplex=True)
            process = context.Process(
                target=run_worker,
                args=(boot, theirs),
                name=f"SiPipeWorker-{place.name}",
                daemon=True,
            )
            with threads.configure_omp_envs(rank=rank, local_rank=rank):
                process.start()
            theirs.close()
            workers.append(StageProcess(place, process, ours))
    except BaseException:
        stop_workers(workers)
        raise
    return workers


def stop_workers(workers: Sequence[StageProcess]) -> None:
    """End all workers: close their pipes, then SIGTERM, then SIGKILL; returns when all are gone."""
    for worker in workers:
        worker.pipe.close()
    for signal_it in (None, BaseProcess.terminate, BaseProcess.kill):
        alive = [worker for worker in workers if worker.process.is_alive()]
        if signal_it is not None and alive:
            logger.warning(
                "%s is still running: %s",
                ", ".join(worker.name for worker in alive),
                "sending SIGTERM" if signal_it is BaseProcess.terminate else "sending SIGKILL",
            )
            for worker in alive:
                signal_it(worker.process)
        deadline = time.monotonic() + GRACE_SECONDS
        for worker in alive:
            worker.process.join(max(0.0, deadline - time.monotonic()))

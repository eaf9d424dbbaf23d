"""The process of one stage worker: load the model, open the channels, follow BIC-I.

Who runs here
    The communicator reads BIC-I: it hands iterations to the CPU executor's thread
    (:mod:`sipipe.worker.executor`) and runs control calls itself, with both executors idle. It is
    the main thread until the data plane is open, and a thread of its own from then on; then the
    main thread, which loaded and compiled the model, is the device executor. The thread
    of :class:`sipipe.ipc.parent.Parent` says for the stall report what the worker does, and ends
    the process with the engine.
Guarantees
    Every iteration of BIC-I is run once, in order, by every rank of every stage; CONTROL calls
    run between iterations, on a worker with no iteration in flight. An exception in an iteration
    is sent to the executor, which stops the engine with it; nothing is retried.
Relies on
    BIC-I's order, which is the only order there is between stages: no stage waits for another
    except through hidden states and BIC-I.
"""

from __future__ import annotations

import multiprocessing.util
import os
import pickle
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import cloudpickle
from vllm.config import set_current_vllm_config
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.utils.system_utils import decorate_logs, set_process_title
from vllm.v1.outputs import AsyncModelRunnerOutput
from vllm.v1.worker.worker_base import WorkerWrapperBase

from sipipe.ipc.errors import ChannelClosed
from sipipe.ipc.parent import Parent
from sipipe.ipc.rendezvous import remove_rendezvous
from sipipe.ipc.ring.dispatch import DispatchReader
from sipipe.ipc.stage_times import PhaseCounter, StageTimes
from sipipe.messages.boots import WorkerBoot
from sipipe.messages.header import Header, Kind, decode_header
from sipipe.messages.replies import IterationReport, Ready, Reply
from sipipe.observe.live import LivePage
from sipipe.observe.phases import COUNTED_PHASES, MAIN_PHASE, Phase
from sipipe.observe.recorder import PhaseSink, open_recorder
from sipipe.worker.communicator import StageStoppedError
from sipipe.worker.world import cut_model

if TYPE_CHECKING:
    from sipipe.worker.loop import StageLoop

logger = init_logger(f"vllm.{__name__}")


def worker_main(boot: WorkerBoot, parent: Parent, sockets: Sequence[socket.socket]) -> None:
    """Entry point of the process; returns when the executor closes the channels."""
    process = None
    try:
        process = WorkerProcess(boot, parent, sockets)
        process.load()
        process.serve()
    except (SystemExit, ChannelClosed):
        pass
    except Exception as error:
        if parent.let_end():
            logger.exception("worker %s failed", boot.place.name)
            _say_failure(parent, error)
    finally:
        parent.let_end()
        if process is not None:
            process.close()
    # Everything is released. Taking the interpreter down with torch in it takes seconds, which
    # vLLM's front end does not give; what multiprocessing would still do is done here.
    multiprocessing.util._exit_function()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _say_failure(parent: Parent, error: Exception) -> None:
    try:
        parent.say(error)
    except Exception:  # it cannot be pickled: say what it was
        parent.say(RuntimeError("".join(traceback.format_exception_only(error)).strip()))


def _sinks(boot: WorkerBoot) -> list[PhaseSink]:
    """What gets this rank's phases besides the trace; a stage's times are its first rank's."""
    place = boot.place
    sinks: list[PhaseSink] = [
        LivePage.attach(boot.live).writer("stage", index=place.stage, rank=place.tp_rank)
    ]
    if place.tp_rank == 0:
        line = StageTimes.attach(boot.times, stages=place.stages).stage(place.stage)
        sinks.append(PhaseCounter(line, COUNTED_PHASES["stage"], MAIN_PHASE["stage"]))
    return sinks


class WorkerProcess:
    """What :func:`worker_main` drives."""

    def __init__(self, boot: WorkerBoot, parent: Parent, sockets: Sequence[socket.socket]) -> None:
        self._boot = boot
        self._sockets = sockets
        self._parent = parent
        self._reader: DispatchReader | None = None
        self._loop: StageLoop | None = None
        self._wrapper: WorkerWrapperBase | None = None
        self._error: Exception | None = None
        self._doing = "is loading its model"
        parent.doing = self._what_it_does
        # The engine removes it once all ranks have joined, unless it was killed before that.
        parent.on_gone = partial(remove_rendezvous, [boot.distributed_init_method])
        self._recorder = open_recorder(
            boot.config.trace,
            "stage",
            boot.place.stage,
            boot.place.tp_rank,
            stages=boot.place.stages,
            layers=boot.layers[boot.place.stage],
            inflight=boot.slots,
            run=boot.run,
            model=str(boot.vllm_config.model_config.model),
            sinks=_sinks(boot),
        )

    def load(self) -> None:
        """Load the model shard of this stage and rank, and report READY."""
        boot, place = self._boot, self._boot.place
        title = f"Worker_PP{place.stage}" + (f"_TP{place.tp_rank}" if place.tp_size > 1 else "")
        set_process_title(name=title)
        decorate_logs(title)
        if not boot.cut_evenly:
            cut_model(boot.layers)
        wrapper = WorkerWrapperBase(rpc_rank=0, global_rank=place.rank)
        self._wrapper = wrapper
        wrapper.init_worker(
            [
                {
                    "vllm_config": boot.vllm_config,
                    "local_rank": boot.local_rank,
                    "rank": place.rank,
                    "distributed_init_method": boot.distributed_init_method,
                    "is_driver_worker": place.tp_rank == 0,
                }
            ]
        )
        # Only now: vLLM's CPU platform looks through every module loaded so far for Triton
        # kernels, and stumbles over llvmlite, which Numba brings.
        from sipipe.worker.loop import StageLoop

        wrapper.worker.place = place
        wrapper.init_device()
        wrapper.load_model()
        current_platform.update_block_size_for_backend(boot.vllm_config)
        self._loop = StageLoop(boot, wrapper.worker, self._sockets, self._report, self._recorder)
        self._parent.say(Ready())

    def serve(self) -> None:
        """Follow BIC-I until it is closed."""
        self._reader = DispatchReader.open(self._parent.receive(), self._boot.place.name)
        assert self._loop is not None
        while self._loop.executor is None:
            self._follow_one()
        follower = threading.Thread(target=self._follow, name="SiPipeCommunicator", daemon=True)
        follower.start()
        self._loop.executor.run_device()
        follower.join()
        if self._error is not None:
            raise self._error

    def _follow(self) -> None:
        """The communicator's loop, once it has a thread of its own."""
        assert self._loop is not None
        assert self._loop.executor is not None
        try:
            while True:
                self._follow_one()
        except (ChannelClosed, StageStoppedError):
            pass
        except Exception as error:  # raised again by the main thread
            self._error = error
        finally:
            self._loop.executor.close()

    def _follow_one(self) -> None:
        """Do what the next message asks."""
        assert self._reader is not None
        assert self._loop is not None
        began = time.monotonic_ns()
        with self._reader.receive() as message:
            header = decode_header(message.parts[0])
            if header.kind is Kind.GRAMMAR:
                return
            body, *buffers = [bytes(part) for part in message.parts[2:]]
        if header.kind is Kind.CONTROL:
            self._call(header, partial(pickle.loads, body, buffers=buffers))
            return
        output = pickle.loads(body, buffers=buffers)
        assert self._loop.executor is not None, "an iteration came before the data plane was open"
        self._recorder.record(
            Phase.WAIT_SCHEDULING, header.number, header.slot, began, time.monotonic_ns()
        )
        self._loop.executor.submit(header.number, header.slot, output)

    def close(self) -> None:
        """Release channels, links and vLLM's worker."""
        if self._loop is not None:
            self._loop.close()
        # After an error the communicator may still sleep in the reader: leave that to the kernel.
        if self._reader is not None and self._error is None:
            self._reader.close()
        self._recorder.close()
        if self._loop is not None and self._wrapper is not None:
            from vllm.distributed.parallel_state import (
                destroy_distributed_environment,
                destroy_model_parallel,
            )

            with suppress(Exception):
                self._wrapper.shutdown()
            with suppress(Exception):
                destroy_model_parallel()
                destroy_distributed_environment()

    def _report(self, iteration: int, prompt_logprobs: dict[str, Any]) -> None:
        self._parent.say(IterationReport(iteration=iteration, prompt_logprobs=prompt_logprobs))

    def _call(self, header: Header, content: Callable[[], Any]) -> None:
        """Run one control call, and answer it where an answer is wanted.

        Whatever is wrong with the call, its arguments or its result is an error of the call only.
        """
        assert self._loop is not None
        self._loop.drain()
        answers = True
        try:
            method, args, kwargs, only = content()
            answers = only is None or only == self._boot.place.rank
            self._doing = f"runs {method if isinstance(method, str) else 'a function'}"
            value = self._find(method)(*args, **kwargs)
            if isinstance(value, AsyncModelRunnerOutput):
                value = value.get_output()
            reply = Reply(call=header.number, value=pickle.dumps(value) if answers else b"")
        except Exception as error:
            logger.exception("worker %s failed in a call", self._boot.place.name)
            reply = Reply(call=header.number, error=str(error) or repr(error))
        finally:
            self._doing = "waits for a call"
        if answers:
            self._parent.say(reply)

    def _find(self, method: str | bytes) -> Callable[..., Any]:
        assert self._wrapper is not None
        assert self._loop is not None
        if isinstance(method, bytes):
            return partial(cloudpickle.loads(method), self._wrapper.worker)
        if method.startswith("sipipe:"):
            return self._with_config(getattr(self._loop, method.removeprefix("sipipe:")))
        if method == "execute_model":
            return partial(self._loop.run_stock, self._wrapper.execute_model)
        return getattr(self._wrapper, method)

    def _with_config(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def inside(*args: Any, **kwargs: Any) -> Any:
            with set_current_vllm_config(self._boot.vllm_config):
                return call(*args, **kwargs)

        return inside

    def _what_it_does(self) -> str:
        doing = self._loop.doing() if self._loop is not None else None
        return doing or self._doing

"""The process of one stage worker: load the model, open the channels, follow BIC-I.

Who runs here
    One thread follows BIC-I: it prepares iterations and runs control calls. It is the main thread
    until the data plane is open, and the *preparing thread* from then on; then the main thread is
    the *device thread* (:mod:`sipipe.worker.double_buffer`). The thread of
    :class:`sipipe.ipc.parent.Parent` answers, and ends the process with the engine.
Guarantees
    Every iteration of BIC-I is run once, in order, by every rank of every stage; control calls
    run between iterations. An iteration's exception stops the engine, a call's is its answer.
Relies on
    BIC-I's order, which is the only order there is between stages: no stage waits for another
    except through hidden states and BIC-I.
"""

from __future__ import annotations

import gc
import pickle
import socket
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from tqdm import tqdm
from vllm.distributed.parallel_state import destroy_distributed_environment, destroy_model_parallel
from vllm.logger import configure_logging, init_logger
from vllm.platforms import current_platform
from vllm.utils.import_utils import import_pynvml
from vllm.utils.system_utils import decorate_logs, set_process_title
from vllm.v1.worker.worker_base import WorkerWrapperBase

from sipipe.errors import DamagedError, WorkerDiedError, remedy
from sipipe.gpu_slices import find_gpus_of_slices
from sipipe.ipc.errors import ChannelClosed
from sipipe.ipc.exit_now import exit_now, no_collections
from sipipe.ipc.parent import Parent, end_with_parent_thread
from sipipe.ipc.rendezvous import remove_rendezvous
from sipipe.ipc.ring.dispatch import DispatchReader
from sipipe.messages.calls import Request
from sipipe.messages.drafts import decode_request
from sipipe.messages.header import Header, Kind, decode_header
from sipipe.messages.replies import Ready, Reply
from sipipe.messages.start_records import WorkerBoot
from sipipe.observe.phases import Phase
from sipipe.observe.recorder import record_process
from sipipe.start_log import leave_out_what_is_wrong, shorten
from sipipe.worker.hooks.world import cut_model, keep_caches_apart

if TYPE_CHECKING:
    from sipipe.worker.double_buffer import DoubleBuffer
    from sipipe.worker.loaded_stage import LoadedStage

logger = init_logger(f"vllm.{__name__}")


def worker_main(boot: WorkerBoot, parent: Parent, sockets: Sequence[socket.socket]) -> None:
    """Run the worker until the engine closes the channels, then end the process."""
    main = None
    stage = None
    # tqdm's own lock would be a semaphore of the system's, which a killed process leaves behind.
    tqdm.set_lock(threading.RLock())  # wait: held while a line is written; as that is
    try:
        main = Main(boot, parent, sockets)
        stage = main.load()
        main.serve(stage)
    except (SystemExit, ChannelClosed):
        pass
    except Exception as error:
        if parent.let_end():
            if stage is not None:
                logger.exception("worker %s failed", boot.place.name)
            else:
                _log_load(boot.place.name, error)
            _say_failure(parent, error)
    finally:
        parent.let_end()
        if main is not None:
            with no_collections():
                main.close()
    exit_now(0)  # everything is released


def _log_load(name: str, error: Exception) -> None:
    """Log in one line why the model cannot be loaded. Most often a file or an option is the reason, and
    not the code that stumbled."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    logger.error(
        "worker %s cannot load its layers: %s: %s (%s:%s; VLLM_LOGGING_LEVEL=DEBUG shows the way "
        "there)",
        name,
        type(error).__name__,
        error,
        frame.filename,
        frame.lineno,
    )
    logger.debug("worker %s", name, exc_info=error)


def _say_failure(parent: Parent, error: Exception) -> None:
    """Send ``error`` to the engine, or its text where it cannot be pickled."""
    try:
        parent.say(error)
    except Exception:
        parent.say(RuntimeError("".join(traceback.format_exception_only(error)).strip()))


class Main:
    """The worker's state, which :func:`worker_main` takes through its life."""

    def __init__(self, boot: WorkerBoot, parent: Parent, sockets: Sequence[socket.socket]) -> None:
        self._boot = boot
        self._sockets = sockets
        self._parent = parent
        self._reader: DispatchReader | None = None
        self._stage: LoadedStage | None = None
        self._wrapper: WorkerWrapperBase | None = None
        self._preparing: threading.Thread | None = None
        self._planned = -1
        """Iteration that was planned last: published before its tokens were known."""
        self._call = "is loading its model"
        """Predicate on what runs outside of iterations, for the report of a stall; empty between
        calls."""
        parent.doing = self._doing
        parent.urgent = self._draft
        # The engine removes the file once all ranks have joined, unless it is killed before that.
        parent.on_gone = partial(remove_rendezvous, [boot.distributed_init_method])
        stage = boot.place.stage
        self._recorder = record_process(
            boot.watched, "stage", stage, boot.place.tp_rank, boot.layers[stage]
        )

    def load(self) -> LoadedStage:
        """Load the model's shard of this stage and rank, and report READY."""
        boot = self._boot
        place = boot.place
        title = f"Worker_PP{place.stage}"
        if place.tp_size > 1:
            title += f"_TP{place.tp_rank}"
        configure_logging(boot.vllm_config.logging_config)
        leave_out_what_is_wrong()
        if boot.vllm_config.announced:
            shorten(first=boot.local_rank == 0)
            # A worker's shard is its own, but bars of several on one terminal are one another's noise.
            boot.vllm_config.load_config.use_tqdm_on_load = boot.local_rank == 0
        set_process_title(name=title)
        decorate_logs(title)
        keep_caches_apart(place)
        if not boot.cut_evenly:
            cut_model(boot.layers)
        find_gpus_of_slices(current_platform, import_pynvml)
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
        worker: Any = wrapper.worker
        worker.boot = boot  # vLLM makes the worker: it cannot be an argument of its constructor
        wrapper.init_device()
        # Imported only now, because these bring Numba. vLLM's CPU platform looks through every module
        # that is loaded by now for Triton kernels, and fails at one of Numba's llvmlite.
        from sipipe.worker.hooks.stage_tensors import check_reads
        from sipipe.worker.loaded_stage import LoadedStage
        from sipipe.worker.sampled_stage import Surroundings

        wrapper.load_model()
        check_reads(worker.model_runner)
        current_platform.update_block_size_for_backend(boot.vllm_config)
        around = Surroundings(
            boot=boot,
            wrapper=wrapper,
            report=self._parent.say,
            recorder=self._recorder,
            fail=partial(_say_failure, self._parent),
        )
        self._stage = LoadedStage(around, self._sockets)
        if boot.of_main_thread:
            end_with_parent_thread()
        self._call = ""
        self._parent.say(Ready())
        return self._stage

    def serve(self, stage: LoadedStage) -> None:
        """Follow BIC-I until it is closed. Once iterations can run, the main thread is the device
        thread, and another one follows BIC-I."""
        endpoint = self._parent.receive()
        reader = DispatchReader(endpoint, self._boot.place.name)
        self._reader = reader
        while stage.double_buffer is None:
            self._follow_one(reader, stage)
        gc.collect()
        gc.freeze()  # so that no collection looks through the model while requests wait
        gc.enable()
        follow = partial(self._follow, reader, stage, stage.double_buffer)
        self._preparing = threading.Thread(target=follow, name="SiPipePreparing", daemon=True)
        self._preparing.start()
        stage.double_buffer.run()
        self._preparing.join()  # wait: none: it has closed the double buffer, its last act; its end

    def _follow(
        self, reader: DispatchReader, stage: LoadedStage, double_buffer: DoubleBuffer
    ) -> None:
        """Run the preparing thread: follow BIC-I until it is closed."""
        try:
            while True:
                self._follow_one(reader, stage)
        except ChannelClosed:
            double_buffer.close()
        except BaseException as error:  # the device thread raises it then
            double_buffer.fail(error)

    def _follow_one(self, reader: DispatchReader, stage: LoadedStage) -> None:
        """Do what the next message of BIC-I asks for."""
        began = time.monotonic_ns()
        with reader.receive() as message:
            header = decode_header(message.parts[0])
            if header.kind is Kind.GRAMMAR and len(message.parts) == 2:
                return  # it is for the samplers
            body, *buffers = [bytearray(part) for part in message.parts[2:]]
        if header.kind is Kind.GRAMMAR:
            stage.running.grammar(header.number, pickle.loads(body, buffers=buffers))
            return
        if header.kind is Kind.CONTROL:
            self._run_call(stage, header.number, partial(pickle.loads, body, buffers=buffers))
            return
        if header.number == self._planned:  # its scheduling output came before its tokens
            stage.running.tokens(header, body)
            self._record_wait(header, began)
            return
        if header.kind is Kind.PLAN:
            self._planned = header.number
        try:
            output = pickle.loads(body, buffers=buffers)
        except Exception as error:
            raise DamagedError(
                f"channel bic-i: the scheduling output of iteration {header.number} is damaged: "
                f"{error!r}"
            ) from None
        self._record_wait(header, began)
        assert stage.double_buffer is not None, "an iteration before the data plane was open"
        stage.double_buffer.prepare(header, output)

    def _record_wait(self, header: Header, began: int) -> None:
        """Record the wait for a message of BIC-I, from ``began`` (``time.monotonic_ns()``) until now."""
        self._recorder.record(
            Phase.WAIT_SCHEDULING, header.number, header.slot, began, time.monotonic_ns()
        )

    def _run_call(self, stage: LoadedStage, number: int, content: Callable[[], Any]) -> None:
        """Run control call ``number``, and answer it where an answer is wanted. Whatever is wrong with
        the call, its arguments or its result is an error of the call alone."""
        self._call = "waits to run a call"
        answers = True
        try:
            method, args, kwargs, only = content()
            answers = only is None or only == self._boot.place.rank
            self._call = f"runs {'a function' if callable(method) else method}"
            value = stage.call(lambda: self._find(stage, method)(*args, **kwargs))
            reply = Reply(call=number, value=pickle.dumps(value) if answers else b"")
        except WorkerDiedError:
            raise  # another stage's worker has died, which is no fault of the call's, and ends this one
        except Exception as error:
            logger.exception("worker %s failed in a call", self._boot.place.name)
            reply = Reply(call=number, error=(str(error) or repr(error)) + remedy(error))
        finally:
            self._call = ""
        if answers:
            self._parent.say(reply)

    def _find(
        self, stage: LoadedStage, method: str | Callable[..., Any] | Request[Any]
    ) -> Callable[..., Any]:
        """The function that a control call means: SiPipe's, the caller's own, or vLLM's worker's."""
        assert self._wrapper is not None
        if isinstance(method, Request):
            return partial(stage.answer, method)
        if callable(method):
            return partial(method, self._wrapper)
        function: Callable[..., Any] = getattr(self._wrapper, method)
        return function

    def _draft(self, message: bytes) -> None:
        """The thread on the pipe: an iteration's tokens are drawn, and its rows are to have drafts."""
        assert self._stage is not None, "a request for drafts before the stage was loaded"
        self._stage.running.draft(decode_request(message))

    def _doing(self) -> str:
        """Predicates on what this process does now, for the report of a stall."""
        parts = [self._call, self._stage.doing() if self._stage is not None else ""]
        return "; ".join(filter(None, parts)) or "waits for a call"

    def close(self) -> None:
        """Release channels, links and vLLM's worker."""
        if self._stage is not None:
            self._stage.close()
        # After an error the preparing thread may still sleep in the reader. The kernel closes that.
        asleep = self._preparing is not None and self._preparing.is_alive()
        if self._reader is not None and not asleep:
            self._reader.close()
        self._recorder.close()
        if self._stage is not None and self._wrapper is not None:
            with suppress(Exception):
                self._wrapper.shutdown()
            with suppress(Exception):
                destroy_model_parallel()
                destroy_distributed_environment()

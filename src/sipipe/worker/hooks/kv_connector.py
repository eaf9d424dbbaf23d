"""A worker's KV connector whose failed loads are blocks that did not come, not the worker's end.

vLLM lets what a connector raises end the worker. Here it becomes the report that vLLM's scheduler has
a policy for (``kv_load_failure_policy``): the blocks that the engine asked for in this iteration are
not valid, and requests that wait for them need not. An error of a save is logged: nothing depends on it.

Who runs here: the device thread, which alone calls vLLM's runner, on the stream on which it launches the
    pass. So each rank of each stage makes vLLM's calls in vLLM's order, also in iterations without tokens:
    where there is a connector, those are published too (:class:`sipipe.engine.iteration.dispatch.Dispatcher`).
    The preparing thread touches no block.
Guarantees: each method that vLLM's runner calls in a pass is guarded, so none ends the worker. If the
    connector cannot take this iteration's metadata, it is not asked to load: what it holds then is
    another iteration's, or the engine's side could not make any.
Relies on: a connector that raises in ``start_load_kv`` writes no more into the blocks of that call.
    Those of vLLM that move blocks by threads or networks catch their failures and report them
    themselves. One that raises in ``handle_preemptions`` reads no more of the blocks that it is told of.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.logger import init_logger
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.worker.gpu import kv_connector

from sipipe.messages.kv_load import KVLoad

logger = init_logger(f"vllm.{__name__}")

Failed = Callable[[str, Exception], None]
"""Takes the name of a connector's method and what it has raised."""


def nothing() -> None:
    """Make the answer of a method that need not answer."""


class ReportingKVConnector(kv_connector.ActiveKVConnector):
    """vLLM's runner of a connector, which reports the connector's errors instead of raising them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._loads: list[KVLoad] = []
        """Loads of this iteration."""
        self._error = ""
        """Reason why they failed; empty if they did not."""
        self._waiting: dict[str, KVLoad] = {}
        """Loads that a request waits for and that this worker has not reported."""
        self._reported: set[str] = set()
        """Requests whose failed load was reported, and whose end the connector may still tell: perhaps
        long after the request has ended, when vLLM's scheduler would not know it any more."""
        self._logged: set[str] = set()
        """Methods whose failure was logged."""
        self._bound = True
        """False if the connector could not take this iteration's metadata."""
        self._doubtful: set[str] = set()
        """Requests whose load counts as failed when it ends: meanwhile the connector did not say which
        blocks it had failed to load. Not before: it may still write into them."""
        connector: Any = self.kv_connector
        guards: dict[str, tuple[Failed, Callable[[], Any]]] = {
            "handle_preemptions": (self._log, nothing),
            "bind_connector_metadata": (self._fail_to_bind, nothing),
            # Called from within the model, layer by layer.
            "wait_for_layer_load": (self._fail, nothing),
            "save_kv_layer": (self._log, nothing),
            "finish_forward": (self._log, nothing),
            "wait_for_save": (self._log, nothing),
            "get_transfer_results": (self._fail_to_tell, KVConnectorTransferResults),
            "get_block_ids_with_load_errors": (self._hide_errors, set),
            "get_kv_connector_stats": (self._log, nothing),
            "get_kv_connector_kv_cache_events": (self._log, nothing),
            "build_connector_worker_meta": (self._log, nothing),
            "clear_connector_metadata": (self._log, nothing),
        }
        for name, (failed, instead) in guards.items():
            setattr(connector, name, self._guard(name, getattr(connector, name), failed, instead))

    def pre_forward(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> None:
        self._loads = getattr(scheduler_output, "kv_loads", [])
        self._waiting.update((load.request_id, load) for load in self._loads if load.waits)
        # A request that has the name of an earlier one waits for a load of its own.
        new = {load.request_id for load in self._loads if load.waits}
        self._reported -= new
        self._doubtful -= new
        self._error = next((load.reason for load in self._loads if load.reason), "")
        self._bound = True
        super().pre_forward(scheduler_output, *args, **kwargs)

    def post_forward(self, *args: Any, **kwargs: Any) -> KVConnectorOutput | None:
        output = super().post_forward(
            *args, **kwargs
        )  # 0.33 also says if the step's end is put off
        if output is None:
            return None
        ended = output.finished_recving or set()
        received = ended - self._reported
        failed = list(self._loads) if self._error else []
        for request_id in sorted(received):
            load = self._waiting.pop(request_id, None)
            if load is not None and request_id in self._doubtful and load not in failed:
                failed.append(load)
        for load in failed:
            self._report(load, output, received)
        self._doubtful -= received
        self._reported -= ended  # the connector says it once
        output.finished_recving = received or None
        self._loads = []
        self._error = ""
        return output

    def _report(self, load: KVLoad, output: KVConnectorOutput, received: set[str]) -> None:
        """Add a load that failed to the output for the engine, and to ``received`` if it is over."""
        output.invalid_block_ids = output.invalid_block_ids | set(load.block_ids)
        if load.waits:
            received.add(load.request_id)
            self._reported.add(load.request_id)
            self._waiting.pop(load.request_id, None)
            if not load.block_ids:
                output.failed_recving = output.failed_recving | {load.request_id}

    def _start_load_kv(self) -> None:
        """Start the iteration's loads; a failure is that of all of them."""
        if not self._bound:
            self._pending_load_kwargs = None
            return
        try:
            super()._start_load_kv()
        except Exception as error:
            self._fail("start_load_kv", error)

    def _guard(
        self, name: str, method: Callable[..., Any], failed: Failed, instead: Callable[[], Any]
    ) -> Callable[..., Any]:
        """Wrap the connector's ``method`` of that name: ``failed`` is called with what it raises, and
        ``instead`` makes the answer then."""

        @functools.wraps(method)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            try:
                return method(*args, **kwargs)
            except Exception as error:
                failed(name, error)
                return instead()

        return guarded

    def _fail_to_bind(self, method: str, error: Exception) -> None:
        """Note that the connector has not got this iteration's metadata: its loads failed."""
        self._bound = False
        self._fail(method, error)

    def _fail_to_tell(self, method: str, error: Exception) -> None:
        """Note that nobody knows which loads have ended: all that a request waits for failed. Loads of
        this iteration that have failed before stay failed."""
        failed = self._loads if self._error else []
        waiting = [load for load in self._waiting.values() if load not in failed]
        self._loads = [*failed, *waiting]
        self._fail(method, error)

    def _hide_errors(self, method: str, error: Exception) -> None:
        """Note that nobody knows which blocks did not come: loads of this iteration failed if nobody
        waits for them, and the others do when they end."""
        self._doubtful.update(self._waiting)
        if not self._error:
            self._loads = [load for load in self._loads if not load.waits]
        self._fail(method, error)

    def _fail(self, method: str, error: Exception) -> None:
        """Note that this iteration's loads failed."""
        self._error = self._error or f"{type(error).__name__}: {error}"
        self._log(method, error)

    def _log(self, method: str, error: Exception) -> None:
        """Log the first failure of each method."""
        if method in self._logged:
            return
        self._logged.add(method)
        logger.error(
            "The KV connector %s failed in %s (%s: %s). Blocks that it did not bring are computed or "
            "fail their request, by kv_load_failure_policy; this is logged once",
            type(self.kv_connector).__name__,
            method,
            type(error).__name__,
            error,
            exc_info=error,
        )


def reporting() -> AbstractContextManager[Any]:
    """While active, a runner that vLLM gives a KV connector gets one that reports what fails."""
    return patch.object(kv_connector, "ActiveKVConnector", ReportingKVConnector)

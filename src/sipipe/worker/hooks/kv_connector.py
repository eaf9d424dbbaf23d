"""A worker's KV connector whose failed loads are blocks that did not come, not the worker's end.

vLLM lets what a connector raises end the worker. Here it becomes the report that vLLM's scheduler has
a policy for (``kv_load_failure_policy``): the blocks that the engine asked for in this iteration are
not valid, and requests that wait for them need not. An error of a save is logged: nothing depends on it.

Who runs here: the device thread, which alone calls vLLM's runner.
Relies on: a connector that raises in ``start_load_kv`` writes no more into the blocks of that call.
    Those of vLLM that move blocks by threads or networks catch their failures and report them
    themselves.
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
        """Requests whose failed load was reported; the connector may still say that it ended."""
        self._logged: set[str] = set()
        """Methods whose failure was logged."""
        connector: Any = self.kv_connector
        # Called from within the model, layer by layer.
        for name, failed in (
            ("wait_for_layer_load", self._fail),
            ("save_kv_layer", self._log),
            ("wait_for_save", self._log),
        ):
            setattr(connector, name, self._guard(name, getattr(connector, name), failed))
        connector.get_transfer_results = self._results(connector.get_transfer_results)

    def pre_forward(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> None:
        self._loads = getattr(scheduler_output, "kv_loads", [])
        self._waiting.update((load.request_id, load) for load in self._loads if load.waits)
        self._reported -= scheduler_output.finished_req_ids
        self._error = next((load.reason for load in self._loads if load.reason), "")
        super().pre_forward(scheduler_output, *args, **kwargs)

    def post_forward(self, *args: Any, **kwargs: Any) -> KVConnectorOutput | None:
        output = super().post_forward(
            *args, **kwargs
        )  # 0.33 also says if the step's end is put off
        if output is None:
            return None
        received = (output.finished_recving or set()) - self._reported
        for request_id in received:
            self._waiting.pop(request_id, None)
        if self._error:
            for load in self._loads:
                self._report(load, output, received)
        output.finished_recving = received or None
        self._loads = []
        self._error = ""
        return output

    def _report(self, load: KVLoad, output: KVConnectorOutput, received: set[str]) -> None:
        """Add a load that failed to the output for the engine, and to ``received`` if it is over."""
        output.invalid_block_ids = output.invalid_block_ids | set(load.block_ids)
        if not (load.waits or load.block_ids):
            raise RuntimeError(
                f"request {load.request_id}: vLLM has no way to say that blocks of several KV cache "
                f"groups were not loaded ({self._error})"
            )
        if load.waits:
            received.add(load.request_id)
            self._reported.add(load.request_id)
            self._waiting.pop(load.request_id, None)
            if not load.block_ids:
                output.failed_recving = output.failed_recving | {load.request_id}

    def _start_load_kv(self) -> None:
        """Start the iteration's loads; a failure is that of all of them."""
        try:
            super()._start_load_kv()
        except Exception as error:
            self._fail("start_load_kv", error)

    def _results(self, ask: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``ask``, the connector's ``get_transfer_results``: its failure is that of all loads that
        a request waits for."""

        @functools.wraps(ask)
        def results(*args: Any, **kwargs: Any) -> Any:
            try:
                return ask(*args, **kwargs)
            except Exception as error:
                self._loads = [*self._waiting.values()]
                self._fail("get_transfer_results", error)
                return KVConnectorTransferResults()

        return results

    def _guard(
        self,
        name: str,
        method: Callable[..., None],
        failed: Callable[[str, Exception], None],
    ) -> Callable[..., None]:
        """Wrap the connector's ``method`` of that name: ``failed`` is called with what it raises."""

        @functools.wraps(method)
        def guarded(*args: Any, **kwargs: Any) -> None:
            try:
                method(*args, **kwargs)
            except Exception as error:
                failed(name, error)

        return guarded

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

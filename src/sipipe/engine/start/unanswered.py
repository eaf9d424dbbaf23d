"""Calls that wait for an engine that has ended: they raise why, where vLLM lets them wait for ever.

vLLM's front ends call an engine (its "utility" calls: pause, sleep, load an adapter, ``collective_rpc``)
and wait for a future that the reader of the engine's answers resolves. That reader ends with the engine,
told or killed, and resolves none: an ``LLM`` would wait, and a server for the client who waits. An ``LLM``
waits in the same way for tokens, where its engine was killed.

Who runs here: the event loop's thread of an ``AsyncLLM``; for an ``LLM`` a thread of its own.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import MutableMapping
from contextlib import suppress
from threading import Thread
from typing import Any
from weakref import ref

from vllm.v1.engine.core_client import AnyFuture, AsyncMPClient, SyncMPClient
from vllm.v1.engine.exceptions import EngineDeadError

from sipipe.engine.start.drain import EndedFirstError, was_told_to_end
from sipipe.extending import extends


def end_unanswered_calls() -> None:
    """Have calls of both of vLLM's front ends raise when their engine ends: EngineDeadError, or
    EndedFirstError of an ``AsyncLLM`` that was told to end. Who waits for an ``LLM``'s tokens gets the
    former. Safe to call again.

    No call is missed: it notes its future first and then looks whether the engine is alive, and vLLM says
    that it is not before its reader ends.
    """

    @extends(AsyncMPClient, "_ensure_output_queue_task")
    def begin_reading(begin: Any, self: Any) -> None:
        begun = self.resources.output_queue_task is not None
        begin(self)
        if begun:
            return
        calls = self.utility_results
        # Held by the reader, it would not be collected. A call that waits holds it.
        client = ref(self)

        def end_all(_reader: Any) -> None:
            _end(calls, EndedFirstError if was_told_to_end(client()) else EngineDeadError)

        self.resources.output_queue_task.add_done_callback(end_all)

    @extends(SyncMPClient, "__init__")
    def begin(begin: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        # The thread is to hold these, and not the client.
        reader = self.output_queue_thread
        calls = self.utility_results
        outputs = self.outputs_queue

        def end_all() -> None:
            reader.join()  # wait: the engine's life; it ends with the client, or the engine
            _end(calls, EngineDeadError)
            outputs.put(EngineDeadError())

        Thread(target=end_all, name="sipipe-unanswered", daemon=True).start()


def _end(calls: MutableMapping[int, AnyFuture], error: type[Exception]) -> None:
    """Raise ``error`` to all who wait."""
    while calls:
        _, future = calls.popitem()
        with suppress(concurrent.futures.InvalidStateError, asyncio.InvalidStateError):  # given up
            future.set_exception(error())

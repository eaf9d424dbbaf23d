"""Aborts that an engine has carried out, and that may not meet the next request with the same id.

vLLM puts each abort in two queues: one in the order of all messages, and one that the engine looks at
amid a step, so that it comes early. Where an id is given again at once (with
``VLLM_DISABLE_REQUEST_ID_RANDOMIZATION``), the engine may take abort and new request from the first
queue, and then the same abort from the second one. It would end the new request, whose client is not
told and waits for ever.

Who runs here: the engine's process, on its thread. vLLM's input thread fills both queues.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.engine.core import EngineCoreProc

from sipipe.extending import extends


def abort_once() -> None:
    """Have an engine forget an abort that it has carried out in the order of all messages. Safe to call
    again."""

    @extends(EngineCoreProc, "_handle_client_request")
    def handle_client_request(handle: Any, self: Any, request_type: Any, request: Any) -> None:
        handle(self, request_type, request)
        if request_type == EngineCoreRequestType.ABORT:
            aborts = self.aborts_queue
            # Its lock is held for moments. The abort may be gone: it was carried out amid a step.
            with aborts.mutex, suppress(ValueError):
                aborts.queue.remove(request)

"""Status 503: of ``/health`` while a stage does not answer, and of all that is new while a server ends.

vLLM answers so for a dead engine only. While requests in flight finish (``--shutdown-timeout``) its
``/health`` stays 200, and new requests are answered with 500.

Middleware of vLLM's API servers (``--middleware``), which ``sipipe serve`` gives them. It reads the
engine's page of live figures, where :mod:`sipipe.engine.iteration.stall` says it, and waits for no engine.
"""

from typing import Any

from starlette.responses import JSONResponse, Response

from sipipe.engine.start.drain import is_ending
from sipipe.observe.live import LivePage, Word, still_there

ENDING = {"message": "the server is ending", "type": "ServiceUnavailableError", "code": 503}


class Health:
    """ASGI middleware around ``app``."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._pages: list[LivePage] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        answer = self._app
        health = scope["path"] == "/health"
        new = health or scope["method"] == "POST"
        if new and is_ending(scope["app"].state.engine_client):
            # Left open, the connection would bring a client's next request here too. Closed with a
            # part of the body unread, it would be reset, and the answer lost.
            answer = JSONResponse({"error": ENDING}, 503, {"Connection": "close"})
            while (await receive()).get("more_body"):
                pass
        elif health and self._stalled():
            answer = Response(status_code=503)
        await answer(scope, receive, send)

    def _stalled(self) -> bool:
        """Say if a stage of one of the engines does not answer."""
        self._pages = still_there(self._pages)
        return any(page.block(("executor", 0, 0))[Word.STALLED] for page in self._pages)

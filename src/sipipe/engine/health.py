"""``/health`` while a stage does not answer: 503, as vLLM itself says of a dead engine only.

Middleware of vLLM's API servers (``--middleware``), which ``sipipe serve`` gives them. It reads the
engine's page of live figures, where :mod:`sipipe.engine.stall` says it, and waits for nobody.
"""

from typing import Any

from starlette.responses import Response

from sipipe.observe.live import LivePage, Word, still_there


class Health:
    """ASGI middleware around ``app``."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._pages: list[LivePage] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        asked = scope["type"] == "http" and scope["path"] == "/health"
        answer = Response(status_code=503) if asked and self._stalled() else self._app
        await answer(scope, receive, send)

    def _stalled(self) -> bool:
        self._pages = still_there(self._pages)
        return any(page.read("executor")[Word.STALLED] for page in self._pages)

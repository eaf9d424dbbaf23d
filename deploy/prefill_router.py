"""A router for engines that hand KV caches over: prompts to some, all other tokens to others.

    python deploy/prefill_router.py --port 8000 \
        --prefill http://prefill:8000 --decode http://decode-0:8000 --decode http://decode-1:8000

As in vLLM's example of such a proxy, a request is asked of a prefill engine first, for one token:
that engine's KV connector keeps the prompt's cache. Then it goes, with the ``kv_transfer_params`` of
that answer, if any, to a decode engine, whose connector gets it; such parameters are one prompt's.
Engines are taken in turn, and one that cannot be reached, or answers 503, is passed over. Where none
can, the client gets 502 and their addresses; one that says nothing for --timeout seconds is a 504; a
stream that breaks off says so as its last event. What an engine refuses is answered in its own words.
/health is 200 while one of each kind is healthy. It authenticates nobody, and hands on the
Authorization header.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import (
    ClientError,
    ClientResponse,
    ClientSession,
    ClientTimeout,
    SocketTimeoutError,
    TCPConnector,
    web,
)

GENERATES = ("/v1/completions", "/v1/chat/completions")
UNREACHABLE = (ClientError, TimeoutError, OSError)
HEALTH = ClientTimeout(total=3)
"""Who asks for the router's health waits for that of all engines, which are asked at once."""


class Engines:
    """Of one kind, taken in turn."""

    def __init__(self, kind: str, addresses: list[str]) -> None:
        self.kind = kind
        self.addresses = [address.rstrip("/") for address in addresses]
        self._turn = itertools.cycle(range(len(addresses)))

    def in_turn(self) -> list[str]:
        """All, the one whose turn it is first."""
        first = next(self._turn)
        return [*self.addresses[first:], *self.addresses[:first]]

    @asynccontextmanager
    async def ask(
        self, session: ClientSession, method: str, path: str, **more: object
    ) -> AsyncIterator[ClientResponse]:
        """The answer of the first engine that gives one.

        Raises:
            HTTPBadGateway: none does.
            HTTPGatewayTimeout: it has the request, and answers nothing for too long.
        """
        seen, turn = [], self.in_turn()
        for address in turn:
            try:
                answer = await session.request(method, address + path, **more)
            except SocketTimeoutError:  # it may still compute: another one would do so again
                message = f"{address} has not answered in time (--timeout)"
                raise web.HTTPGatewayTimeout(
                    text=failure(message, 504), content_type="application/json"
                ) from None
            except UNREACHABLE as error:
                seen.append(f"{address} ({str(error) or type(error).__name__})")
                continue
            async with answer:
                if answer.status == 503 and address != turn[-1]:  # it ends, or has too much to do
                    seen.append(f"{address} (503)")
                    continue
                yield answer
            return
        raise web.HTTPBadGateway(
            text=failure(f"no {self.kind} engine answers: {', '.join(seen)}"),
            content_type="application/json",
        )


def failure(message: str, code: int = 502) -> str:
    """As vLLM's server says one."""
    kind = {400: "BadRequestError", 504: "GatewayTimeoutError"}.get(code, "BadGatewayError")
    return json.dumps({"error": {"message": message, "type": kind, "code": code}})


def several(body: dict) -> bool:
    """Whether more than one answer is asked for."""
    prompts = body.get("prompt")
    many = isinstance(prompts, list) and len(prompts) > 1 and isinstance(prompts[0], (str, list))
    return many or (body.get("n") or 1) != 1


def of_prompt(body: dict) -> dict:
    """What is asked of a prefill engine: the prompt, and one token."""
    asked = {key: value for key, value in body.items() if key not in ("stream_options", "n")}
    asked |= {"stream": False, "max_tokens": 1, "min_tokens": 0}
    asked["kv_transfer_params"] = {"do_remote_decode": True, "do_remote_prefill": False}
    if "max_completion_tokens" in body:
        asked["max_completion_tokens"] = 1
    return asked


def handed_on(request: web.Request) -> dict[str, str]:
    """The headers that engines get too."""
    names = ("Authorization", "X-Request-Id")
    return {name: request.headers[name] for name in names if name in request.headers}


class Router:
    def __init__(self, prefill: Engines, decode: Engines, timeout: float) -> None:
        self.prefill, self.decode = prefill, decode
        self._timeout = ClientTimeout(total=None, sock_connect=5, sock_read=timeout)

    def app(self) -> web.Application:
        app = web.Application(client_max_size=1 << 28)
        app.cleanup_ctx.append(self._open)
        app.add_routes([web.post(path, self.generate) for path in GENERATES])
        app.add_routes([web.get("/health", self.health), web.get("/v1/models", self.models)])
        return app

    async def _open(self, _: web.Application) -> AsyncIterator[None]:
        # As many requests at once as clients have: aiohttp would let the 101st wait, and /health.
        # A connection that an engine ends just when it is used again would look like its death.
        connector = TCPConnector(limit=0, force_close=True)
        async with ClientSession(timeout=self._timeout, connector=connector) as self._session:
            yield

    async def generate(self, request: web.Request) -> web.StreamResponse:
        try:
            body = await request.json()
        # LookupError: a charset that is none. RecursionError: too deep. RequestPayloadError: it is
        # not encoded as it says.
        except (ValueError, LookupError, RecursionError, web.RequestPayloadError):
            body = None
        if not isinstance(body, dict):
            raise web.HTTPBadRequest(text="the body is no JSON object")
        # Where a prompt's cache is, prefill engines say; a client's word would have an engine ask
        # anybody.
        body.pop("kv_transfer_params", None)
        kept, post = handed_on(request), (self._session, "POST", request.path)
        async with self.prefill.ask(*post, json=of_prompt(body), headers=kept) as answer:
            said = await self._whole(answer)
            if said.status != 200:
                return said
            if there := json.loads(said.body).get("kv_transfer_params"):
                if several(body):
                    message = "this router hands over one prompt's cache: send one prompt, with n=1"
                    return web.json_response(text=failure(message, 400), status=400)
                body["kv_transfer_params"] = there
        async with self.decode.ask(*post, json=body, headers=kept) as answer:
            if not answer.content_type.startswith("text/event-stream"):
                return await self._whole(answer)
            return await self._stream(request, answer)

    async def _whole(self, answer: ClientResponse) -> web.Response:
        try:
            said = await answer.read()
        except UNREACHABLE as error:
            message = f"{answer.url.origin()} ended amid its answer ({type(error).__name__})"
            return web.json_response(text=failure(message), status=502)
        return web.Response(body=said, status=answer.status, content_type=answer.content_type)

    async def _stream(self, request: web.Request, answer: ClientResponse) -> web.StreamResponse:
        stream = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await stream.prepare(request)
        ended = False
        while not ended:
            try:
                piece = await answer.content.readany()
                ended = not piece
            except UNREACHABLE as error:
                message = f"{answer.url.origin()} ended amid its stream ({type(error).__name__})"
                # After a blank line: the last event may be half sent.
                piece, ended = f"\n\ndata: {failure(message)}\n\n".encode(), True
            await stream.write(piece)
        await stream.write_eof()
        return stream

    async def health(self, _: web.Request) -> web.Response:
        asked = [(each.kind, at) for each in (self.prefill, self.decode) for at in each.addresses]
        found = await asyncio.gather(*(self._health(address) for _, address in asked))
        states = [(*one, status) for one, status in zip(asked, found, strict=True)]
        bad = [f"{kind} engine {at}: {status}\n" for kind, at, status in states if status != "200"]
        well = {kind for kind, _, status in states if status == "200"}
        return web.Response(text="".join(bad), status=200 if len(well) == 2 else 503)

    async def _health(self, address: str) -> str:
        try:
            async with self._session.get(f"{address}/health", timeout=HEALTH) as answer:
                return str(answer.status)
        except UNREACHABLE as error:
            return type(error).__name__

    async def models(self, request: web.Request) -> web.Response:
        get = (self._session, "GET", "/v1/models")
        async with self.decode.ask(*get, headers=handed_on(request)) as answer:
            return await self._whole(answer)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    for kind in ("prefill", "decode"):
        parser.add_argument(
            f"--{kind}", action="append", required=True, metavar="URL", help="again for more"
        )
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds without a byte")
    options = parser.parse_args()
    engines = Engines("prefill", options.prefill), Engines("decode", options.decode)
    app = Router(*engines, options.timeout).app()
    # A client that goes away takes its request along, and an engine aborts it.
    web.run_app(app, host=options.host, port=options.port, handler_cancellation=True)


if __name__ == "__main__":
    main()

"""A router for engines that hand KV caches over: prompts to some, all other tokens to others.

    python deploy/prefill_router.py --port 8000 \
        --prefill http://prefill:8000 --decode http://decode-0:8000 --decode http://decode-1:8000

As in vLLM's example of such a proxy, a request is asked of a prefill engine first, for one token:
that engine's KV connector keeps the prompt's cache. Then it goes, with the ``kv_transfer_params`` of
that answer, if any, to a decode engine, whose connector gets it; such parameters are one prompt's.
Engines are taken in turn, and one that cannot be reached, or answers 503, is passed over. Where none
can, the client gets 502 and their addresses; one that says nothing for --timeout seconds is a 504; a
stream that breaks off says so as its last event. What an engine refuses is answered in its own words.
/health is 200 while one of each kind is healthy.

Clients are not trusted. Each has --client-timeout seconds for its headers, for its body, and for
taking what it is sent; a body has --max-body MiB at most, is read as JSON's own encodings, and is not
unpacked. With --api-key, or VLLM_API_KEY, requests below /v1 need one of these keys, as vLLM's server
has it. The Authorization header is handed on, so engines may have the same key.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import hmac
import itertools
import json
import logging
import math
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Any, NoReturn
from urllib.parse import urlsplit

from aiohttp import (
    ClientError,
    ClientResponse,
    ClientSession,
    ClientTimeout,
    SocketTimeoutError,
    TCPConnector,
    web,
)
from aiohttp.http_exceptions import HttpProcessingError

GENERATES = ("/v1/completions", "/v1/chat/completions")
UNREACHABLE = (ClientError, TimeoutError, OSError)
HEALTH = ClientTimeout(total=3)
"""The time for an engine's health: all are asked at once while somebody waits for the router's."""

TRANSFERS = ("kv_transfer_params", "ec_transfer_params")
"""The fields that say where a cache is. Prefill engines say it; a client's word would have an engine
ask any address."""

HANDED_ON = ("Authorization", "X-Request-Id")
"""The client's headers that engines get."""

MOST_REASON = 200
"""Characters of an engine's failure that an answer repeats: it may quote what the engine has sent."""

MEBIBYTE = 1 << 20
log = logging.getLogger("prefill_router")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()


def failure(status: int, message: str) -> web.Response:
    """An error in the form of vLLM's server, whose types are the status' names."""
    kind = HTTPStatus(status).phrase.title().replace(" ", "").removesuffix("Error") + "Error"
    error = {"message": message, "type": kind, "code": status}
    return web.json_response({"error": error}, status=status)


def without_traceback(record: logging.LogRecord) -> bool:
    """A filter of aiohttp's log: what a client sends that is no HTTP is one line there."""
    error = record.exc_info and record.exc_info[1]
    if isinstance(error, HttpProcessingError):
        reason = " ".join(str(error).split())[:MOST_REASON]
        record.msg = f"{record.getMessage()}: {reason}"
        record.args = record.exc_info = None
    return True


class RefusedError(Exception):
    """A request that the router answers itself, with an error."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Engines:
    """Engines of one kind, taken in turn."""

    def __init__(self, kind: str, addresses: list[str]) -> None:
        self.kind = kind
        self.addresses = [address.rstrip("/") for address in addresses]
        self._turn = itertools.cycle(range(len(addresses)))

    def in_turn(self) -> list[str]:
        """All addresses, the one whose turn it is first."""
        first = next(self._turn)
        return [*self.addresses[first:], *self.addresses[:first]]

    @asynccontextmanager
    async def ask(
        self,
        session: ClientSession,
        method: str,
        path: str,
        headers: dict[str, str],
        content: bytes | None = None,
    ) -> AsyncIterator[ClientResponse]:
        """The answer of the first engine that gives one.

        Args:
            content: the request's body, which is JSON.

        Raises:
            RefusedError: none does (502), or the one that has the request is silent for too long (504).
        """
        if content is not None:
            headers = headers | {"Content-Type": "application/json"}
        passed_over: list[str] = []
        turn = self.in_turn()
        for address in turn:
            try:
                # wait: --timeout without a byte; the engine, or its end
                answer = await session.request(
                    method, address + path, headers=headers, data=content, allow_redirects=False
                )
            except SocketTimeoutError:  # it may still compute: another one would do so again
                raise RefusedError(504, f"{address} has not answered in time (--timeout)") from None
            except UNREACHABLE as error:
                reason = " ".join(str(error).split())[:MOST_REASON] or type(error).__name__
                passed_over.append(f"{address} ({reason})")
                continue
            async with answer:
                if answer.status == 503 and address != turn[-1]:  # it ends, or has too much to do
                    passed_over.append(f"{address} (503)")
                    continue
                yield answer
            return
        raise RefusedError(502, f"no {self.kind} engine answers: {', '.join(passed_over)}")


def without_transfers(body: dict[str, Any]) -> dict[str, Any]:
    """The body without what a client says of caches: vLLM reads it in two places."""
    body = {key: value for key, value in body.items() if key not in TRANSFERS}
    extra = body.get("vllm_xargs")
    if isinstance(extra, dict):
        body["vllm_xargs"] = {key: extra[key] for key in extra if key not in TRANSFERS}
    return body


def has_several_answers(body: dict[str, Any]) -> bool:
    """Whether more than one answer is asked for."""
    prompts = body.get("prompt")
    several = isinstance(prompts, list) and len(prompts) > 1 and isinstance(prompts[0], (str, list))
    return several or (body.get("n") or 1) != 1


def prefill_request(body: dict[str, Any]) -> dict[str, Any]:
    """The request for a prefill engine: the prompt, and one token."""
    request = {key: value for key, value in body.items() if key not in ("stream_options", "n")}
    request |= {"stream": False, "max_tokens": 1, "min_tokens": 0}
    request["kv_transfer_params"] = {"do_remote_decode": True, "do_remote_prefill": False}
    if "max_completion_tokens" in body:
        request["max_completion_tokens"] = 1
    return request


def written(body: dict[str, Any]) -> bytes:
    """The body as JSON.

    Raises:
        RefusedError: it is nested so deeply that it can be read, but not written.
    """
    try:
        return json.dumps(body).encode()
    except RecursionError:
        raise RefusedError(400, "the body is nested too deeply") from None


def transfer_of(answer: web.Response, origin: str) -> dict[str, Any] | None:
    """The parameters with which a decode engine's connector gets the prompt's cache, if any.

    Raises:
        RefusedError: the answer has none because it is no JSON object.
    """
    try:
        said = json.loads(answer.body)  # type: ignore[arg-type] # bytes: it was read whole
        transfer = said.get("kv_transfer_params")
    except (ValueError, RecursionError, AttributeError):
        raise RefusedError(502, f"{origin} answered 200 with no JSON object: is it vLLM?") from None
    if transfer is not None and not isinstance(transfer, dict):
        raise RefusedError(502, f"{origin} answered kv_transfer_params that are no JSON object")
    return transfer


def engine_headers(request: web.Request) -> dict[str, str]:
    """The client's headers that engines get too.

    Raises:
        RefusedError: one is no text.
    """
    headers = {name: request.headers[name] for name in HANDED_ON if name in request.headers}
    for name, value in headers.items():
        if not value.isprintable():  # bytes that are no UTF-8 are lone surrogates, which are not
            raise RefusedError(400, f"the header {name} has bytes that are no text")
    return headers


class Router:
    """The routes, and what each request has to pass before.

    Args:
        prefill: the engines that compute prompts.
        decode: the engines that draw all tokens but the first.
        timeout: seconds that an engine may say nothing while it has a request.
        client_timeout: seconds that a client may take for its headers, for its body, between two
            requests, and for taking a piece of an answer.
        max_body: the bytes of the largest body that is read.
        keys: one of which requests below /v1 need; none: they need none.
    """

    def __init__(
        self,
        prefill: Engines,
        decode: Engines,
        *,
        timeout: float,
        client_timeout: float,
        max_body: int,
        keys: tuple[str, ...] = (),
    ) -> None:
        self.prefill = prefill
        self.decode = decode
        self._timeout = ClientTimeout(total=None, sock_connect=5, sock_read=timeout)
        self._client_timeout = client_timeout
        self._max_body = max_body
        self._keys = [_digest(key) for key in keys]

    def limits(self) -> dict[str, Any]:
        """The options of aiohttp's runner that bound what a client can take."""
        return {
            "handler_cancellation": True,  # a client that goes away takes its request along
            "keepalive_timeout": self._client_timeout,  # of a first request's headers too
            "lingering_time": self._client_timeout,
            "auto_decompress": False,  # 446 KB of gzip would become 600 MB
        }

    def app(self) -> web.Application:
        app = web.Application(client_max_size=self._max_body, middlewares=[self._answer])
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

    @web.middleware
    async def _answer(
        self,
        request: web.Request,
        handler: Callable[[web.Request], Awaitable[web.StreamResponse]],
    ) -> web.StreamResponse:
        """Let in whom the router serves; every error in the form of vLLM's; an end to sending."""
        try:
            # Before the body is read: who has no key makes the router hold nothing.
            if request.path.startswith("/v1") and not self._has_key(request):
                raise RefusedError(401, "this router needs a key: Authorization: Bearer KEY")
            response = await handler(request)
        except RefusedError as refusal:
            response = failure(refusal.status, str(refusal))
        except web.HTTPException as error:  # aiohttp's own: no such path or method
            response = failure(error.status, f"{request.method} {request.path}: {error.reason}")
        except ConnectionError:
            # The client's: an engine's is an answer of its own. aiohttp would log one that is raised.
            return failure(408, "the client takes nothing")
        except Exception as error:
            log.exception("%s %s", request.method, request.path)
            response = failure(500, f"the router failed: {type(error).__name__}")
        await self._send(request, response.prepare(request))
        await self._send(request, response.write_eof())
        return response

    def _has_key(self, request: web.Request) -> bool:
        """Whether the request has one of the keys, compared as vLLM's server does."""
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        digest = _digest(key)
        # All are compared: the time says nothing of which.
        matches = [hmac.compare_digest(digest, each) for each in self._keys]
        return not self._keys or (scheme.lower() == "bearer" and any(matches))

    async def _send(self, request: web.Request, sending: Awaitable[object]) -> None:
        """Await ``sending``; a client that does not take what it is sent loses its connection,
        whereupon aiohttp cancels what it asked for."""
        try:
            # wait: --client-timeout; the client, or its end
            async with asyncio.timeout(self._client_timeout):
                await sending
        except TimeoutError:
            if request.transport is not None:
                request.transport.abort()
            raise ConnectionResetError("the client takes nothing") from None

    async def _body(self, request: web.Request) -> dict[str, Any]:
        """The request's body.

        Raises:
            RefusedError: it is packed, too long, too late, or no JSON object.
        """
        if request.headers.get("Content-Encoding", "identity").lower() != "identity":
            raise RefusedError(415, "send the body without Content-Encoding")
        try:
            # wait: --client-timeout; the client, or its end
            async with asyncio.timeout(self._client_timeout):
                content = await request.read()
        except web.HTTPRequestEntityTooLarge:
            bound = self._max_body / MEBIBYTE
            raise RefusedError(413, f"the body has more than {bound:g} MiB (--max-body)") from None
        except TimeoutError:
            raise RefusedError(408, "the body has not come in time (--client-timeout)") from None
        except web.RequestPayloadError:  # chunks that are none
            content = b""
        try:
            # Not request.json(): that decodes by the client's charset, some of which take seconds.
            body = json.loads(content)
        except (ValueError, RecursionError):
            body = None
        if not isinstance(body, dict):
            raise RefusedError(400, "the body is no JSON object")
        return body

    async def generate(self, request: web.Request) -> web.StreamResponse:
        headers = engine_headers(request)
        body = without_transfers(await self._body(request))
        prompt_only = written(prefill_request(body))
        prefilled = self.prefill.ask(self._session, "POST", request.path, headers, prompt_only)
        async with prefilled as answer:
            prompt = await self._whole(answer)
            if prompt.status != 200:
                return prompt
            transfer = transfer_of(prompt, str(answer.url.origin()))
        if transfer:
            if has_several_answers(body):
                raise RefusedError(
                    400, "this router hands over one prompt's cache: send one prompt, with n=1"
                )
            body["kv_transfer_params"] = transfer
        content = written(body)
        async with self.decode.ask(self._session, "POST", request.path, headers, content) as answer:
            if not answer.content_type.startswith("text/event-stream"):
                return await self._whole(answer)
            return await self._stream(request, answer)

    async def _whole(self, answer: ClientResponse) -> web.Response:
        """The whole answer of an engine.

        Raises:
            RefusedError: it breaks off, or is none that vLLM gives, such as a redirection (502).
        """
        if answer.status != 200 and not 400 <= answer.status < 600:
            raise RefusedError(
                502, f"{answer.url.origin()} answered with status {answer.status}: is it vLLM?"
            )
        try:
            content = await answer.read()
        except UNREACHABLE as error:
            message = f"{answer.url.origin()} ended amid its answer ({type(error).__name__})"
            raise RefusedError(502, message) from None
        return web.Response(body=content, status=answer.status, content_type=answer.content_type)

    async def _stream(self, request: web.Request, answer: ClientResponse) -> web.StreamResponse:
        stream = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await self._send(request, stream.prepare(request))
        ended = False
        while not ended:
            try:
                piece = await answer.content.readany()
                ended = not piece
            except UNREACHABLE as error:
                message = f"{answer.url.origin()} ended amid its stream ({type(error).__name__})"
                # After a blank line: the last event may be half sent.
                piece = f"\n\ndata: {failure(502, message).text}\n\n".encode()
                ended = True
            await self._send(request, stream.write(piece))
        return stream

    async def health(self, _: web.Request) -> web.Response:
        asked = [(each.kind, at) for each in (self.prefill, self.decode) for at in each.addresses]
        statuses = await asyncio.gather(*(self._health(address) for _, address in asked))
        states = [(*engine, status) for engine, status in zip(asked, statuses, strict=True)]
        bad = [f"{kind} engine {at}: {status}\n" for kind, at, status in states if status != "200"]
        healthy = {kind for kind, _, status in states if status == "200"}
        return web.Response(text="".join(bad), status=200 if len(healthy) == 2 else 503)

    async def _health(self, address: str) -> str:
        try:
            async with self._session.get(f"{address}/health", timeout=HEALTH) as answer:
                return str(answer.status)
        except UNREACHABLE as error:
            return type(error).__name__

    async def models(self, request: web.Request) -> web.Response:
        headers = engine_headers(request)
        async with self.decode.ask(self._session, "GET", "/v1/models", headers) as answer:
            return await self._whole(answer)


class OneLineParser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def address(text: str) -> str:
    """An engine's base address."""
    try:
        parts = urlsplit(text)
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # a port that is none, a bracket that is not closed
        usable = None
    if not usable or parts.query or parts.fragment or parts.username is not None:
        raise argparse.ArgumentTypeError(f"{text!r} is no address such as http://host:8000")
    if not text.isascii() or not text.isprintable() or " " in text:
        raise argparse.ArgumentTypeError(f"{text!r} has characters that no address has")
    return text


def port(text: str) -> int:
    """A port to listen on."""
    if not (text.isascii() and text.isdecimal() and 1 <= int(text[:9]) <= 65535):
        raise argparse.ArgumentTypeError(f"{text!r} is no port: 1 to 65535")
    return int(text)


def positive(text: str) -> float:
    """A number above 0."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0 and below a million")
    return number


def key(text: str) -> str:
    """A key that clients must have: an empty one, of a variable that is not set, lets everybody in."""
    if not text:
        raise argparse.ArgumentTypeError("a key is empty")
    return text


def parser() -> OneLineParser:
    """The command's options, each checked as it is read."""
    options = OneLineParser(
        prog="prefill_router", description=(__doc__ or "").splitlines()[0], allow_abbrev=False
    )
    options.add_argument("--host", default="127.0.0.1", help="address to listen on")
    options.add_argument("--port", type=port, default=8000)
    for kind in ("prefill", "decode"):
        options.add_argument(
            f"--{kind}",
            action="append",
            required=True,
            type=address,
            metavar="URL",
            help="again for more",
        )
    options.add_argument(
        "--timeout", type=positive, default=600.0, help="seconds without a byte from an engine"
    )
    options.add_argument(
        "--client-timeout",
        type=positive,
        default=60.0,
        help="seconds for a client's headers, its body, and for taking what it is sent",
    )
    options.add_argument(
        "--max-body", type=positive, default=4.0, metavar="MIB", help="largest body, in MiB"
    )
    options.add_argument(
        "--api-key",
        nargs="+",
        type=key,
        metavar="KEY",
        help="requests below /v1 need one of these (default: VLLM_API_KEY, if it is set)",
    )
    return options


def main() -> None:
    options = parser().parse_args()
    keys = options.api_key or [os.environ.get("VLLM_API_KEY", "")]  # empty: not set, as in vLLM
    router = Router(
        Engines("prefill", options.prefill),
        Engines("decode", options.decode),
        timeout=options.timeout,
        client_timeout=options.client_timeout,
        max_body=math.ceil(options.max_body * MEBIBYTE),
        keys=tuple(each for each in keys if each),
    )
    logging.getLogger("aiohttp.server").addFilter(without_traceback)
    try:
        web.run_app(router.app(), host=options.host, port=options.port, **router.limits())
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        sys.exit(f"prefill_router: cannot listen on {options.host}:{options.port}: {reason}")


if __name__ == "__main__":
    main()

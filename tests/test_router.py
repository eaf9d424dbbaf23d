"""deploy/prefill_router.py before engines that are stand-ins."""

import asyncio
import contextlib
import io
import json
import zlib

import pytest

from tests.ipc.link.conftest import free_port
from tests.programs import load

aiohttp = pytest.importorskip("aiohttp")


class StandIn:
    """Answers with its name; a request's ``act`` says what else it does."""

    def __init__(self, name):
        self.name, self.asked, self.ended = name, [], asyncio.Event()
        self.models, self.hangs = [], False

    async def __call__(self, request):
        if request.path == "/health":
            await asyncio.sleep(60 * self.hangs)
            return aiohttp.web.Response()
        if request.path == "/v1/models":
            self.models.append(dict(request.headers))
            return aiohttp.web.json_response({})
        body = await request.json()
        self.asked.append((body, dict(request.headers)))
        if body.get("act") == "end" and self.name.endswith(("a", body["who"])):
            return aiohttp.web.Response(status=503, text=self.name)
        if body.get("act") == "refuse" and self.name.startswith("prefill"):
            return aiohttp.web.json_response({"error": "too long"}, status=400)
        if body.get("act") == "sleep" and self.name.startswith("decode"):
            await asyncio.sleep(60)
        if body.get("act") == "odd" and self.name.startswith("prefill"):
            return aiohttp.web.Response(text=body["answer"], content_type="application/json")
        if body.get("act") == "status" and self.name.startswith(body["who"]):
            return aiohttp.web.Response(status=body["status"], headers={"Location": "/else"})
        if body.get("act") == "flood" and self.name.startswith("decode"):
            return await self.flood(request)
        if not body["stream"]:
            there = {"kv_transfer_params": {"at": self.name}} if body.get("act") == "tell" else {}
            return aiohttp.web.json_response({"from": self.name} | there)
        stream = aiohttp.web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await stream.prepare(request)
        await stream.write(f"data: {self.name}\n\n".encode())
        if body.get("act") == "die":
            await stream.write(b'data: {"half')
            request.transport.abort()
        if body.get("act") == "stay":
            try:
                await asyncio.sleep(60)
            finally:
                self.ended.set()
        return stream

    async def flood(self, request):
        """Send for ever, to whom takes it."""
        stream = aiohttp.web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await stream.prepare(request)
        try:
            while True:
                await stream.write(b"data: " + b"x" * 65536 + b"\n\n")
        finally:
            self.ended.set()


class Running:
    """A router before stand-ins of some names; those of none are not there (``absent``: ports)."""

    def __init__(self, prefill, decode, **bounds):
        self.names = (prefill, decode)
        self.runners = []
        self.bounds = {"timeout": 20.0, "client_timeout": 20.0, "max_body": 1 << 20} | bounds

    async def serve(self, app, port, **limits):
        runner = aiohttp.web.AppRunner(app, **{"handler_cancellation": True} | limits)
        await runner.setup()
        self.runners.append(runner)
        await aiohttp.web.TCPSite(runner, "127.0.0.1", port).start()

    async def __aenter__(self):
        module, self.engines, self.absent, kinds = load("deploy", "prefill_router.py"), {}, [], []
        for kind, names in zip(("prefill", "decode"), self.names, strict=True):
            addresses = []
            for name in names:
                port = free_port()
                addresses.append(f"http://127.0.0.1:{port}")
                if name:
                    self.engines[name] = StandIn(name)
                    app = aiohttp.web.Application()
                    app.router.add_route("*", "/{path:.*}", self.engines[name])
                    await self.serve(app, port)
                else:
                    self.absent.append(port)
            kinds.append(module.Engines(kind, addresses))
        self.port = free_port()
        router = module.Router(*kinds, **self.bounds)
        await self.serve(router.app(), self.port, **router.limits())
        self.session = aiohttp.ClientSession(f"http://127.0.0.1:{self.port}")
        return self

    async def __aexit__(self, *_):
        await self.session.close()
        for runner in self.runners[::-1]:
            await runner.cleanup()

    async def ask(self, path="/v1/completions", **body):
        asked = {"prompt": [1], "max_tokens": 8, "n": 2, "stream": False} | body
        headers = {"Authorization": "Bearer x", "x-request-id": "mine"}
        async with self.session.post(path, json=asked, headers=headers) as answer:
            return answer.status, await answer.text()


def run(test, prefill, decode, **more):
    async def inside():
        async with asyncio.timeout(30), Running(prefill, decode, **more) as running:
            await test(running)

    asyncio.run(inside())


def test_prompts_go_to_one_kind_and_requests_in_turn_to_the_other():
    async def test(running):
        said = [await running.ask(**more) for more in ({}, {"stream": True}, {})]
        a = '{"from": "decode a"}'
        assert [text for _, text in said] == [a, "data: decode b\n\n", a]
        prompt, headers = running.engines["prefill a"].asked[1]
        asked = {"do_remote_decode": True, "do_remote_prefill": False}
        assert prompt.pop("kv_transfer_params") == asked
        assert prompt == {"prompt": [1], "max_tokens": 1, "min_tokens": 0, "stream": False}
        assert headers["Authorization"] == "Bearer x"
        assert "mine" in headers.values()
        whole, headers = running.engines["decode b"].asked[0]
        assert whole == {"prompt": [1], "max_tokens": 8, "n": 2, "stream": True}
        assert headers["Authorization"] == "Bearer x"
        await running.ask(act="tell", n=1)
        told = running.engines["decode b"].asked[1][0]
        assert told["kv_transfer_params"] == {"at": "prefill a"}
        async with running.session.get("/health") as answer:
            assert (answer.status, await answer.text()) == (200, "")

    run(test, ["prefill a"], ["decode a", "decode b"])


def test_who_is_not_there_is_passed_over_and_named_where_nobody_is():
    async def test(running):
        for _ in range(3):
            assert await running.ask() == (200, '{"from": "decode a"}')
        async with running.session.get("/health") as answer:
            assert answer.status == 200
            assert (await answer.text()).startswith("decode engine http://127.0.0.1:")

    run(test, ["prefill a"], [None, "decode a"])

    async def nobody(running):
        status, text = await running.ask()
        message = json.loads(text)["error"]["message"]
        assert (status, message[:40]) == (502, "no prefill engine answers: http://127.0.")
        assert not running.engines["decode a"].asked
        async with running.session.get("/health") as answer:
            assert answer.status == 503

    run(nobody, [None, None], ["decode a"])


def test_who_ends_is_passed_over_and_gives_its_word_where_all_do():
    async def test(running):
        for _ in range(2):
            assert await running.ask(act="end", who="a") == (200, '{"from": "decode b"}')
        assert (await running.ask(act="end", who="b"))[0] == 503
        assert len(running.engines["decode b"].asked) == 2

    run(test, ["prefill a", "prefill b"], ["decode a", "decode b"])


def test_refusals_broken_streams_and_clients_that_go_away():
    async def test(running):
        assert await running.ask(act="refuse") == (400, '{"error": "too long"}')
        assert not running.engines["decode a"].asked
        status, text = await running.ask(act="die", stream=True)
        first, half, last = text.strip().split("\n\n")
        assert (status, first, half) == (200, "data: decode a", 'data: {"half')
        error = json.loads(last.removeprefix("data: "))["error"]
        assert "ended amid its stream" in error["message"]
        body = {"prompt": [1], "stream": True, "act": "stay"}
        async with running.session.post("/v1/completions", json=body) as answer:
            assert await answer.content.readany()
        await running.engines["decode a"].ended.wait()

    run(test, ["prefill a"], ["decode a"])


async def refused(answer):
    """The status and message of an error in the form of vLLM's."""
    async with answer as answer:
        error = json.loads(await answer.text())["error"]
    assert error.keys() == {"message", "type", "code"}
    assert error["code"] == answer.status
    return answer.status, error["message"]


def test_what_clients_say_of_caches_is_not_believed_wherever_they_say_it():
    async def test(running):
        elsewhere = {"remote_host": "10.0.0.1"}
        both = {"kv_transfer_params": elsewhere, "ec_transfer_params": elsewhere}
        await running.ask(**both, vllm_xargs={**both, "mine": 1})
        prompt, _ = running.engines["prefill a"].asked[0]
        assert prompt.pop("kv_transfer_params").get("remote_host") is None
        whole, _ = running.engines["decode a"].asked[0]
        for body in (prompt, whole):
            assert not both.keys() & body.keys()
            assert body["vllm_xargs"] == {"mine": 1}
        async with running.session.get("/v1/models", headers={"Authorization": "Bearer x"}):
            assert running.engines["decode a"].models[0]["Authorization"] == "Bearer x"

    run(test, ["prefill a"], ["decode a"])


def test_bodies_that_are_no_object_too_long_or_packed_are_refused():
    async def test(running):
        async def post(body, **headers):
            data = io.BytesIO(body)
            return await refused(
                running.session.post("/v1/completions", data=data, headers=headers)
            )

        for body in (b"null", b"5", b'[["prompt", "a"]]', b"{", b"[" * 200_000, b"\xff", b""):
            assert await post(body) == (400, "the body is no JSON object")
        # Some levels can be read, and not be written.
        for depth in range(900, 1000, 4):
            deep = b'{"stream": false, "prompt": ' + b'{"a":' * depth + b"1" + b"}" * depth + b"}"
            async with running.session.post("/v1/completions", data=deep) as answer:
                assert answer.status in (200, 400), (depth, await answer.text())
        for engine in running.engines.values():
            engine.asked.clear()
        # Decoding by this charset takes seconds, and all clients wait.
        odd = {"Content-Type": "application/json; charset=punycode"}
        assert await post(b"a-" + b"a" * 300_000, **odd) == (400, "the body is no JSON object")
        bomb = zlib.compress(b" " * 100_000_000)
        packed = await post(bomb, **{"Content-Encoding": "deflate"})
        assert packed == (415, "send the body without Content-Encoding")
        status, message = await post(b" " * (1 << 20) + b"{}")
        assert (status, message) == (413, "the body has more than 1 MiB (--max-body)")
        assert not running.engines["prefill a"].asked

    run(test, ["prefill a"], ["decode a"])


def test_errors_are_the_routers_own_words():
    async def test(running):
        for answer in ("", "null", "[]", '"a"', "{", "[" * 200_000):
            status, text = await running.ask(act="odd", answer=answer)
            message = json.loads(text)["error"]["message"]
            assert status == 502
            assert "answered 200 with no JSON object" in message
        status, text = await running.ask(act="odd", answer='{"kv_transfer_params": 5}')
        assert (status, json.loads(text)["error"]["code"]) == (502, 502)
        for status in (204, 302, 304, 999):
            for who in ("prefill", "decode"):
                answered, text = await running.ask(act="status", who=who, status=status)
                assert answered == 502
                assert f"answered with status {status}" in json.loads(text)["error"]["message"]
        running.engines["decode a"].asked.clear()
        assert (await refused(running.session.get("/v1/completions")))[0] == 405
        assert (await refused(running.session.get("/v1/nothing")))[0] == 404
        assert not running.engines["decode a"].asked

    run(test, ["prefill a"], ["decode a"])


NO_KEYS = (b"Bearer no", b"Basic x", b"x", b"", b"Bearer \xff")


@contextlib.asynccontextmanager
async def connection(running, sent):
    """What the router says to these bytes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
    writer.write(sent)
    try:
        yield reader
    finally:
        writer.transport.abort()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


def test_a_key_is_wanted_before_the_body_is_read():
    async def test(running):
        # Of the body nothing comes: nobody waits for it.
        head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n"
        for header in (b"", *(b"Authorization: %s\r\n" % each for each in NO_KEYS)):
            async with connection(running, head + header + b"\r\n") as reader:
                assert (await reader.readline()).startswith(b"HTTP/1.1 401 ")
        assert (await refused(running.session.get("/v1/models")))[0] == 401
        async with running.session.get("/health") as answer:
            assert answer.status == 200
        assert (await running.ask())[0] == 200

    run(test, ["prefill a"], ["decode a"], keys=("y", "x"))


def test_clients_that_send_nothing_or_take_nothing_are_let_go(caplog):
    """Headers and bodies that do not come, and streams that are not read; the engine's request ends."""

    async def test(running):
        head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n"
        body = json.dumps({"prompt": [1], "stream": True, "act": "flood"}).encode()
        for sent in (b"", b"POST /v1", head[:40]):
            async with connection(running, sent) as reader:
                assert await reader.read() == b""
        async with connection(running, head % 100 + b"{") as reader:
            assert (await reader.readline()).startswith(b"HTTP/1.1 408 ")
            await reader.read()  # its end
        async with connection(running, head % len(body) + body):
            await running.engines["decode a"].ended.wait()

    run(test, ["prefill a"], ["decode a"], client_timeout=0.3)
    assert "Traceback" not in caplog.text, "any client could fill the log"


def test_a_key_of_any_bytes_is_one():
    async def test(running):
        assert await running.ask()

    run(test, ["prefill a"], ["decode a"], keys=("\udcff",))


def test_many_streams_and_an_engine_that_hangs_do_not_hold_up_health():
    async def test(running):
        body = {"prompt": [1], "stream": True, "act": "stay"}
        async with contextlib.AsyncExitStack() as open_ones:
            many = aiohttp.TCPConnector(limit=0)
            session = aiohttp.ClientSession(f"http://127.0.0.1:{running.port}", connector=many)
            await open_ones.enter_async_context(session)
            for _ in range(101):  # aiohttp has a hundred connections unless it is told
                stream = session.post("/v1/completions", json=body)
                answer = await open_ones.enter_async_context(stream)
                assert await answer.content.readany()
            running.engines["decode b"].hangs = True
            async with running.session.get("/health") as answer:
                assert answer.status == 200
                assert (await answer.text()).endswith(": TimeoutError\n")

    run(test, ["prefill a"], ["decode a", "decode b"])


def test_what_one_engine_may_still_compute_is_not_asked_of_another():
    async def test(running):
        status, text = await running.ask(act="sleep")
        assert status == 504
        assert "--timeout" in json.loads(text)["error"]["message"]
        assert not running.engines["decode b"].asked

    run(test, ["prefill a"], ["decode a", "decode b"], timeout=0.3)


def test_parameters_of_one_prompts_cache_are_not_handed_to_others():
    async def test(running):
        for more in ({"prompt": ["a", "b"]}, {"prompt": [[1], [2]]}, {"n": 2}):
            status, text = await running.ask(**{"act": "tell", "n": 1} | more)
            assert (status, json.loads(text)["error"]["code"]) == (400, 400)
        assert not running.engines["decode a"].asked
        for prompt in ("a", ["a"], [1, 2]):
            assert (await running.ask(act="tell", n=None, prompt=prompt))[0] == 200

    run(test, ["prefill a"], ["decode a"])


def test_an_engine_that_ends_an_idle_connection_just_then_is_not_gone():
    """As servers do that keep connections for some seconds: the next request comes on a new one."""

    async def once(reader, writer):
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        await reader.readexactly(int(head.split(b"content-length: ")[1].split()[0]))
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n")
        writer.write(b"Content-Type: application/json\r\n\r\n{}")
        await reader.read(1)
        writer.close()

    async def test(running):
        engines = [await asyncio.start_server(once, "127.0.0.1", port) for port in running.absent]
        for _ in range(3):
            status, text = await running.ask()
            assert status == 200, text
        for engine in engines:
            engine.close()

    run(test, [None], [None])

"""Prompts in one server's two stages, tokens in others', as docs/prefill.md has it."""

import asyncio
import json
import re
import signal
import subprocess
import sys
import time
import urllib.error
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import aiohttp
import psutil
import pytest
from tests.engine.engines import (
    answers,
    assert_stock,
    gone,
    greedy,
    in_shared_memory,
    in_shared_memory_of,
    model,
    prompts,
    tokens,
    words,
)
from tests.engine.servers import MODEL, VLLM, Server, health, metric, post, wait_until
from tests.engine.test_kv_connectors import PAGES, asked, on_shelf
from tests.engine.test_kv_files import of_role
from tests.ipc.link.conftest import free_port

pytestmark = [pytest.mark.engine, pytest.mark.slow]

ROUTER = Path(__file__).parents[2] / "deploy" / "prefill_router.py"
EXACT = {"enforce_eager": True, "dtype": "float32", "enable_prefix_caching": False}


def moved_by(connector, *, prefix_caching=False):
    settings = {"additional_config": {"sipipe": {"cores": "off"}}, **connector}
    as_json = {name: json.dumps(value) for name, value in settings.items()}
    exact = EXACT | {"enable_prefix_caching": prefix_caching}
    return words({**as_json, "max_model_len": 256, **PAGES, **exact})


start = partial(Server, forked=True)


class Router(AbstractContextManager):
    def __init__(self, log, prefill, *decode):
        port = free_port()
        self.address = f"http://127.0.0.1:{port}"
        words = ["--port", str(port), "--prefill", prefill.address]
        words += [word for one in decode for word in ("--decode", one.address)]
        with log.open("w") as out:
            self.process = subprocess.Popen(
                [sys.executable, str(ROUTER), *words], stdout=out, stderr=out
            )
        wait_until(lambda: health(self.address) == 200)

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()


def ask(address, prompt, params):
    """The status, and what was said."""
    body = {"prompt": prompt, "return_token_ids": True, **params}
    try:
        with post(address, body, 120) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def ask_all(address, batch):
    with ThreadPoolExecutor(16) as pool:
        return list(pool.map(partial(ask, address), batch["prompts"], batch["params"]))


def ids(told):
    assert {status for status, _ in told} == {200}, told
    return answers([[said["choices"][0]["token_ids"] for _, said in told]])


def hits(server):
    return metric(server.address, "vllm:external_prefix_cache_hits_total")


def test_prompts_in_two_stages_tokens_elsewhere(models, tmp_path):
    """From two stages to two (`vllm serve`) and to one, through the router; a decoder that is started
    again finds what was stored; without the prefill server everybody is told so."""
    path, batches = model(models), asked()
    store = tmp_path / "store"
    store.mkdir()
    takes = moved_by(of_role("kv_consumer", store), prefix_caching=True)
    prefill = start(
        path,
        tmp_path / "prefill.log",
        *moved_by(of_role("kv_producer", store), prefix_caching=True),
    )
    door = ("--distributed-executor-backend", "sipipe.Executor")
    with prefill, start(path, tmp_path / "two.log", *takes, *door, module=VLLM) as two:
        with (
            start(path, tmp_path / "one.log", *takes, "-pp", "1") as one,
            Router(tmp_path / "router.log", prefill, two, one) as router,
        ):
            assert_stock(ids(ask_all(router.address, batches[0])), path, batches)
            assert not hits(prefill)
            assert hits(two) + hits(one)
            for decode in (two, one):
                assert_stock(ids(ask_all(decode.address, batches[0])), path, batches)
                assert hits(decode)  # and where the other had a prompt, it has it now
            check_loss(router, prefill, batches[0])
            assert health(two.address) == health(one.address) == 200
        with start(path, tmp_path / "again.log", *takes, "-pp", "1") as again:
            assert_stock(ids(ask_all(again.address, batches[0])), path, batches)
            assert hits(again)


def check_loss(router, prefill, batch):
    """Its engine is killed under load: whole answers or clear errors, and nothing of it is left."""
    everybody = prefill.everybody()
    long = [prompt + [3 + copy] * 30 for copy in range(4) for prompt in batch["prompts"]]
    asked = {"prompts": long, "params": [{"temperature": 0.0, "max_tokens": 8}] * len(long)}
    with ThreadPoolExecutor(1) as pool:
        answers = pool.submit(ask_all, router.address, asked)
        time.sleep(0.5)
        prefill.find("EngineCore").send_signal(signal.SIGKILL)
        said = answers.result(200)
    assert {status for status, _ in said} <= {200, 500, 502}, said
    wait_until(lambda: health(prefill.address) == 0)
    status, told = ask(router.address, [5, 6], {"max_tokens": 4})
    message = told["error"]["message"]
    assert status == 502
    assert message.startswith(f"no prefill engine answers: {prefill.address} (")
    assert health(router.address) == 503
    assert gone(everybody)


LOAD = {"prompts": prompts(200, longest=200, seed=41), "params": greedy(200, seed=42)}
FIRST, ANSWERED = 120, 30
"""Requests before the decoder is started again, and how many are answered before it is killed."""


async def stream(session, address, index, ended):
    """How a request ended: "whole", with its tokens; "given up"; or a status, with what was said."""
    body = {"model": MODEL, "prompt": LOAD["prompts"][index], **LOAD["params"][index]}
    body |= {"stream": True, "return_token_ids": True}
    drawn = []
    async with session.post(f"{address}/v1/completions", json=body) as answer:
        if answer.status != 200:
            return answer.status, (await answer.json())["error"]["message"]
        async for line in answer.content:
            if not (data := line.removeprefix(b"data: ").strip()):
                continue
            if data == b"[DONE]":
                ended.append(index)
                return "whole", drawn
            said = json.loads(data)
            if "error" in said:
                return said["error"]["code"], said["error"]["message"]
            drawn += said["choices"][0]["token_ids"]
            if index % 5 == 0 and len(drawn) > 2:
                break
    return ("given up" if index % 5 == 0 else "cut off"), drawn


async def streams(address, indices, strike=None):
    """How each ended; some clients leave before they are answered, others amid their stream."""
    ended, found = [], {}
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=200)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:

        async def one(index):
            asked = stream(session, address, index, ended)
            try:
                found[index] = await asyncio.wait_for(asked, 0.5 if index % 10 == 3 else None)
            except TimeoutError:
                assert index % 10 == 3, "it hangs"
                found[index] = "given up", []

        async def when_some_have_ended():
            while len(ended) < ANSWERED:
                await asyncio.sleep(0.01)
            strike()

        tasks = [one(index) for index in indices]
        await asyncio.gather(*tasks, *([when_some_have_ended()] if strike else []))
    return found


def idle(server):
    """No request is left in it, and no block of its KV cache is held."""
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    return not any(metric(server.address, f"vllm:{name}") for name in names)


def test_a_decoder_ends_and_comes_back_while_storage_is_slow(models, tmp_path):
    """Of 200 requests some are given up. Whole answers are stock's, the others are told what is
    gone, none hangs; nothing is held in the engines, on the disk or in shared memory."""
    path = model(models)
    store, scratch = tmp_path / "store", tmp_path / "scratch"
    store.mkdir()
    scratch.mkdir()
    slow = on_shelf(store, policy="recompute", slow=0.1)

    def started(log, *more, port=None):
        words = [*moved_by(slow), *more]
        return start(path, tmp_path / log, *words, temporary=scratch, port=port)

    prefill, decode = started("prefill.log"), started("decode.log", "-pp", "1")
    with prefill, Router(tmp_path / "router.log", prefill, decode) as router:
        held = psutil.Process(router.process.pid).num_fds()
        with decode:
            everybody = decode.everybody()
            mapped = in_shared_memory_of(everybody)  # perhaps none
            kill = decode.find("EngineCore").kill
            found = asyncio.run(streams(router.address, range(FIRST), kill))
            wait_until(lambda: health(decode.address) == 0)
            assert gone(everybody)
        status, told = ask(router.address, [5, 6], {"max_tokens": 4})
        assert status == 502
        assert told["error"]["message"].startswith(f"no decode engine answers: {decode.address} (")
        with started("again.log", "-pp", "1", port=decode.port) as again:
            wait_until(lambda: health(router.address) == 200)
            later = asyncio.run(streams(router.address, range(FIRST, len(LOAD["prompts"]))))
            wait_until(partial(idle, prefill))  # all is stored
            asyncio.run(streams(router.address, range(20)))
            wait_until(lambda: metric(again.address, "vllm:external_prefix_cache_hits_total"))
            for server in (prefill, again):
                wait_until(partial(idle, server))
            wait_until(lambda: psutil.Process(router.process.pid).num_fds() <= held + 8)
            everybody = prefill.everybody() + again.everybody()
            mapped |= in_shared_memory_of(everybody)
    assert gone(everybody)
    wait_until(lambda: not mapped & in_shared_memory())
    assert not list(scratch.iterdir())
    told = {said for end, said in found.values() if isinstance(end, int)}
    assert told
    expected = "the engine has ended: the engine process EngineCore|http.* ended amid|no decode"
    assert not {text for text in told if not re.match(expected, text)}
    assert not {said for end, said in later.values() if isinstance(end, int)}
    assert {end for end, _ in later.values()} == {"whole", "given up"}
    found |= later

    answered = {index: said for index, (end, said) in found.items() if end == "whole"}
    assert len(answered) > ANSWERED
    requests = [
        {"outputs": [{"token_ids": answered[index]}]} if index in answered else None
        for index in range(len(LOAD["prompts"]))
    ]

    def same(results, stock):
        for request, stock_request in zip(results[0], stock[0], strict=True):
            if request is not None:
                assert tokens([request]) == tokens([stock_request])

    assert_stock([requests], path, [LOAD], same)

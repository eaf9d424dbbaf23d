"""Prompts in one server's two stages, tokens in others', as docs/prefill.md has it."""

import json
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
from tests.engine.engines import assert_stock, gone, model
from tests.engine.servers import MODEL, VLLM, Server, health, wait_until
from tests.engine.test_kv_connectors import PAGES, asked
from tests.ipc.link.conftest import free_port

pytestmark = [pytest.mark.engine, pytest.mark.slow]

ROUTER = Path(__file__).parents[2] / "deploy" / "prefill_router.py"
HIT = "Inject KV cache"


def stored_by(role, directory):
    connector = {"kv_connector": "ExampleConnector", "kv_role": role}
    connector["kv_connector_extra_config"] = {"shared_storage_path": str(directory)}
    # It stores a prompt's first chunk for the whole of it.
    options = ["--no-enable-chunked-prefill", "--kv-transfer-config", json.dumps(connector)]
    options += ["--additional-config", json.dumps({"sipipe": {"cores": "off"}})]
    for name, value in {"max_model_len": 256, **PAGES}.items():
        options += [f"--{name.replace('_', '-')}", str(value)]
    return [*options, "--enforce-eager", "--dtype", "float32", "--no-enable-prefix-caching"]


start = partial(Server, forked=True)


class Router:
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

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()


def ask(address, prompt, params):
    """The status, and what was said."""
    body = {"model": MODEL, "prompt": prompt, "return_token_ids": True, **params}
    request = urllib.request.Request(
        f"{address}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def ask_all(address, batch):
    with ThreadPoolExecutor(16) as pool:
        return list(pool.map(partial(ask, address), batch["prompts"], batch["params"]))


def ids(answers):
    assert {status for status, _ in answers} == {200}, answers
    return [{"outputs": [{"token_ids": said["choices"][0]["token_ids"]}]} for _, said in answers]


def hits(server):
    return len(re.findall(HIT, server.log.read_text()))


def test_prompts_in_two_stages_tokens_elsewhere(models, tmp_path):
    """From two stages to two (`vllm serve`) and to one, through the router; a decoder that is started
    again finds what was stored; without the prefill server everybody is told so."""
    path, batches = model(models), asked()
    store = tmp_path / "store"
    store.mkdir()
    takes = stored_by("kv_consumer", store)
    prefill = start(path, tmp_path / "prefill.log", *stored_by("kv_producer", store))
    door = ("--distributed-executor-backend", "sipipe.Executor")
    with prefill, start(path, tmp_path / "two.log", *takes, *door, module=VLLM) as two:
        with (
            start(path, tmp_path / "one.log", *takes, "-pp", "1") as one,
            Router(tmp_path / "router.log", prefill, two, one) as router,
        ):
            assert_stock([ids(ask_all(router.address, batches[0]))], path, batches)
            assert not hits(prefill)
            assert hits(two) + hits(one)
            for decode in (two, one):
                assert_stock([ids(ask_all(decode.address, batches[0]))], path, batches)
                assert hits(decode)
            check_loss(router, prefill, batches[0])
            assert health(two.address) == health(one.address) == 200
        with start(path, tmp_path / "again.log", *takes, "-pp", "1") as again:
            assert_stock([ids(ask_all(again.address, batches[0]))], path, batches)
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

"""Data-parallel replicas: pipelines of one server, behind vLLM's balancer."""

import json
import re
import signal
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.engine import servers
from tests.engine.engines import answers, assert_stock, gone, model, words
from tests.engine.servers import VLLM, Server, health, wait_until
from tests.engine.test_kv_connectors import asked, on_shelf

pytestmark = [pytest.mark.engine, pytest.mark.slow]

OPTIONS = {"dtype": "float32", "max_model_len": 256, "max_num_seqs": 8, "enforce_eager": True}
OPTIONS |= {"enable_prefix_caching": False, "data_parallel_size": 2}


def replicas(path, log, *more, **options):
    return Server(path, log, *words(OPTIONS), *more, **options)


def tokens(server, batch):
    """Of all prompts at once, of which each replica gets some."""

    def ask(prompt, params):
        return servers.complete(server.address, prompt, {**params, "logprobs": 1})[0]

    with ThreadPoolExecutor(16) as clients:
        return answers([clients.map(ask, batch["prompts"], batch["params"])])


def said(server, asked):
    """The texts of a completion."""
    with servers.post(server.address, asked) as answer:
        return [choice["text"] for choice in json.load(answer)["choices"]]


def figures(server, name):
    """By engine, the sum of a metric's values."""
    with urllib.request.urlopen(f"{server.address}/metrics", timeout=10) as answer:
        found = re.findall(rf"^{name}{{([^}}]*)}} (\S+)$", answer.read().decode(), re.MULTILINE)
    by_engine = {}
    for labels, value in found:
        engine = re.search(r'engine="(\d+)"', labels)[1]
        by_engine[engine] = by_engine.get(engine, 0.0) + float(value)
    return by_engine


@pytest.mark.parametrize("door", ["sipipe", "vllm"])
def test_replicas_of_two_stages_equal_stock_and_end_together(models, tmp_path, door):
    """With two API servers, as is vLLM's default, which read what engines write; or with one, which
    asks their pages."""
    path, batches = model(models), asked()
    more, options = ("--trace", str(tmp_path / "trace")), {}
    if door == "vllm":
        more = ("--distributed-executor-backend", "sipipe.Executor", "--api-server-count", "1")
        options = {"module": VLLM, "forked": True}
    with replicas(path, tmp_path / "log", *more, **options) as server:
        everybody = server.everybody()
        assert_stock(tokens(server, batches[0]), path, batches)
        asked_for = sum(params["max_tokens"] for params in batches[0]["params"])
        # Where several API servers answer, engines write their figures once a second.
        wait_until(lambda: sum(figures(server, "sipipe_tokens_total").values()) == asked_for)
        drawn = figures(server, "sipipe_tokens_total")
        assert set(drawn) == {"0", "1"}
        assert all(drawn.values())
        # Its two answers come from both replicas: the same arrival of each.
        pair = {"prompt": [5, 6, 7], "n": 2, "max_tokens": 16, "temperature": 1, "ignore_eos": True}
        for one, other in (said(server, pair) for _ in range(3)):
            assert one != other
        # One dead engine ends a server of vLLM's.
        server.find("Worker_PP1").send_signal(signal.SIGKILL)
        wait_until(lambda: health(server.address) == 0)
        wait_until(lambda: gone(everybody))
    assert "replica 0 of 2" in server.log.read_text()
    assert "replica 1 of 2" in server.log.read_text()
    if door == "sipipe":
        assert {at.name for at in (tmp_path / "trace").iterdir()} == {"replica-0", "replica-1"}


def test_replicas_share_what_is_stored(models, tmp_path):
    """Each has an engine id of its own, which all of its stages have."""
    path, batches = model(models), asked()
    connector = json.dumps(on_shelf(tmp_path, policy="recompute")["kv_transfer_config"])
    more = ("--kv-transfer-config", connector, "--block-size", "32")
    with replicas(path, tmp_path / "log", *more, forked=True) as server:
        for _ in range(2):
            assert_stock(tokens(server, batches[0]), path, batches)
        name = "vllm:external_prefix_cache_hits_total"
        wait_until(lambda: sum(figures(server, name).values()))
        everybody = server.everybody()
    assert len(list(tmp_path.glob("engine-*"))) == 2
    assert gone(everybody)

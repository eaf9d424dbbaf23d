"""LMCache's server keeps the caches of SiPipe's stages, and outlives engines.

Its other connector, LMCacheConnectorV1, has none for CPUs in 0.5.6 (`No supported cpu connector
found`), in stock too: it computes everything, after 3 s for each request.
"""

import importlib.util
import json
import socket
import subprocess
import sys

import pytest
from tests.engine.engines import Engine, assert_stock, model, shared, words
from tests.engine.servers import Server, metric, wait_until
from tests.engine.test_kv_connectors import PAGES, asked
from tests.engine.test_prefill import EXACT, ask_all, ids
from tests.ipc.link.conftest import free_port

pytestmark = [pytest.mark.engine, pytest.mark.slow]
if importlib.util.find_spec("lmcache") is None:
    pytest.skip("lmcache is not installed (pip install lmcache)", allow_module_level=True)

CHUNK = 32


@pytest.fixture
def keeper(tmp_path):
    """The port of a server of LMCache's."""
    port, log = free_port(), tmp_path / "lmcache.log"
    options = {"port": port, "chunk_size": CHUNK, "l1_size_gb": 0.25, "eviction_policy": "LRU"}
    options |= {"supported_transfer_mode": "auto", "shm_name": f"sipipe-test-{port}"}
    options |= {"disable_observability": True}
    command = [sys.executable, "-m", "lmcache.v1.multiprocess.server", *words(options)]
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out)

    def listens():
        assert process.poll() is None, log.read_text()[-2000:]
        with socket.socket() as one:
            return not one.connect_ex(("localhost", port))

    try:
        wait_until(listens)
        yield port
    finally:
        process.terminate()
        process.wait(60)


def test_what_stages_stored_is_loaded_by_the_next_engine(models, tmp_path, keeper):
    """By an engine in Python; then by `sipipe serve`, whose processes are forks where they can be."""
    path, batches = model(models), asked()
    extra = {"lmcache.mp.host": "tcp://localhost", "lmcache.mp.port": keeper}
    connector = {"kv_connector": "LMCacheMPConnector", "kv_role": "kv_both"}
    connector["kv_connector_extra_config"] = extra
    anew = {"SIPIPE_TESTS_START_ANEW": "1"}
    with Engine(path, **shared(2), **PAGES, kv_transfer_config=connector, env=anew) as engine:
        said = engine.run(batches)
    assert_stock(said, path, batches)
    assert not any(request["cached"] for request in said[0])
    options = {"kv_transfer_config": json.dumps(connector), "max_model_len": 256, **PAGES, **EXACT}
    with Server(path, tmp_path / "log", *words(options)) as server:
        assert_stock(ids(ask_all(server.address, batches[0])), path, batches)
        found = metric(server.address, "vllm:external_prefix_cache_hits_total")
    lengths = [len(prompt) - 1 for prompt in batches[0]["prompts"]]
    assert found == sum(n // CHUNK * CHUNK for n in lengths) > 0

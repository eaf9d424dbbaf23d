"""Two hosts (namespaces): stock's tokens, and every kind of loss.

One test of `make test` has the head begin with vLLM imported; the others are ``sipipe serve`` as
users start it. What the failure table of docs/multi-host.md says is tested here; times are promised
there, and bounded here by what a busy machine needs.
"""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import sys
import time

import psutil
import pytest
from tests.engine.engines import Engine, assert_stock, engine_environment, model, tokens
from tests.engine.forks import Forked
from tests.engine.test_parity import mixed_batches

from sipipe.engine import server

pytestmark = pytest.mark.engine

SECRET = "a secret of the tests"
START = 300.0  # seconds; two engines' worth of imports on a busy machine
NOTICED = 20.0
PORT = 29700
SETTINGS = {
    "dtype": "float32",
    "max_model_len": 1024,
    "max_num_seqs": 64,
    "max_num_batched_tokens": 128,
    "enable_prefix_caching": False,
    "num_gpu_blocks_override": 256,
    "enforce_eager": True,
}
OPTIONS = [
    word
    for name, value in SETTINGS.items()
    for word in (
        [f"--{'' if value else 'no-'}{name.replace('_', '-')}"]
        if isinstance(value, bool)
        else [f"--{name.replace('_', '-')}", str(value)]
    )
]
SERVED = ["--port", "8000", "--host", "127.0.0.1", "--served-model-name", "m"]
SERVED += ["--cores", "off", "--samplers", "2"]

CLIENT = """
import json, sys, urllib.request
from concurrent.futures import ThreadPoolExecutor
def ask(prompt, params):
    body = {"model": "m", "prompt": prompt, "return_token_ids": True, **params}
    request = urllib.request.Request("http://127.0.0.1:8000/v1/completions", json.dumps(body).encode(),
                                     {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as answer:
        return json.load(answer)["choices"][0]["token_ids"]
for batch in json.load(open(sys.argv[1])):
    with ThreadPoolExecutor(64) as pool:
        found = list(pool.map(ask, batch["prompts"], batch["params"]))
    print(json.dumps(found), flush=True)
"""


class Served:
    """A model served by two hosts, with a log for each."""

    def __init__(self, cluster, path, directory, *options, secrets=(SECRET, SECRET), nodes=(0, 1)):
        self.cluster, self.directory = cluster, directory
        self.logs = [directory / f"host{node}.log" for node in (0, 1)]
        self.path, self.options, self.secrets = str(path), options, secrets
        self.hosts = {node: self.start(node) for node in nodes}

    def start(self, node, *more):
        here = [*OPTIONS, *SERVED, *self.options, *more]
        command = [sys.executable, "-m", "sipipe", "serve", self.path, *here, "--nnodes", "2"]
        command += ["--master-addr", self.cluster.hosts[0].address, "--master-port", str(PORT)]
        command += ["--node-rank", str(node)] + (["--headless"] if node else [])
        with self.logs[node].open("w") as log:
            return self.cluster.hosts[node].start(
                command,
                stdout=log,
                stderr=log,
                env=engine_environment() | {"SIPIPE_SECRET": self.secrets[node]},
            )

    def log(self, node) -> str:
        return self.logs[node].read_text()

    def wait_for(self, node, *texts, seconds=START) -> str:
        """Which of ``texts`` comes first in a host's log."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            for text in texts:
                if text in self.log(node):
                    return text
            if self.hosts[node].poll() is not None:
                break
            time.sleep(0.2)
        pytest.fail(f"{texts} not in\n" + "\n".join(self.log(n)[-3000:] for n in (0, 1)))

    def wait_served(self) -> None:
        self.wait_for(0, "Application startup complete")

    def run(self, batches) -> list:
        asked = self.directory / "asked.json"
        asked.write_text(json.dumps(batches))
        client = self.cluster.hosts[0].python(CLIENT, str(asked))
        said, _ = client.communicate(timeout=START)
        assert client.returncode == 0
        return [[{"outputs": [{"token_ids": t}]} for t in json.loads(x)] for x in said.splitlines()]

    def command(self, node) -> psutil.Process:
        """What `sipipe serve` started on a host: the front end or the agent."""
        return self.process(node, "sipipe.engine.server")

    def agent(self) -> psutil.Process:
        return self.command(1)

    def process(self, node, title) -> psutil.Process:
        """One of a host's processes, by a part of its command line."""
        for process in self.cluster.hosts[node].processes():
            with contextlib.suppress(psutil.Error):
                if title in " ".join(process.cmdline()):
                    return process
        pytest.fail(f"no {title} on host {node}")

    def end(self) -> None:
        """End the engine as Ctrl-C on the head does."""
        psutil.Process(self.hosts[0].pid).children()[0].send_signal(signal.SIGTERM)
        self.ended()

    def ended(self, *nodes, seconds=NOTICED) -> None:
        """Both hosts are empty again."""
        for node in nodes or (0, 1):
            left = self.cluster.hosts[node].wait_empty(seconds)
            assert not left, (node, left, self.log(0)[-3000:], self.log(1)[-3000:])

    def close(self) -> None:
        for host in self.cluster.hosts:
            host.cable("up")
            host.end_all()


@pytest.fixture
def serve(cluster, models, tmp_path):
    served = []

    def serve(*options, **more) -> Served:
        served.append(Served(cluster, model(models), tmp_path, *options, **more))
        return served[-1]

    yield serve
    for one in served:
        one.close()


def same_tokens(found, stock):
    for said, expected in zip(found, stock, strict=True):
        assert tokens(said) == tokens(expected)


def test_two_hosts_equal_stock_and_end_together(cluster, models, tmp_path):
    """An engine in Python, and a host agent for its second stage."""
    head, other = cluster.hosts
    environment = {"SIPIPE_SECRET": SECRET, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    hosts = {"count": 2, "address": head.address, "port": PORT}
    ours, theirs = socket.socketpair()
    log = tmp_path / "agent.log"
    asked = [[str(model(models)), *OPTIONS, "-pp", "2"], {"hosts": hosts, "cores": "off"}, 1]
    with ours, theirs, log.open("w") as out:
        agent = Forked(
            server.__file__,
            [json.dumps(asked)],
            env=engine_environment() | environment,
            out=out,
            ends=[theirs.fileno()],
            host=other.pid,
        )
        theirs.close()
        own = {"hosts": hosts, "cores": "off"}
        with Engine(
            model(models), sipipe=own, env=environment, host=head.pid,
            pipeline_parallel_size=2, **SETTINGS
        ) as engine:  # fmt: skip
            found = engine.run(mixed_batches())
            engine.close()
        assert_stock(found, model(models), mixed_batches(), same_tokens)
        agent.wait(NOTICED)
        agent.stdin.close()
    assert "the engine ended" in log.read_text()
    for host in cluster.hosts:
        assert not host.wait_empty(NOTICED)


@pytest.mark.slow
@pytest.mark.parametrize(("pp", "tp"), [(2, 2), (4, 1)])
def test_more_degrees_on_two_hosts_equal_stock(serve, models, pp, tp):
    served = serve("-pp", str(pp), "-tp", str(tp))
    served.wait_served()
    assert "links: zeromq" in served.log(0)
    assert_stock(served.run(mixed_batches()), model(models), mixed_batches(), same_tokens)
    # Replaced there, at a point of the stream that the head knows.
    served.process(1, "sipipe.sampler").kill()
    assert_stock(served.run(mixed_batches()), model(models), mixed_batches(), same_tokens)
    served.wait_for(1, "starting it again")
    served.end()
    # vLLM gives its engine process no time to say so, and kills it.
    assert "the engine ended" in served.log(1) or "this host's stages end" in served.log(1)


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["cable", "agent killed", "agent stopped", "worker killed"])
def test_a_loss_ends_the_engine_on_both_hosts(serve, loss):
    served = serve("-pp", "2")
    served.wait_served()
    if loss == "cable":
        served.cluster.hosts[0].cable("down")
    elif loss == "agent killed":
        served.agent().kill()
    elif loss == "agent stopped":
        served.agent().suspend()
    else:
        served.process(1, "Worker_PP").kill()
    if loss == "worker killed":
        served.wait_for(0, "on host 1 died", seconds=NOTICED)
        served.wait_for(1, "the engine ended: stage worker stage1.0", seconds=NOTICED)
    else:
        named = "host 1 (10.77.18.2, stage 1) died or cannot be reached"
        served.wait_for(0, named, seconds=NOTICED)
    if loss == "agent stopped":
        served.ended(0)
        served.agent().resume()
        served.hosts[1].send_signal(signal.SIGCONT)
    served.ended()


@pytest.mark.slow
def test_a_killed_head_ends_the_other_host(serve):
    served = serve("-pp", "2")
    served.wait_served()
    served.command(0).kill()
    served.ended()
    # The engine outlives its front end by a moment, and may still say goodbye.
    assert "the engine ended" in served.log(1) or "died or cannot be reached" in served.log(1)


@pytest.mark.slow
def test_hosts_that_do_not_fit_say_so(serve, cluster):
    served = serve("-pp", "2", secrets=(SECRET, "another secret of the tests"))
    served.wait_for(1, "refused this host: the secret (SIPIPE_SECRET) is not the same")
    served.secrets = (SECRET, SECRET)
    served.hosts[1] = served.start(1, "--dtype", "bfloat16")
    difference = "--dtype is torch.float32 on the head and torch.bfloat16 there"
    served.wait_for(0, difference)
    served.wait_for(1, f"refused this host: host 1 (10.77.18.2) does not fit: {difference}")
    served.ended()


@pytest.mark.slow
def test_a_port_that_is_taken_and_a_head_that_is_not_there(serve, cluster):
    listens = "import socket, sys; s = socket.create_server((sys.argv[1], int(sys.argv[2]))); "
    there = cluster.hosts[1]
    blocker = there.python(listens + "print(1, flush=True); input()", there.address, str(PORT + 1),
                           stdin=-1)  # fmt: skip
    assert blocker.stdout.readline() == "1\n"
    settings = json.dumps({"sipipe": {"start_timeout": 15}})
    served = serve("-pp", "2", "--additional-config", settings, nodes=(1,))
    served.wait_for(1, f"port {PORT + 1} of {there.address} cannot be listened on")
    blocker.communicate("\n")
    served.hosts[1] = served.start(1)
    served.wait_for(1, f"the head (10.77.18.1:{PORT}) cannot be reached within 15 s")

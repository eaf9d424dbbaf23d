"""A model that two hosts serve by ``sipipe serve``, and what tests do with it."""

from __future__ import annotations

import json
import signal
import sys
import time

import psutil
import pytest
from tests.engine.engines import DEFAULTS, answers, engine_environment, named, words

SECRET = "a secret of the tests"
START = 300.0  # seconds; two engines' worth of imports on a busy machine
NOTICED = 20.0
PORT = 29700
SETTINGS = DEFAULTS | {"max_model_len": 1024}
OPTIONS = words(SETTINGS)
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

    def __init__(self, cluster, path, directory, *options, environments=({}, {}), nodes=(0, 1)):
        self.cluster = cluster
        self.directory = directory
        self.logs = [directory / f"host{node}.log" for node in (0, 1)]
        self.path = str(path)
        self.options = options
        self.environments = environments
        self.hosts = {node: self.start(node) for node in nodes}

    def start(self, node, *more):
        """Start the command of host ``node``, with ``more`` options."""
        command = [sys.executable, "-m", "sipipe", "serve", self.path]
        command += [*OPTIONS, *SERVED, *self.options, *more]
        command += ["--nnodes", "2", "--node-rank", str(node)]
        command += ["--master-addr", self.cluster.hosts[0].address, "--master-port", str(PORT)]
        if node > 0:
            command.append("--headless")
        with self.logs[node].open("w") as log:
            return self.cluster.hosts[node].start(
                command,
                stdout=log,
                stderr=log,
                env=engine_environment() | {"SIPIPE_SECRET": SECRET} | self.environments[node],
            )

    def log(self, node) -> str:
        return self.logs[node].read_text()

    def wait_for(self, node, *texts, seconds=START) -> str:
        """Wait until a host's log has one of ``texts``, and return that one."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            for text in texts:
                if text in self.log(node):
                    return text
            if self.hosts[node].poll() is not None:
                break
            time.sleep(0.2)
        pytest.fail(f"{texts} not in\n" + "\n".join(self.log(n)[-3000:] for n in (0, 1)))

    def hears(self, what, says, seconds=NOTICED, began=None) -> None:
        """Wait until the log of each host in ``says`` has its text. pytest -s shows after how long, for
        docs/multi-host.md."""
        began = began or time.monotonic()
        missing = dict(says)
        while missing:
            late = time.monotonic() - began > seconds
            for node, text in list(missing.items()):
                if text in self.log(node):
                    print(f"{what}: host {node} said it after {time.monotonic() - began:.1f} s")
                    del missing[node]
            assert not (missing and late), (missing, self.log(0)[-3000:], self.log(1)[-3000:])
            time.sleep(0.05)

    def wait_served(self) -> None:
        self.wait_for(0, "Application startup complete")

    def run(self, batches) -> list:
        """The results of ``batches``, from a client on the main host."""
        file = self.directory / "batches.json"
        file.write_text(json.dumps(batches))
        return answers(map(json.loads, self.client(CLIENT, str(file)).splitlines()))

    def client(self, code, *arguments) -> str:
        """The output of a client on the main host, which runs ``code``."""
        client = self.cluster.hosts[0].python(code, *arguments)
        output, _ = client.communicate(timeout=START)
        assert client.returncode == 0
        return output

    def command(self, node) -> psutil.Process:
        """The process that `sipipe serve` started on a host: the front end or the agent."""
        return self.process(node, "sipipe.engine.start.server")

    def process(self, node, title) -> psutil.Process:
        """One of a host's processes, by a part of its command line."""
        processes = self.find(node, title)
        assert processes, f"no {title} on host {node}"
        return processes[0]

    def find(self, node, title) -> list[psutil.Process]:
        """A host's processes, by a part of their command lines."""
        return named(self.cluster.hosts[node].processes(), title)

    def end(self) -> None:
        """End the engine as Ctrl-C on the main host does."""
        psutil.Process(self.hosts[0].pid).children()[0].send_signal(signal.SIGTERM)
        self.ended()

    def ended(self, *nodes, seconds=NOTICED) -> None:
        """Wait until the hosts ``nodes``, or both, are empty again."""
        for node in nodes or (0, 1):
            left = self.cluster.hosts[node].wait_empty(seconds)
            assert not left, (node, left, self.log(0)[-3000:], self.log(1)[-3000:])

    def close(self) -> None:
        for host in self.cluster.hosts:
            host.cable("up")
            host.mute(False)
            host.end_all()

"""A Ray cluster of two hosts (namespaces) that an engine is placed on: stock's tokens, every loss of
Ray's own processes, and an engine in Python inside a placement group, also under Ray Serve.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import subprocess
import sys
import time

import psutil
import pytest
from tests.engine.engines import answers, assert_stock, engine_environment, model, named
from tests.engine.served_hosts import NOTICED, OPTIONS, SERVED, SETTINGS, START, Served
from tests.engine.test_parity import mixed_batches

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None, reason="Ray is not installed: see CONTRIBUTING.md"
    ),
]

RAY = [sys.executable, "-m", "ray.scripts.scripts", "start"]
RAY += ["--num-cpus=4", "--disable-usage-stats"]
CONTROL_STORE_LOST = 120.0  # seconds; Ray gives up after 60


@pytest.fixture
def ray(cluster):
    """Ray's own processes on both hosts, by process id, and names in their /dev/shm."""
    first, second = cluster.hosts
    joins = [["--head", "--include-dashboard=false", f"--node-ip-address={first.address}"]]
    joins += [[f"--address={first.address}:6379", f"--node-ip-address={second.address}"]]
    for host, join in zip(cluster.hosts, joins, strict=True):
        # A /tmp/ray of its own, for this host's processes to come as well.
        mount = "mkdir -p /tmp/ray && (mountpoint -q /tmp/ray || mount -t tmpfs none /tmp/ray)"
        host.start(["sh", "-c", mount]).communicate(timeout=START)
        start = host.start(
            [*RAY, *join], env=engine_environment(), stdout=-1, stderr=subprocess.STDOUT, text=True
        )
        output, _ = start.communicate(timeout=START)
        assert start.returncode == 0, output
    yield [{process.pid for process in host.processes()} for host in cluster.hosts]
    for host in cluster.hosts:
        host.cable("up")
        host.end_all()


class Placed(Served):
    """A model that the first host serves with ``--distributed-executor-backend ray``."""

    def __init__(self, cluster, ray, path, directory, *options):
        self.ray = ray
        super().__init__(cluster, path, directory, *options, nodes=(0,))
        self.logs[1].write_text("")  # what the agent says comes through Ray to the main host

    def start(self, node, *more):
        command = [sys.executable, "-m", "sipipe", "serve", self.path, *OPTIONS, *SERVED]
        command += ["--distributed-executor-backend", "ray", *self.options, *more]
        with self.logs[node].open("w") as log:
            return self.cluster.hosts[node].start(
                command, stdout=log, stderr=log, env=engine_environment()
            )

    def ended(self, *nodes, seconds=NOTICED) -> None:
        """Nothing but Ray's own processes is left on the hosts."""
        for node in nodes or (0, 1):
            left = left_beside(self.ray[node], self.cluster.hosts[node], seconds)
            assert not left, (node, left, self.log(0)[-5000:])


RAYS = ("ray::IDLE", "ray::DashboardAgent", "ray::RuntimeEnvAgent")
"""Beginnings of the names of processes that a raylet starts when it likes."""


def left_beside(ray, host, seconds) -> list[str]:
    """Command lines of processes that are not Ray's own."""

    def strangers():
        processes = []
        for process in host.processes():
            with contextlib.suppress(psutil.Error):
                if process.pid not in ray and not process.name().startswith(RAYS):
                    processes.append(process)
        return processes

    psutil.wait_procs(strangers(), timeout=seconds)
    named = []
    for process in strangers():
        with contextlib.suppress(psutil.Error):
            named.append(" ".join(process.cmdline()) or process.name())
    return named


def test_a_ray_cluster_gives_stocks_tokens(cluster, ray, models, tmp_path):
    served = Placed(cluster, ray, model(models), tmp_path, "-pp", "2", "-tp", "2")
    served.wait_served()
    assert_stock(served.run(mixed_batches()), model(models), mixed_batches())
    log = served.log(0)
    assert "host 1 of 2: stage 1 and the samplers" in log
    assert "links: zeromq" in log
    assert "Ray has no token (RAY_AUTH_MODE=token)" in log
    served.end()


@pytest.mark.parametrize(
    ("node", "lost", "says", "seconds"),
    [
        (1, "raylet/raylet", "host 1 (10.77.18.2, stage 1) was ended", NOTICED),
        (0, "gcs/gcs_server", "Failed to connect to GCS within 60 seconds", CONTROL_STORE_LOST),
    ],
    ids=["raylet", "control store"],
)
def test_what_ray_loses_ends_the_engine(cluster, ray, models, tmp_path, node, lost, says, seconds):
    served = Placed(cluster, ray, model(models), tmp_path, "-pp", "2")
    served.wait_served()
    began = time.monotonic()
    served.process(node, lost).kill()
    if seconds > NOTICED:  # until Ray notices, nothing on a request's way does
        assert served.run(mixed_batches()[1:])
    served.hears(f"{lost} killed", {0: says}, seconds=seconds, began=began)
    served.ended()
    print(f"{lost} killed: nothing left after {time.monotonic() - began:.1f} s")


IN_A_GROUP = """
import json, sys
import ray
ray.init(address="auto")
path, asked, settings, addresses = json.loads(sys.argv[1])
bundles = [{"CPU": 1, f"node:{address}": 0.001} for address in addresses]
group = ray.util.placement_group(bundles, strategy="STRICT_SPREAD")
ray.get(group.ready())

class Engine:
    def run(self):
        import sipipe
        from vllm import LLM, SamplingParams
        llm = LLM(path, distributed_executor_backend=sipipe.Executor, pipeline_parallel_size=2,
                  additional_config={"sipipe": {"cores": "off"}}, **settings)
        return [
            [list(output.outputs[0].token_ids) for output in llm.generate(
                [{"prompt_token_ids": prompt} for prompt in batch["prompts"]],
                [SamplingParams(**params) for params in batch["params"]], use_tqdm=False)]
            for batch in asked
        ]

strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
inside = strategy(group, 0, placement_group_capture_child_tasks=True)
engine = ray.remote(num_cpus=0, scheduling_strategy=inside)(Engine).remote()
print("SAID" + json.dumps(ray.get(engine.run.remote())))
"""


def test_an_engine_in_python_is_placed_by_its_group(cluster, ray, models, tmp_path):
    addresses = [host.address for host in cluster.hosts]
    arguments = json.dumps([str(model(models)), mixed_batches(), SETTINGS, addresses])
    log = tmp_path / "log"
    with log.open("w") as out:
        program = cluster.hosts[0].start(
            [sys.executable, "-c", IN_A_GROUP, arguments],
            env=engine_environment(), stdout=out, stderr=out,
        )  # fmt: skip
        program.wait(START)
    text = log.read_text()
    lines = [line for line in text.splitlines() if line.startswith("SAID")]
    assert lines, text[-5000:]
    results = answers(json.loads(lines[0].removeprefix("SAID")))
    assert_stock(results, model(models), mixed_batches())
    assert "host 1 of 2: stage 1 and the samplers" in text
    for host, its in zip(cluster.hosts, ray, strict=True):
        assert not left_beside(its, host, NOTICED)


IN_SERVE = """
import json, sys
import ray
from ray import serve
ray.init(address="auto")
path, settings, addresses = json.loads(sys.argv[1])

@serve.deployment(
    placement_group_bundles=[{"CPU": 1, f"node:{address}": 0.001} for address in addresses],
    placement_group_strategy="STRICT_SPREAD",
    ray_actor_options={"num_cpus": 0},
    max_ongoing_requests=64,
    health_check_period_s=1,
)
class Model:
    def __init__(self):
        import sipipe
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM
        self.engine = AsyncLLM.from_engine_args(AsyncEngineArgs(
            path, pipeline_parallel_size=2, distributed_executor_backend=sipipe.Executor,
            additional_config={"sipipe": {"cores": "off"}}, **settings))

    async def check_health(self):
        await self.engine.check_health()

    async def __call__(self, request):
        from vllm import SamplingParams
        name, prompt, params = await request.json()
        found = self.engine.generate({"prompt_token_ids": prompt}, SamplingParams(**params), name)
        async for output in found:
            pass
        return list(output.outputs[0].token_ids)

serve.start(http_options={"host": "127.0.0.1", "port": 8000})
serve.run(Model.bind())
print("SERVED", flush=True)
sys.stdin.read()
serve.shutdown()
"""

ASK_SERVE = """
import json, sys, time, urllib.request, uuid
from concurrent.futures import ThreadPoolExecutor
def ask(prompt, params):
    body = json.dumps([uuid.uuid4().hex, prompt, params]).encode()
    request = urllib.request.Request("http://127.0.0.1:8000/", body)
    with urllib.request.urlopen(request, timeout=300) as answer:
        return json.load(answer)
for batch in json.load(open(sys.argv[1])):
    with ThreadPoolExecutor(64) as pool:
        print(json.dumps(list(pool.map(ask, batch["prompts"], batch["params"]))), flush=True)
"""


def test_ray_serve_deploys_an_engine_and_replaces_it(cluster, ray, models, tmp_path):
    pytest.importorskip("ray.serve", reason="Ray Serve is not installed: see CONTRIBUTING.md")
    path = model(models)
    addresses = [host.address for host in cluster.hosts]
    batches = tmp_path / "batches.json"
    log = tmp_path / "log"
    batches.write_text(json.dumps(mixed_batches()))
    arguments = json.dumps([str(path), SETTINGS, addresses])

    def answered() -> bool:
        client = cluster.hosts[0].python(ASK_SERVE, str(batches), stderr=subprocess.DEVNULL)
        output, _ = client.communicate(timeout=START)
        if client.returncode:
            return False
        assert_stock(answers(map(json.loads, output.splitlines())), path, mixed_batches())
        return True

    def wait_for(condition) -> None:
        deadline = time.monotonic() + START
        while not condition():
            assert time.monotonic() < deadline, log.read_text()[-5000:]
            assert program.poll() is None, log.read_text()[-5000:]
            time.sleep(0.5)

    with log.open("w") as out:
        program = cluster.hosts[0].start(
            [sys.executable, "-c", IN_SERVE, arguments],
            env=engine_environment(), stdin=-1, stdout=out, stderr=out,
        )  # fmt: skip
    wait_for(lambda: "SERVED" in log.read_text())
    assert answered()
    worker = named(cluster.hosts[1].processes(), "Worker_PP1")[0]
    worker.kill()
    worker.wait(NOTICED)
    wait_for(answered)  # by another engine, which Serve has made
    program.communicate(timeout=START)
    for host, its in zip(cluster.hosts, ray, strict=True):
        assert not left_beside(its, host, NOTICED)

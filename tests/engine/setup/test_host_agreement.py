"""Two hosts (namespaces): stock's tokens, and every kind of loss.

One test of `make test` has the main host begin with vLLM imported; the others are ``sipipe serve`` as
users start it. What the failure table of docs/multi-host.md says is tested here; times are promised
there, and bounded here by what a busy machine needs.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import time
from pathlib import Path

import psutil
import pytest
from tests.engine.engines import (
    HERE,
    Engine,
    assert_stock,
    engine_environment,
    greedy,
    model,
    prompts,
    run_engine,
    same_tokens,
    shared,
)
from tests.engine.forks import Forked
from tests.engine.heads import eagle, target
from tests.engine.served_hosts import (
    NOTICED,
    OPTIONS,
    PORT,
    SECRET,
    SETTINGS,
    START,
    Served,
)
from tests.engine.servers import wait_until
from tests.engine.test_kv_connectors import on_shelf
from tests.engine.test_parity import mixed_batches

import sipipe
from sipipe.engine.start import server
from sipipe.ipc.link.nixl_agent import nixl_reach
from sipipe.messages.link import buffer_tokens
from sipipe.observe.phases import Phase
from sipipe.tools.report.reader import read_trace

pytestmark = pytest.mark.engine

DOCS = Path(__file__).parents[3] / "docs" / "multi-host.md"
NIXL = pytest.mark.skipif(not nixl_reach(), reason="NIXL is not installed")
LOAD = """
import asyncio, json
from tests.engine.servers import load
print(json.dumps(asyncio.run(load("http://127.0.0.1:8000", "m"))))
"""
STRANGERS = """
import contextlib, socket, sys
address, port, times = sys.argv[1], *map(int, sys.argv[2:])
slow = []
for i in range(times):
    stranger = socket.socket()
    stranger.setblocking(False)
    with contextlib.suppress(OSError):
        stranger.connect((address, port))
    with contextlib.suppress(OSError):
        stranger.send([b"", b"GET / HTTP/1.1\\r\\n\\r\\n", b"\\xff", bytes(range(256))][i % 4])
    if i % 100:
        stranger.close()
    else:
        slow.append(stranger)
"""
HEALTH = """
import urllib.error, urllib.request
try:
    print(urllib.request.urlopen("http://127.0.0.1:8000/health", timeout=30).status)
except urllib.error.HTTPError as error:
    print(error.code)
except OSError:
    print("ended")
"""
LOADED = """
import re, urllib.request
text = urllib.request.urlopen("http://127.0.0.1:8000/metrics", timeout=30).read().decode()
print(re.search(r"vllm:external_prefix_cache_hits_total{.*} (\\S+)", text)[1])
"""
AHEAD = """
import time
time.time, time.time_ns = (lambda f=time.time: f() + 3), (lambda f=time.time_ns: f() + 3 * 10**9)
"""


@pytest.fixture
def serve(cluster, models, tmp_path):
    served = []

    def serve(*options, path=None, **more) -> Served:
        served.append(Served(cluster, path or model(models), tmp_path, *options, **more))
        return served[-1]

    yield serve
    for engine in served:
        engine.close()


@pytest.mark.ci
@pytest.mark.parametrize(
    ("encrypts", "transport"),
    [
        (True, "auto"),
        pytest.param(False, "auto", marks=pytest.mark.slow),
        pytest.param(False, "nixl", marks=[pytest.mark.slow, NIXL]),
    ],
    ids=["encrypted", "not encrypted", "nixl"],
)
def test_two_hosts_equal_stock_and_end_together(
    cluster, models, tmp_path, encrypts, transport, request
):
    """An engine in Python, and a host agent for its second stage."""
    main, other = cluster.hosts
    if transport == "nixl":
        for host in cluster.hosts:  # UCX looks for network devices in /sys, the whole machine's
            host.start(["mount", "-t", "sysfs", "none", "/sys"]).wait(NOTICED)
            request.addfinalizer(lambda host=host: host.start(["umount", "/sys"]).wait(NOTICED))
    environment = {"SIPIPE_SECRET": SECRET, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    hosts = {"count": 2, "address": main.address, "port": PORT, "encrypt_links": encrypts}
    pipe, agents_end = socket.socketpair()
    log = tmp_path / "agent.log"
    settings = {"hosts": hosts, "cores": "off", "transport": transport}
    arguments = [[str(model(models)), *OPTIONS, "-pp", "2"], settings, 1]
    with pipe, agents_end, log.open("w") as out:
        agent = Forked(
            server.__file__,
            [json.dumps(arguments)],
            env=engine_environment() | environment,
            out=out,
            ends=[agents_end.fileno()],
            host=other.pid,
        )
        agents_end.close()
        with Engine(
            model(models),
            sipipe=settings,
            env=environment,
            host=main.pid,
            pipeline_parallel_size=2,
            **SETTINGS,
        ) as engine:
            results = engine.run(mixed_batches())
            engine.close()
        assert_stock(results, model(models), mixed_batches())
        agent.wait(NOTICED)
        agent.stdin.close()
    assert "the engine ended" in log.read_text()
    for host in cluster.hosts:
        assert not host.wait_empty(NOTICED)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "pp", "tp"), [("llama", 2, 2), ("llama", 4, 1), ("qwen3-moe", 2, 1)]
)
def test_more_of_two_hosts_equals_stock(serve, models, family, pp, tp):
    more = []
    if pp > 2:  # one stage on a host, several on the other
        hosts = {"stages": [1, 3]}
        more = ["--additional-config", json.dumps({"sipipe": {"hosts": hosts}})]
    served = serve("-pp", str(pp), "-tp", str(tp), *more, path=model(models, family))
    served.wait_served()
    assert_stock(served.run(mixed_batches()), served.path, mixed_batches(), same_tokens)
    # Replaced there, at a point of the stream that the head knows.
    served.process(1, "sipipe.sampler sampler").kill()
    assert_stock(served.run(mixed_batches()), served.path, mixed_batches())
    served.wait_for(1, "starting it again", "the spare takes its place")
    # The next spare with the sampler whose place it gets: two successors, one after the other.
    wait_until(lambda: served.find(1, "sipipe.sampler spare"))
    for who in ("sampler", "spare"):
        served.process(1, f"sipipe.sampler {who}").kill()
    assert_stock(served.run(mixed_batches()), served.path, mixed_batches())
    served.end()
    # vLLM gives its engine process no time to say so, and kills it.
    assert "the engine ended" in served.log(1) or "this host's stages end" in served.log(1)


METRICS = """
import urllib.request
print(urllib.request.urlopen("http://127.0.0.1:8000/metrics").read().decode())
"""


@pytest.mark.slow
def test_a_draft_head_on_the_other_host_changes_no_token(serve, models):
    drafts = {"method": "eagle", "model": str(eagle(models)), "num_speculative_tokens": 3}
    option = "--speculative-config", json.dumps(drafts)
    served = serve("-pp", "2", *option, path=target(models))
    served.wait_served()
    assert_stock(served.run(mixed_batches()), served.path, mixed_batches(), same_tokens)
    shown = served.client(METRICS)
    (accepted,) = re.findall(r"^vllm:spec_decode_num_accepted_tokens_total\S* (\S+)$", shown, re.M)
    assert float(accepted) > 0
    served.end()


OWN_CODE = """
from transformers import LlamaConfig

class OwnConfig(LlamaConfig):
    model_type = "of_its_own"
"""


@pytest.mark.slow
def test_a_configuration_of_the_models_own_code_crosses(serve, models, tmp_path):
    """vLLM sends such a class by value: it is another one than the class that a host imports."""
    copy = tmp_path / "of-its-own"
    shutil.copytree(model(models), copy)
    (copy / "configuration_own.py").write_text(OWN_CODE)
    config = json.loads((copy / "config.json").read_text())
    config |= {
        "model_type": "of_its_own",
        "auto_map": {"AutoConfig": "configuration_own.OwnConfig"},
    }
    (copy / "config.json").write_text(json.dumps(config))
    served = serve("-pp", "2", "--trust-remote-code", path=copy)
    served.wait_served()
    assert_stock(served.run(mixed_batches()), model(models), mixed_batches())


@pytest.mark.slow
def test_caches_come_and_go_on_two_hosts(serve, models, tmp_path):
    """Each host's stage stores its layers, and loads them when the same prompts come again."""
    shelf = on_shelf(tmp_path / "shelf")["kv_transfer_config"]
    (tmp_path / "shelf").mkdir()
    path = {"PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])}
    options = ("-pp", "2", "--block-size", "32", "--kv-transfer-config", json.dumps(shelf))
    batches = [
        {"prompts": prompts(12, longest=300, seed=21), "params": greedy(12, shortest=2, longest=9)},
        {"prompts": prompts(1, longest=300, seed=21), "params": greedy(1)},
    ]
    served = serve(*options, environments=(path, path))
    served.wait_served()
    assert_stock(served.run(batches), served.path, batches)
    served.process(1, "sipipe.sampler sampler").kill()
    assert_stock(served.run(batches), served.path, batches)
    assert served.client(LOADED) != "0.0\n"
    assert len(list((tmp_path / "shelf").glob("engine-*"))) == 1, "all stages have one engine id"
    served.end()


@pytest.mark.slow
def test_long_prompts_cross_in_pieces(serve, models, tmp_path):
    """Microbatches with more tokens than a link's buffer has, among others that fit."""
    traces = tmp_path / "trace"
    at_once = json.dumps({"sipipe": {"microbatches": {"prefill_spread": 1}}})
    served = serve(
        *("-pp", "2", "--max-num-batched-tokens", "2048", "--trace", str(traces)),
        *("--additional-config", at_once),
    )
    served.wait_served()
    batches = [
        {"prompts": prompts(12, longest=1000, seed=17), "params": greedy(12)},
        {"prompts": prompts(3, longest=1000, seed=18), "params": greedy(3)},
    ]
    stock = {"max_model_len": 1024, "max_num_batched_tokens": 2048}
    assert_stock(served.run(batches), served.path, batches, **stock)
    served.end()
    tokens_of = {}
    for stage in read_trace(traces).of("stage"):
        forward = stage.phase(Phase.FORWARD)
        tokens_of[stage.header.host] = forward["tokens"].tolist()
    assert set(tokens_of) == {"host1", "host2"}
    for counts in tokens_of.values():
        assert max(counts) > buffer_tokens(SETTINGS["max_num_seqs"], 2048), "none was in pieces"


SEEDED = {"temperature": 0.9, "top_p": 0.9, "top_k": 40, "max_tokens": 24, "ignore_eos": True}


@pytest.mark.slow
def test_streams_with_aborts_seeds_and_clocks_that_differ(serve, models, tmp_path):
    """The second host's clock is 3 s ahead; a trace has both hosts on one timeline all the same."""
    clock = tmp_path / "clock"
    clock.mkdir()
    (clock / "sitecustomize.py").write_text(AHEAD)
    ahead = {"PYTHONPATH": os.pathsep.join([str(clock), os.environ.get("PYTHONPATH", "")])}
    traces = tmp_path / "trace"
    served = serve("-pp", "2", "--trace", str(traces), environments=({}, ahead))
    served.wait_served()
    batches = [{"prompts": prompts(16), "params": [SEEDED | {"seed": i} for i in range(16)]}]
    on_one_host = run_engine(model(models), batches, **shared(2))
    same_tokens(served.run(batches), on_one_host)
    ends = json.loads(served.client(LOAD))
    assert set(ends) <= {"done", "given up"}
    assert ends.count("done") >= len(ends) * 2 // 3 - 1
    same_tokens(served.run(batches), on_one_host)
    served.end()
    trace = read_trace(traces)
    assert {process.header.host for process in trace.processes} == {"host1", "host2"}
    assert not trace.warnings
    began = []
    for stage in trace.of("stage"):
        forward = stage.phase(Phase.FORWARD)
        began.append(dict(zip(forward["iteration"], forward["start_ns"], strict=True)))
    gather = trace.executor.phase(Phase.GATHER)
    drawn = dict(zip(gather["iteration"], gather["end_ns"], strict=True))
    order = [(began[0][i], began[1][i], drawn[i]) for i in drawn if i in began[0] and i in began[1]]
    assert len(order) > 100
    assert all(first < second < end for first, second, end in order)


MANY = 20_000  # strangers: of health checks every second, five hours


@pytest.mark.slow
def test_ports_are_the_documented_ones_and_strangers_at_each_stop_nothing(serve):
    """While one host waits for the other, and while both serve, idle and loaded."""
    served = serve("-pp", "2", nodes=(0,))
    main, other = served.cluster.hosts
    ports = [(other, main, PORT), (main, other, PORT + 1)]

    def come(times):
        return [here.python(STRANGERS, there.address, str(port), str(times))
                for here, there, port in ports]  # fmt: skip

    served.wait_for(0, "SiPipe's main host listens on")
    assert not come(MANY)[0].wait(START)
    served.hosts[1] = served.start(1)
    served.wait_served()
    assert [listening(served, node) for node in (0, 1)] == documented()
    for strangers in come(MANY):
        assert strangers.wait(START) == 0
    stock = served.run(mixed_batches())
    assert_stock(stock, served.path, mixed_batches())
    strangers = come(MANY)
    assert_stock(served.run(mixed_batches()), served.path, mixed_batches())
    for one in strangers:
        assert one.wait(START) == 0
    assert served.client(HEALTH) == "200\n"
    assert "died" not in served.log(0) + served.log(1)
    served.end()


def listening(served, node) -> set[tuple[str, str]]:
    """Processes of a host and where they listen, in the words of docs/multi-host.md."""
    shown = served.cluster.hosts[node].start(["ss", "-Htlnp"], stdout=-1, text=True)
    listeners = set()
    for line in shown.communicate(timeout=START)[0].splitlines():
        _, _, _, where, _, processes = line.split(maxsplit=5)
        address, _, port = where.rpartition(":")
        name = re.search(r'"([^"]+)"', processes).group(1)
        address = {host.address: "ADDRESS" for host in served.cluster.hosts}.get(address, address)
        port = {PORT: "P", PORT + 1: "P + 1", 8000: "--port"}.get(int(port), "any")
        listeners.add((name, f"{address}:{port}"))
    return listeners


def documented() -> list[set[tuple[str, str]]]:
    """Processes and where they listen, as docs/multi-host.md has them, for each host."""
    tables = []
    for host in ("main host", "host 1"):
        rows = re.findall(rf"^\| {host} \| `([^`]+)` \| `([^`]+)` \|", DOCS.read_text(), re.M)
        tables.append(set(rows))
    return tables


@pytest.mark.slow
def test_a_lost_link_of_an_idle_engine_is_known_to_its_health(serve):
    served = serve("-pp", "2")
    served.wait_served()
    assert served.client(HEALTH) == "200\n"
    main, other = served.cluster.hosts
    main.run("ss", "-K", "dst", other.address, "dport", "=", str(PORT + 1))
    served.hears("link", {0: "link stage0-1.r0 (zeromq): the next stage died or cannot be reached "
                             "(it reset the connection)"})  # fmt: skip
    assert served.client(HEALTH) in ("503\n", "ended\n")
    served.ended()


HOST = "host 1 (10.77.18.2, stage 1) died or cannot be reached"
MAIN = f"the main host (10.77.18.1:{PORT}) died or cannot be reached"
LOSSES = {
    "cable": (lambda served: served.cluster.hosts[0].cable("down"), {0: HOST, 1: MAIN}),
    "half open": (lambda served: served.cluster.hosts[1].mute(True), {0: HOST, 1: MAIN}),
    "agent killed": (
        lambda served: served.command(1).kill(),
        {0: HOST, 1: "the server was killed (SIGKILL)"},
    ),
    "agent stopped": (lambda served: served.command(1).suspend(), {0: HOST}),
    "worker killed": (
        lambda served: served.process(1, "Worker_PP").kill(),
        {0: "on host 1 died", 1: "the engine ended: stage worker stage1.0"},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("loss", LOSSES)
def test_a_loss_ends_the_engine_on_both_hosts(serve, loss):
    served = serve("-pp", "2")
    served.wait_served()
    began = time.monotonic()
    lose, says = LOSSES[loss]
    lose(served)
    served.hears(loss, says, began=began)
    if loss == "agent stopped":
        served.ended(0)
        served.command(1).resume()
        served.hosts[1].send_signal(signal.SIGCONT)
        served.hears("continued", {1: MAIN})
    served.ended()
    print(f"{loss}: nothing left after {time.monotonic() - began:.1f} s")


@pytest.mark.slow
def test_a_worker_that_is_killed_while_it_loads_ends_both_hosts(serve):
    served = serve("-pp", "2")
    wait_until(lambda: served.find(1, "sipipe.worker"), START)
    served.process(1, "sipipe.worker").kill()
    end = "ended while starting"
    served.hears("killed while it loads", {0: f"on host 1 {end}", 1: f"on host 1 {end}"})
    assert "the engine ended: stage worker stage1.0" in served.log(1)
    served.ended()


@pytest.mark.slow
def test_both_hosts_come_back_under_restart(serve):
    served = serve("-pp", "2", "--restart")
    served.wait_served()
    served.process(1, "Worker_PP").kill()
    again = "it is started again in"
    served.hears("restart", {0: again, 1: again})
    deadline = time.monotonic() + START
    while served.log(0).count("Application startup complete") < 2:
        assert time.monotonic() < deadline, (served.log(0)[-3000:], served.log(1)[-3000:])
        time.sleep(0.2)
    assert_stock(served.run(mixed_batches()), served.path, mixed_batches())
    for node in (1, 0):  # each would wait for the other's return
        psutil.Process(served.hosts[node].pid).children()[0].send_signal(signal.SIGTERM)
    served.ended()


@pytest.mark.slow
def test_a_killed_head_ends_the_other_host(serve):
    served = serve("-pp", "2")
    served.wait_served()
    began = time.monotonic()
    served.command(0).kill()
    # The engine outlives its front end by a moment, and may still say goodbye.
    served.wait_for(1, "the engine ended", "died or cannot be reached", seconds=NOTICED)
    print(f"main host killed: host 1 said it after {time.monotonic() - began:.1f} s")
    served.ended()
    print(f"main host killed: nothing left after {time.monotonic() - began:.1f} s")


@pytest.mark.slow
def test_hosts_that_do_not_fit_say_so(serve, tmp_path):
    """Another secret; then another version of SiPipe and another dtype."""
    served = serve("-pp", "2", environments=({}, {"SIPIPE_SECRET": "another secret of the tests"}))
    served.wait_for(1, "connects to the main host")
    refused = "refused this host: the secret (SIPIPE_SECRET) is not the same"
    served.hears("another secret", {0: "Somebody with another secret", 1: refused}, seconds=START)
    old = shutil.copytree(Path(sipipe.__file__).parent, tmp_path / "old" / "sipipe")
    (old / "_version.py").write_text('__version__ = "0.0.9"\n')
    served.environments = ({}, {"PYTHONPATH": str(old.parent)})
    served.hosts[1] = served.start(1, "--dtype", "bfloat16")
    difference = (
        f"SiPipe is {sipipe.__version__} on the main host and 0.0.9 there, "
        "--dtype is torch.float32 on the main host and torch.bfloat16 there"
    )
    served.wait_for(1, "connects to the main host")
    refused = f"refused this host: host 1 (10.77.18.2) does not fit: {difference}"
    served.hears("other versions", {0: difference, 1: refused})
    served.ended()


@pytest.mark.slow
def test_a_port_that_is_taken_and_a_head_that_is_not_there(serve, cluster):
    listens = "import socket, sys; s = socket.create_server((sys.argv[1], int(sys.argv[2]))); "
    other_host = cluster.hosts[1]
    blocker = other_host.python(listens + "print(1, flush=True); input()", other_host.address, str(PORT + 1),
                           stdin=-1)  # fmt: skip
    assert blocker.stdout.readline() == "1\n"
    settings = json.dumps({"sipipe": {"start_timeout": 15}})
    served = serve("-pp", "2", "--additional-config", settings, nodes=(1,))
    served.wait_for(1, f"port {PORT + 1} of {other_host.address} cannot be listened on")
    blocker.communicate("\n")
    served.hosts[1] = served.start(1)
    served.wait_for(1, f"the main host (10.77.18.1:{PORT}) cannot be reached within 15 s")

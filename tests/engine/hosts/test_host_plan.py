"""Which host has what, where it listens, and what two hosts say that differ."""

import queue
import re
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from tests.ipc.link.conftest import free_port

from sipipe.config import HostSettings, SiPipeConfig
from sipipe.engine.hosts import agent, remote
from sipipe.engine.link_opener import make_links
from sipipe.engine.setup import host_agreement as module
from sipipe.engine.setup.host_agreement import (
    check_hosts,
    check_main_host,
    control_port,
    link_port,
    nixl_ports,
    own_address,
    versions,
)
from sipipe.engine.setup.stages import stages_of_hosts
from sipipe.engine.start.arguments import use_sipipe
from sipipe.errors import ConfigError
from sipipe.ipc import tcp
from sipipe.ipc.connection import Connection
from sipipe.ipc.errors import PeerDiedError
from sipipe.messages import hosts as say
from sipipe.messages.pickles import out_of_band, whole

SECRET = "a secret of the tests"
BOUND = 60.0  # seconds; of a machine at its worst


@pytest.mark.parametrize(
    ("stages", "hosts", "counts"),
    [
        (2, {"count": 2}, [1, 1]),
        (5, {"count": 2}, [3, 2]),
        (4, {"count": 2, "stages": (1, 3)}, [1, 3]),
        (3, {}, [3]),
    ],
)
def test_stages_follow_one_another(stages, hosts, counts):
    stages_by_host = stages_of_hosts(stages, HostSettings(**hosts))
    assert [len(host_stages) for host_stages in stages_by_host] == counts
    in_order = [stage for host_stages in stages_by_host for stage in host_stages]
    assert in_order == list(range(stages))


@pytest.mark.parametrize(
    ("stages", "hosts"),
    [(1, {"count": 2}), (4, {"count": 2, "stages": (1, 2)}), (4, {"count": 2, "stages": (4,)})],
)
def test_a_host_without_a_stage_is_refused(stages, hosts):
    with pytest.raises(ConfigError, match=r"--nnodes 2 and \d stages .*every host needs a stage"):
        stages_of_hosts(stages, HostSettings(**hosts))


def test_hosts_without_number_are_refused_before_they_are_counted():
    with pytest.raises(ConfigError, match="--nnodes 1000000000 and 2 stages"):
        stages_of_hosts(2, HostSettings(count=10**9))


def test_every_connection_has_a_port_of_its_own():
    hosts = HostSettings(count=3, port=100)
    setup = SimpleNamespace(stages=6, ranks=2, config=SiPipeConfig(hosts=hosts))
    control = [control_port(hosts, node) for node in (1, 2)]
    between = [link_port(setup, rank) for rank in (2, 3, 6, 7)]  # of stages 1 and 3
    assert [*control, *between] == list(range(100, 106))
    by_nixl = [port for rank in (2, 3, 6, 7) for port in nixl_ports(setup, rank)]
    assert sorted(by_nixl) == list(range(106, 114))


@pytest.mark.parametrize("encrypts", [True, False])
def test_a_link_between_hosts_has_a_token_where_it_is_not_encrypted(encrypts):
    hosts = HostSettings(count=2, address="127.0.0.1", encrypt_links=encrypts)
    setup = SimpleNamespace(stages=3, ranks=2, slots=4, link_tokens=512)
    setup.config = SiPipeConfig(hosts=hosts)
    links = [*make_links(setup, {2: "127.0.0.2"}, "shm", "cpu").values()]
    assert [link.kind for link in links] == ["shm", "shm", "zeromq", "zeromq"]
    tokens = [link.token for link in links]
    assert not any(tokens[:2])
    assert len(set(tokens[2:])) == (1 if encrypts else 2)
    assert all(tokens[2:]) != encrypts
    assert ("not encrypted" in links[2].transport) != encrypts


def test_hosts_need_an_address_and_a_secret(monkeypatch):
    monkeypatch.delenv("SIPIPE_SECRET", raising=False)
    check_hosts(HostSettings())
    with pytest.raises(ConfigError, match="--nnodes 2 needs --master-addr"):
        check_hosts(HostSettings(count=2))
    with pytest.raises(ConfigError, match="several hosts need a secret"):
        check_hosts(HostSettings(count=2, address="127.0.0.1"))
    monkeypatch.setenv("SIPIPE_SECRET", SECRET)
    check_hosts(HostSettings(count=2, address="127.0.0.1"))
    with pytest.raises(
        ConfigError, match=r"--master-addr '10\.0\.0\.256' is neither a host's name"
    ):
        check_hosts(HostSettings(count=2, address="10.0.0.256"), seconds=600.0)


def test_the_address_is_the_one_that_the_main_host_is_reached_from(monkeypatch):
    monkeypatch.setattr(module, "envs", SimpleNamespace(VLLM_HOST_IP=""))
    assert own_address(HostSettings(count=2, address="127.0.0.1")) == "127.0.0.1"
    monkeypatch.setattr(module, "envs", SimpleNamespace(VLLM_HOST_IP="192.0.2.1"))
    assert own_address(HostSettings(count=2, address="127.0.0.1")) == "192.0.2.1"


def test_ports_are_looked_at_before_a_model_is_loaded():
    port = free_port()
    check_main_host(HostSettings(count=2, address="127.0.0.1", port=port))
    with pytest.raises(ConfigError, match=f"port {port} of 192.0.2.1 cannot be listened on"):
        check_main_host(HostSettings(count=2, address="192.0.2.1", port=port))


def test_a_main_host_that_its_own_name_takes_to_itself_is_refused(monkeypatch):
    """Debian's installer writes such a name into /etc/hosts."""
    monkeypatch.setenv("SIPIPE_SECRET", SECRET)
    monkeypatch.setattr(tcp, "_look_up", lambda _: "127.0.1.1")
    with pytest.raises(ConfigError, match=r"--master-addr node0 is 127\.0\.1\.1 on this host"):
        check_hosts(HostSettings(count=2, address="node0"), seconds=60.0)
    check_hosts(HostSettings(count=2, address="127.0.1.1"))


def test_flags_and_a_share_of_stages_go_together():
    additional = {"sipipe": {"hosts": {"stages": [3, 1]}, "samplers": 2}}
    args = SimpleNamespace(distributed_executor_backend=None, additional_config=additional)
    use_sipipe(args, {"hosts": {"count": 2, "address": "a"}})
    assert args.additional_config["sipipe"] == {
        "hosts": {"count": 2, "address": "a", "stages": [3, 1]},
        "samplers": 2,
    }


@contextmanager
def meeting(monkeypatch, theirs=None, lost=False, secret=SECRET):
    """A main host's side of a meeting, and the future of what the other host's agent comes to.
    ``theirs`` are the other host's values, and ``secret`` is its secret. With ``lost``, another process of that host has come before,
    and has died before it was looked at."""
    connections = []

    def connection(*place, **options):
        connections.append(Connection(*place, **options))
        return connections[-1]

    monkeypatch.setattr(remote, "Connection", connection)
    monkeypatch.setenv("SIPIPE_SECRET", SECRET)
    values = {"SiPipe": "1", "--dtype": "float32"}
    monkeypatch.setattr(remote, "agreed", lambda _: values)
    monkeypatch.setattr(agent, "agreed", lambda _: theirs or values)
    port = free_port()
    setup = SimpleNamespace(
        config=SiPipeConfig(
            start_timeout=BOUND, hosts=HostSettings(count=2, address="127.0.0.1", port=port)
        ),
        node=1,
        stages=2,
        ranks=1,
        host_stages=[1],
        host_parts=lambda: "stage 1 and the samplers",
        cores=SimpleNamespace(samplers=[[0], [1]]),
    )
    main = remote.RemoteHost(setup, 1, "127.0.0.1")
    if lost:
        gone = Connection("127.0.0.1", port, listens=False, who="the main host")
        assert gone.wait_for_peer(BOUND)
        gone.close()
        assert connections[0].wait_for_peer(BOUND)
    monkeypatch.setenv("SIPIPE_SECRET", secret)
    with ThreadPoolExecutor(1) as pool:
        yield main, pool.submit(agent.run_agent, setup)
    main.close()


def test_a_host_that_does_not_fit_is_told_so_and_others_only_that_the_main_host_ended(monkeypatch):
    deadline = time.monotonic() + BOUND
    with meeting(monkeypatch, {"SiPipe": "2", "--dtype": "float32"}) as (main, host):
        what = "does not fit: SiPipe is 1 on the main host and 2 there$"
        with pytest.raises(ConfigError, match=what):
            main.meet(deadline)
        main.close("host 1 does not fit")
        with pytest.raises(ConfigError, match=r"refused this host: host 1 .* does not fit"):
            host.result(BOUND)
    with meeting(monkeypatch) as (main, host):
        main.meet(deadline)
        main.close("host 2 did not come")
        with pytest.raises(PeerDiedError, match="ended before it began: host 2 did not come"):
            host.result(BOUND)


def test_a_host_with_another_secret_is_told_so(monkeypatch):
    with meeting(monkeypatch, secret="another secret of the tests") as (_, host):
        words = r"refused this host: the secret \(SIPIPE_SECRET\) is not the same on both"
        with pytest.raises(ConfigError, match=words):
            host.result(BOUND)


def a_setup(**changes):
    """What a host has decided, as far as all hosts must have the same; ``changes`` by dotted names."""
    model = dict.fromkeys(
        ["model", "revision", "dtype", "quantization", "max_model_len", "seed", "enforce_eager"]
    )
    vllm_config = SimpleNamespace(
        model_config=SimpleNamespace(**model),
        cache_config=SimpleNamespace(cache_dtype="auto", block_size=16, enable_prefix_caching=True),
        scheduler_config=SimpleNamespace(max_num_seqs=8, max_num_batched_tokens=64),
        load_config=SimpleNamespace(load_format="auto"),
        speculative_config=None,
        kv_transfer_config=None,
        lora_config=None,
    )
    setup = SimpleNamespace(
        vllm_config=vllm_config, config=SiPipeConfig(), stages=2, ranks=1, drafts=0
    )
    for name, value in changes.items():
        *path, last = name.split("__")
        place = setup
        for part in path:
            place = getattr(place, part)
        setattr(place, last, value)
    return setup


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"stages": 3}, "-pp is 2 on the main host and 3 there"),
        ({"ranks": 2}, "-tp is 1 on the main host and 2 there"),
        ({"vllm_config__model_config__model": "other"}, "the model is None .* and other there"),
        ({"vllm_config__model_config__revision": "main"}, "--revision is None .* and main there"),
        ({"vllm_config__model_config__seed": 1}, "--seed is None .* and 1 there"),
        ({"vllm_config__cache_config__block_size": 32}, "--block-size is 16 .* and 32 there"),
        ({"vllm_config__scheduler_config__max_num_seqs": 9}, "--max-num-seqs is 8 .* and 9 there"),
        ({"vllm_config__lora_config": "one"}, "--enable-lora is False .* and True there"),
        (
            {"vllm_config__kv_transfer_config": SimpleNamespace(kv_connector="KVFiles")},
            r"the connector \(--kv-transfer-config\) is None .* and KVFiles there",
        ),
        (
            {"config": SiPipeConfig(inflight=5)},
            r'"inflight" \(sipipe config\) is auto .* and 5 there',
        ),
        ({"config": SiPipeConfig(samplers=5, trace="/there")}, ""),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_options_that_hosts_have_to_have_the_same_are_named_and_no_others(changes, named):
    what = module.difference(module.agreed(a_setup()), module.agreed(a_setup(**changes)))
    assert re.fullmatch(named, what), what


@pytest.mark.parametrize("name", ["SiPipe", "vLLM", "torch", "Python"])
def test_versions_that_differ_are_named(monkeypatch, name):
    here = module.agreed(a_setup())
    monkeypatch.setattr(module, "versions", lambda: {**versions(), name: "0.0.9"})
    there = module.agreed(a_setup())
    assert module.difference(here, there) == (
        f"{name} is {here[name]} on the main host and 0.0.9 there"
    )


def test_a_host_that_dies_while_others_are_awaited_may_come_again(monkeypatch):
    with meeting(monkeypatch, lost=True) as (main, host):
        main.meet(time.monotonic() + BOUND)
        assert main.samplers == 2
        main.close("the test ends")
        with pytest.raises(PeerDiedError, match="the test ends"):
            host.result(BOUND)


class MainHost:
    """The connection to a main host, which says what ``script`` yields. What it is told is kept."""

    def __init__(self, script):
        self.told = queue.SimpleQueue()
        self._script = script

    def receive(self, seconds):
        return out_of_band(next(self._script))

    def send(self, *parts):
        self.told.put(whole(parts))

    def close(self):
        pass


def wait_for(told, kind):
    """The next of the messages in ``told`` that is of this kind."""
    while not isinstance(message := told.get(timeout=BOUND), kind):
        pass
    return message


def the_agent(main):
    """The agent of a host with one stage of two."""
    setup = SimpleNamespace(
        config=SiPipeConfig(),
        vllm_config=SimpleNamespace(
            model_config=SimpleNamespace(model="m"),
            parallel_config=SimpleNamespace(data_parallel_index=0),
        ),
        stages=2,
        ranks=1,
        slots=3,
        host_stages=[1],
        cores=SimpleNamespace(samplers=[()]),
    )
    return agent.Agent(setup, say.Plan(setup=b"", samplers=1, run="a run"), 0, main)


@pytest.mark.parametrize("late", [False, True])
def test_what_is_forwarded_last_needs_no_figures(monkeypatch, late):
    """A sampler's end, read when the page of figures has been closed."""
    ours, theirs = socket.socketpair()

    def script():
        yield say.Start()
        assert wait_for(main.told, say.Done).result is None
        if not late:
            theirs.close()
            assert wait_for(main.told, say.Tokens).data == b""
        yield say.End("")

    main = MainHost(script())
    monkeypatch.setattr(agent, "LocalHost", lambda *_: Mock(start=lambda: [ours]))
    monkeypatch.setattr(agent.signal, "signal", lambda *_: None)
    assert the_agent(main).run() == 0
    theirs.close()
    deadline = time.monotonic() + BOUND
    while ours.fileno() != -1:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    while not main.told.empty():
        assert not isinstance(main.told.get(), say.Tokens)


@pytest.mark.parametrize("why", ["a worker died", "", None])
def test_the_last_line_comes_behind_what_workers_say(monkeypatch, capsys, why):
    """A worker may lose its link at the moment in which the engine ends, and log that."""

    def script():
        yield say.Start()
        if why is None:
            raise PeerDiedError("the main host died")
        yield say.End(why)

    host = Mock(start=list, close=lambda: print("a traceback", file=sys.stderr))
    monkeypatch.setattr(agent, "LocalHost", lambda *_: host)
    monkeypatch.setattr(agent.signal, "signal", lambda *_: None)
    assert the_agent(MainHost(script())).run() == (0 if why == "" else 1)
    *_, behind, last = capsys.readouterr().err.splitlines()
    assert behind == "a traceback"
    assert last.endswith(why or ("the engine ended" if why == "" else "this host's stages end"))

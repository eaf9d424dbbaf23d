"""Which bundle of Ray each worker gets, and what a user is told where it does not work out.

Most of it needs no Ray; what asks a cluster does so on nodes of `ray.cluster_utils.Cluster`, which
are on one machine (no engine can run on them).
"""

import importlib.util
import json
import pickle
import socket
import subprocess
import sys
import tempfile
from types import SimpleNamespace

import pytest
from tests.engine.engines import engine_environment

pytest.importorskip("vllm", reason="vLLM is not installed")

from sipipe.config import HostSettings, SiPipeConfig
from sipipe.engine.hosts import ray_placement
from sipipe.engine.hosts.ray_bundles import Bundle, arrange, bundles_of
from sipipe.engine.hosts.ray_claim import Claim, Order
from sipipe.engine.setup.host_agreement import nixl_ports, ports_used
from sipipe.errors import ConfigError

needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="Ray is not installed: see CONTRIBUTING.md"
)


def group(nodes, workers=1):
    """A bundle on each of these nodes, one letter for each."""
    return [Bundle(index, node, workers) for index, node in enumerate(nodes)]


def arranged(bundles, here, stages, ranks, indices=()):
    hosts = arrange(bundles, here, stages, ranks, indices)
    return {node: [bundle.index for bundle in found] for node, found in hosts.items()}


@pytest.mark.parametrize(
    ("nodes", "here", "stages", "ranks", "hosts"),
    [
        ("BABA", "A", 4, 1, {"A": [1, 3], "B": [0, 2]}),  # this node first
        ("CABC", "B", 4, 1, {"B": [2], "A": [1], "C": [0, 3]}),  # the others as vLLM sorts them
        ("ABBAABBA", "B", 4, 2, {"B": [1, 2, 5, 6], "A": [0, 3, 4, 7]}),
        ("AAABBB", "A", 2, 2, {"A": [0, 1], "B": [3, 4]}),  # a stage's ranks on one node
        ("AAAABB", "A", 2, 1, {"A": [0, 1]}),  # no more than are needed
        ("AB", "A", 1, 1, {"A": [0]}),
    ],
)
def test_a_given_group_is_taken_node_after_node(nodes, here, stages, ranks, hosts):
    bundles = arranged(group(nodes), here, stages, ranks)
    assert bundles == hosts
    assert list(bundles) == list(hosts)


def test_a_bundle_of_our_own_is_a_stage():
    assert arranged(group("BAB", 4), "A", 3, 4) == {"A": [1], "B": [0, 2]}


def test_the_users_choice_of_bundles_is_taken_in_its_order():
    assert arranged(group("ABAB"), "A", 2, 1, [2, 1]) == {"A": [2], "B": [1]}
    assert arranged(group("ABAB"), "A", 2, 2, [2, 0, 3, 1]) == {"A": [2, 0], "B": [3, 1]}


@pytest.mark.parametrize(
    ("nodes", "here", "stages", "ranks", "indices", "says"),
    [
        ("AB", "A", 3, 1, (), "-pp 3 -tp 1: the placement group has room for 1, 1 workers"),
        ("ABC", "A", 1, 2, (), "-pp 1 -tp 2: .*room for 1, 1, 1 workers .*ranks stay on one node"),
        ("", "A", 1, 1, (), "room for no workers"),
        ("BB", "A", 2, 1, (), "no room for a stage on this process's own node"),
        ("AB", "A", 2, 1, (1, 0), "no room for a stage on this process's own node"),
        ("ABA", "A", 3, 1, (0, 1, 2), "goes back to a node that it has left"),
        ("AB", "A", 2, 1, (0, 0), r"must name 2 different bundles .*out of \[0, 1\], not \[0, 0\]"),
        ("AB", "A", 2, 1, (0, 7), r"not \[0, 7\]"),
        ("AB", "A", 2, 1, (0,), r"not \[0\]"),
        ("AAAB", "A", 2, 2, (0, 1, 2, 3), "a stage's tensor-parallel ranks stay on one node"),
    ],
)
def test_a_group_that_does_not_fit_is_one_line(nodes, here, stages, ranks, indices, says):
    with pytest.raises(ConfigError, match=says) as refused:
        arrange(group(nodes), here, stages, ranks, indices)
    assert "\n" not in str(refused.value)


def test_the_ports_that_are_looked_at_are_those_that_are_used():
    for count, ranks in ((2, 1), (3, 2)):
        setup = SimpleNamespace(
            stages=count, ranks=ranks, config=SiPipeConfig(hosts=HostSettings(count=count, port=1))
        )
        assert max(nixl_ports(setup, (count - 1) * ranks - 1)) == ports_used(count, ranks)


def test_taken_ports_are_seen():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert not Claim.free(None, port - 1, 3)
    assert Claim.free(None, port, 1)


def config(**settings):
    """The parts of a VllmConfig that are read before Ray is asked."""
    parallel = SimpleNamespace(data_parallel_size=1, ray_runtime_env=None)
    return SimpleNamespace(parallel_config=parallel, additional_config={"sipipe": settings})


@needs_ray
def test_a_cluster_that_is_not_there_is_one_line(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:9")
    with pytest.raises(
        ConfigError, match=r"cannot join a Ray cluster \(127.0.0.1:9: .*refused"
    ) as it:
        ray_placement.place(config())
    assert "\n" not in str(it.value)


def test_without_ray_a_user_is_told_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"ray needs Ray: install SiPipe with its ray extra"):
        ray_placement.place(config())


@pytest.mark.parametrize(
    "settings", [{"hosts": {"count": 2}}, {"hosts": {"stages": [1, 1]}}, {"devices": [0, 1]}]
)
def test_what_ray_says_is_not_said_twice(settings):
    with pytest.raises(ConfigError, match="Ray finds the nodes and the GPUs; leave out --nnodes"):
        ray_placement.place(config(**settings))


def test_more_than_one_gpu_in_a_given_bundle_is_refused():
    nodes = {0: "A", 1: "A"}
    with pytest.raises(ConfigError, match="bundle 1 of the placement group has 2 GPUs"):
        bundles_of([{"CPU": 1.0}, {"GPU": 2.0}], nodes, "GPU", 1)
    assert bundles_of([{"CPU": 1.0}, {"GPU": 1.0}], nodes, "GPU", 1) == [Bundle(1, "A", 1)]


PLACES = """
import json, os
import ray
from ray.cluster_utils import Cluster
from sipipe.engine.hosts import ray_placement
from sipipe.errors import SiPipeError

class Config:
    "The parts of a VllmConfig that are read."

def config(stages, ranks=1, group=None, **settings):
    found = Config()
    found.parallel_config = Config()
    found.parallel_config.pipeline_parallel_size = stages
    found.parallel_config.tensor_parallel_size = ranks
    found.parallel_config.placement_group = group
    found.parallel_config.ray_runtime_env = None
    found.additional_config = {"sipipe": settings}
    return found

def place(*args, indices="", **settings):
    os.environ["VLLM_RAY_BUNDLE_INDICES"] = indices
    asked = config(*args, **settings)
    try:
        placement = ray_placement.place(asked)
    except SiPipeError as error:
        return str(error)
    nodes = [ray.get(hosts[0].where.remote()) for hosts in placement._claims]
    said = asked.additional_config["sipipe"]
    return {"nodes": nodes, "claims": [len(claims) for claims in placement._claims],
            "devices": said.get("devices"), "all": placement._devices, **said["hosts"]}

class Claim(ray_placement.Claim):
    def where(self):
        return ray.get_runtime_context().get_node_id()

ray_placement.Claim = Claim
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 8, "num_gpus": 3})
other = cluster.add_node(num_cpus=8, num_gpus=3)
os.environ["RAY_ADDRESS"] = cluster.address
said = {"own": place(2), "port": place(4, 1, hosts={"port": 30100, "encrypt_links": False})}
here = ray.get_runtime_context().get_node_id()
said["here"] = here
given = ray.util.placement_group([{"CPU": 1}] * 4, strategy="SPREAD")
ray.get(given.ready())
said["given"] = place(2, 1, given)
nodes = ray.util.placement_group_table(given)["bundles_to_node_id"]
mine = [index for index in range(4) if nodes[index] == here]
others = [index for index in range(4) if nodes[index] != here]
said["indices"] = place(4, 1, given, indices=",".join(map(str, mine + others)))
said["wrong"] = place(4, 1, given, indices=",".join(map(str, others + mine)))
said["too many"] = place(8, 1, given)
said["no room"] = place(40, 1, start_timeout=1)
said["no group"] = place(2, indices="1,0")

class Gpus:
    "A platform, for Ray, which believes what it is told of GPUs."
    ray_device_key, device_control_env_var = "GPU", "CUDA_VISIBLE_DEVICES"
    ray_noset_device_env_vars = ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]
    device_control_id_to_physical_device_id = staticmethod(int)

ray_placement.current_platform = Gpus
os.environ["CUDA_VISIBLE_DEVICES"] = ""
said["gpus"] = place(2, 2)
said["hidden"] = "CUDA_VISIBLE_DEVICES" in os.environ
os.environ["VLLM_RAY_PER_WORKER_GPUS"] = "0.5"
halves = ray.util.placement_group([{"CPU": 1}] + [{"GPU": 0.5}] * 4, strategy="SPREAD")
ray.get(halves.ready())
said["halves"] = place(4, 1, halves)
print("SAID", json.dumps(said), flush=True)
ray.shutdown()
cluster.shutdown()
"""


def devices_of(given):
    """The setting "devices" of a host to which Ray gave these GPUs."""
    order = Order(node=1, versions={}, config=pickle.dumps(config()), devices=given)
    return ray_placement.config_of(order).additional_config["sipipe"]["devices"]


@pytest.mark.parametrize(
    ("shown", "given", "counted"),
    [(None, ["1", "3"], [1, 3]), ("4,5,6,7", ["7", "5"], [3, 1]), ("", ["2"], [2])],
)
def test_gpus_are_counted_as_this_process_sees_them(monkeypatch, shown, given, counted):
    """Ray has the machine's numbers, which "devices" does not."""
    gpus = {"device_control_env_var": "SHOWN", "device_control_id_to_physical_device_id": int}
    monkeypatch.setattr(ray_placement, "current_platform", SimpleNamespace(**gpus))
    monkeypatch.delenv("SHOWN", raising=False)
    if shown is not None:
        monkeypatch.setenv("SHOWN", shown)
    assert devices_of(given) == counted
    if shown:
        with pytest.raises(ConfigError, match="Ray gave GPU 2, and SHOWN is 4,5,6,7: unset it"):
            devices_of(["2"])


def test_slices_of_gpus_are_counted_by_their_names(monkeypatch):
    """Slices of a GPU have its number in common."""
    gpus = {
        "device_control_env_var": "CUDA_VISIBLE_DEVICES",
        "device_control_id_to_physical_device_id": lambda _: 0,
    }
    monkeypatch.setattr(ray_placement, "current_platform", SimpleNamespace(**gpus))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-a,MIG-b,MIG-c")
    assert devices_of(["MIG-c", "MIG-a"]) == [2, 0]


@needs_ray
@pytest.mark.slow
def test_bundles_of_a_real_cluster():
    # Not tmp_path: its names are too long for Ray's sockets.
    with tempfile.TemporaryDirectory(prefix="ray") as directory:
        placements = placed(directory)
    for placement in (placements["own"], placements["port"], placements["indices"]):
        assert (placement["nodes"][0], placement["count"]) == (placements["here"], 2), placement
    assert placements["own"]["stages"] == placements["own"]["claims"] == [1, 1]
    assert placements["own"]["port"] != placements["port"]["port"] == 30100
    assert placements["port"]["encrypt_links"] is False
    assert placements["port"]["stages"] == placements["indices"]["stages"] == [2, 2]
    assert placements["given"]["nodes"] == [placements["here"]]
    assert (placements["given"]["count"], placements["given"]["stages"]) == (1, [2])
    assert "no room for a stage on this process's own node" in placements["wrong"]
    assert "-pp 8 -tp 1: the placement group has room for 2, 2 workers" in placements["too many"]
    assert "Ray had no room for" in placements["no room"]
    assert "without a placement group to choose from" in placements["no group"]
    pairs = placements["gpus"]
    halves = placements["halves"]
    assert (pairs["claims"], pairs["stages"], pairs["all"]) == ([1, 1], [1, 1], [["0", "1"]] * 2)
    assert pairs["devices"] == [0, 1]
    assert not placements["hidden"]
    assert (halves["claims"], halves["stages"], halves["all"]) == ([2, 2], [2, 2], [["2", "2"]] * 2)
    assert halves["devices"] == [2, 2]


def placed(directory):
    """The placements that :data:`PLACES` prints."""
    done = subprocess.run(
        [sys.executable, "-c", PLACES],
        env=engine_environment() | {"RAY_TMPDIR": directory},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("SAID")]
    assert lines, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads(lines[0].removeprefix("SAID"))

"""Ray as placement: which nodes an engine's stages are on, and a host agent on each of them.

Who runs here
    ``sipipe serve``'s foreground, before vLLM starts; or the executor, where a program in a Ray
    actor has made the engine. Once the agents run, all is as without Ray.
Guarantees
    Every worker's bundle is held by an actor (:mod:`sipipe.engine.hosts.ray_claim`) while the engine
    lives. Whatever happens to this process, Ray ends them with its job, and they end their agents.
Conventions of vLLM's own Ray executor
    A placement group given from outside, ``VLLM_RAY_BUNDLE_INDICES``, ``VLLM_RAY_PER_WORKER_GPUS``,
    ``ray_runtime_env``, the environment that it copies, this process's node first.
"""

import os
import pickle
import secrets
import signal
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import cloudpickle
from vllm import envs
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.platforms import current_platform

from sipipe.config import SiPipeConfig
from sipipe.engine.hosts.ray_claim import Claim, Order
from sipipe.engine.setup.host_agreement import ports_used, versions
from sipipe.errors import ConfigError, StallError, UnsupportedError
from sipipe.ipc.secret import SECRET, SECRET_FILE, read_secret
from sipipe.ipc.sockets import VARIABLE as SOCKETS
from sipipe.observe.live import RUN_VARIABLE

logger = init_logger(f"vllm.{__name__}")

OPTION = "--distributed-executor-backend ray"
PATIENCE = 10.0
"""Seconds after which a user is told what Ray has no room for."""
CONNECT_SECONDS = 5.0
TRIES = 64
"""Blocks of ports that are looked at."""


@dataclass(frozen=True)
class Bundle:
    """One bundle of a placement group, with room for so many workers."""

    index: int
    node: str
    workers: int = 1


def arrange(
    bundles: Sequence[Bundle], here: str, stages: int, ranks: int, indices: Sequence[int] = ()
) -> dict[str, list[Bundle]]:
    """The bundles of each host, by its node, this node (``here``) first; workers take them in order.

    ``indices``: the user's choice and order of bundles; empty: this node's first, then node after
    node as vLLM sorts them, from each as many as make whole stages. Raises ConfigError: too few, or
    a stage's ranks on two nodes, or none here."""
    nodes: dict[str, list[Bundle]] = {}
    if indices:
        known = {bundle.index: bundle for bundle in bundles}
        wrong = [index for index in indices if index not in known]
        if wrong or len(set(indices)) < len(indices) or len(indices) != stages * ranks:
            raise ConfigError(
                f"VLLM_RAY_BUNDLE_INDICES must name {stages * ranks} different bundles (-pp times "
                f"-tp) out of {sorted(known)}, not {list(indices)}"
            )
        bundles = [known[index] for index in indices]
    else:
        bundles = sorted(bundles, key=lambda one: (one.node != here, one.node, one.index))
    for node, found in groupby(bundles, key=lambda one: one.node):
        if node in nodes:
            raise ConfigError(
                "VLLM_RAY_BUNDLE_INDICES goes back to a node that it has left: name all bundles of "
                "a node one after the other"
            )
        nodes[node] = list(found)
    room = {node: sum(one.workers for one in found) for node, found in nodes.items()}
    hosts: dict[str, list[Bundle]] = {}
    left = stages * ranks
    for node, bundles in nodes.items():
        taken = min(room[node] // ranks * ranks, left)
        left -= taken
        if taken:
            hosts[node] = list(bundles[: taken // bundles[0].workers])
    if left:
        raise ConfigError(
            f"-pp {stages} -tp {ranks}: the placement group has room for "
            f"{', '.join(map(str, room.values())) or 'no'} workers on its nodes, and a stage's "
            "tensor-parallel ranks stay on one node"
        )
    if next(iter(hosts)) != here:
        raise ConfigError(
            "the placement group has no room for a stage on this process's own node, which must "
            "have the first one: start the command on a node of the group"
        )
    return hosts


@dataclass
class Placement:
    """What Ray has given, from :func:`place`. Its actors end when nobody refers to it any more; a
    group of our own goes with this process."""

    _ray: Any
    _addresses: list[str]
    _claims: list[list[Any]]
    _devices: list[list[str]]

    def start(self, vllm_config: VllmConfig) -> None:
        """Start an agent on every other host; returns when all are about to meet the main host.
        Raises ConfigError: what one of them says. StallError: one says nothing."""
        from vllm.ray.ray_env import get_env_vars_to_copy
        from vllm.v1.executor.ray_utils import WORKER_SPECIFIC_ENV_VARS  # imports Ray

        if len(self._claims) == 1:
            return
        ours = {name for name in os.environ if name.startswith("SIPIPE_")}
        copied = get_env_vars_to_copy(
            exclude_vars=WORKER_SPECIFIC_ENV_VARS | {SECRET_FILE, RUN_VARIABLE, SOCKETS},
            additional_vars={*current_platform.additional_env_vars, *ours},
            destination="host agents",
        )
        environment = {name: os.environ[name] for name in copied if name in os.environ}
        environment[SECRET] = read_secret().decode()
        told: dict[str, Any] = {"versions": versions(), "config": cloudpickle.dumps(vllm_config)}
        started = []
        for node in range(1, len(self._claims)):
            order = Order(node=node, devices=self._devices[node], **told)
            started.append(self._claims[node][0].start.remote(order, environment, os.getcwd()))
        config = SiPipeConfig.from_additional_config(vllm_config.additional_config)
        said = _get(self._ray, started, config.start_timeout, "starting the host agents")
        for node, reason in enumerate(said, start=1):
            if reason:
                raise ConfigError(f"host {node} ({self._addresses[node]}): {reason}")


def config_of(order: Order) -> VllmConfig:
    """The configuration of the host that gets ``order``; called there."""
    config: VllmConfig = pickle.loads(order.config)  # from the main host, through Ray
    settings = config.additional_config["sipipe"]
    if order.devices:
        settings["devices"] = _visible(order.devices)
    if isinstance(settings.get("cores"), dict):  # those are the main host's
        settings["cores"] = "auto"
    return config


def _visible(devices: list[str]) -> list[int]:
    """How this process counts the GPUs that Ray gave, which has the machine's numbers or names.
    Raises ConfigError: it cannot see one."""
    number = current_platform.device_control_id_to_physical_device_id
    name = current_platform.device_control_env_var
    shown, given = os.environ.get(name), [number(one) for one in devices]
    order = [number(one) for one in shown.split(",")] if shown else given
    if wrong := set(given) - set(order):
        raise ConfigError(f"{OPTION}: Ray gave GPU {min(wrong)}, and {name} is {shown}: unset it")
    return [order.index(gpu) for gpu in given] if shown else given


def place(vllm_config: VllmConfig) -> Placement:
    """Claim a bundle for each worker; ``vllm_config`` says which hosts there are from then on.
    Raises ConfigError: no Ray, no cluster, a group that does not fit, or options that say it too.
    StallError: the cluster has no room within the start timeout."""
    parallel = vllm_config.parallel_config
    config = SiPipeConfig.from_additional_config(vllm_config.additional_config)
    additional = dict(vllm_config.additional_config)
    given = additional.get("sipipe") or {}
    if config.hosts.count > 1 or config.hosts.stages or config.devices is not None:
        raise ConfigError(
            f"{OPTION}: Ray finds the nodes and the GPUs; leave out --nnodes, and "
            '"hosts.stages" and "devices" in the sipipe config'
        )
    if parallel.data_parallel_size > 1:
        raise UnsupportedError(
            f"{OPTION} takes one pipeline, not --data-parallel-size {parallel.data_parallel_size}: "
            "start a server for each replica, and a load balancer in front"
        )
    ray = _connect(parallel.ray_runtime_env)
    stages, ranks = parallel.pipeline_parallel_size, parallel.tensor_parallel_size
    device = current_platform.ray_device_key or "CPU"
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    here = ray.get_runtime_context().get_node_id()
    group = parallel.placement_group or ray.util.get_current_placement_group()
    ours = group is None
    indices = _indices(ours)
    if ours:
        group = _reserve(ray, device, stages, ranks, addresses[here])
    seconds = config.start_timeout
    _wait(group, seconds)
    bundles = _bundles(ray, group, device, ranks if ours else 1)
    hosts = arrange(bundles, here, stages, ranks, indices)
    # The rest of the environment that the user gave to Ray is inherited.
    runtime_env = {"env_vars": dict.fromkeys(current_platform.ray_noset_device_env_vars, "1")}
    gpus = 0 if device != "GPU" else ranks if ours else envs.VLLM_RAY_PER_WORKER_GPUS
    in_group = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
    actor = ray.remote(num_cpus=0, num_gpus=gpus, runtime_env=runtime_env)(Claim)
    claims = [
        [actor.options(scheduling_strategy=in_group(group, one.index)).remote() for one in found]
        for found in hosts.values()
    ]
    asked = [claim.devices.remote(device) for host in claims for claim in host]
    answers = iter(_get(ray, asked, seconds, "starting an actor in every bundle"))
    devices = [sorted(one for _ in host for one in next(answers)) for host in claims]
    count, port = len(hosts), config.hosts.port
    if count > 1:
        if "port" not in given.get("hosts", {}):
            needed = ports_used(count, ranks)
            port = _free_ports(ray, [host[0] for host in claims], port, needed, seconds)
        _make_secret()
    settings = given | {
        "hosts": given.get("hosts", {})
        | {
            "count": count,
            "address": envs.VLLM_HOST_IP or config.hosts.address or addresses[here],
            "port": port,
            "stages": [sum(one.workers for one in found) // ranks for found in hosts.values()],
        }
    }
    if device == "GPU":
        settings["devices"] = _visible(devices[0])
        # Ray hides all GPUs from an actor that has none itself, as the engine's usually is.
        if os.environ.get(current_platform.device_control_env_var) == "":
            del os.environ[current_platform.device_control_env_var]
    vllm_config.additional_config = {**additional, "sipipe": settings}
    parallel.placement_group = None  # nobody has to place this engine again
    return Placement(ray, [addresses[node] for node in hosts], claims, devices)


def _connect(runtime_env: Any) -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # as vLLM does
    try:
        import ray
        import ray.util.scheduling_strategies
        from ray._private.services import get_ray_address_from_environment
    except ImportError as error:
        raise ConfigError(
            f"{OPTION} needs Ray: install SiPipe with its ray extra on every node ({error})"
        ) from None
    if ray.is_initialized():
        return ray
    before, address = signal.getsignal(signal.SIGTERM), "auto"
    try:
        address = get_ray_address_from_environment("auto", None)
        host, _, port = address.rpartition(":")
        # Ray itself tries for minutes.
        socket.create_connection((host, int(port)), CONNECT_SECONDS).close()
        ray.init(address=address, runtime_env=runtime_env)
    except Exception as error:  # Ray has many
        reason = str(error).strip().split("\n")[0]
        raise ConfigError(
            f"{OPTION}: this machine cannot join a Ray cluster ({address}: {reason}): `ray start` "
            "makes one or joins one, and RAY_ADDRESS says which one is meant"
        ) from None
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)  # ray.init takes it over
    return ray


def _indices(ours: bool) -> list[int]:
    given = envs.VLLM_RAY_BUNDLE_INDICES
    if given and ours:
        raise ConfigError("VLLM_RAY_BUNDLE_INDICES is set without a placement group to choose from")
    try:
        return [int(index) for index in given.split(",")] if given else []
    except ValueError:
        raise ConfigError(
            f'VLLM_RAY_BUNDLE_INDICES must be numbers such as 0,1, not "{given}"'
        ) from None


def _reserve(ray: Any, device: str, stages: int, ranks: int, address: str) -> Any:
    """A group of one bundle a stage, the first one on this node. GPUs are packed as vLLM does it;
    stages on CPUs are spread, as each host's workers use all of its cores."""
    bundles = [{device: float(ranks)} for _ in range(stages)]
    bundles[0][f"node:{address}"] = 0.001
    return ray.util.placement_group(bundles, strategy="PACK" if device == "GPU" else "SPREAD")


def _wait(group: Any, seconds: float) -> None:
    began, told = time.monotonic(), False
    # wait: `start_timeout`; room in the cluster
    while not group.wait(1):  # second by second, as Ray lets no signal through meanwhile
        waited = time.monotonic() - began
        if waited > seconds:
            raise StallError(
                f"Ray had no room for {group.bundle_specs} within {seconds:g} s: `ray status` "
                "shows what is free"
            )
        if waited > PATIENCE and not told:
            told = True
            text = "Ray has no room yet for %s (see `ray status`); waiting up to %g s"
            logger.warning(text, group.bundle_specs, seconds)


def _bundles(ray: Any, group: Any, device: str, workers: int) -> list[Bundle]:
    """Those bundles of a group that workers can have. Raises ConfigError: one has several GPUs."""
    nodes = ray.util.placement_group_table(group)["bundles_to_node_id"]
    for index, bundle in enumerate(group.bundle_specs):
        if device == "GPU" and bundle.get(device, 0) > workers:
            raise ConfigError(
                f"bundle {index} of the placement group has {bundle[device]:g} GPUs: give one "
                "bundle for each worker, with one GPU at most"
            )
    return [
        Bundle(index, nodes[index], workers)
        for index, bundle in enumerate(group.bundle_specs)
        if bundle.get(device)
    ]


def _get(ray: Any, answers: list[Any], seconds: float, what: str) -> list[Any]:
    try:
        # wait: what the caller gives; the actors' answers, or the loss of one
        return list(ray.get(answers, timeout=seconds))
    except ray.exceptions.GetTimeoutError:
        raise StallError(f"Ray: {what} took more than {seconds:g} s") from None
    except ray.exceptions.RayError as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise ConfigError(
            f"Ray: {what} failed: {lines[-1]} (the same SiPipe on every node?)"
        ) from error


def _free_ports(ray: Any, claims: list[Any], first: int, count: int, seconds: float) -> int:
    """The first of ``count`` ports in a row that are free on all hosts."""
    for port in range(first, first + TRIES * count, count):
        free = [claim.free.remote(port, count) for claim in claims]
        if all(_get(ray, free, seconds, "looking for free ports")):
            return port
    raise ConfigError(f"no {count} ports in a row from {first} on are free: choose a --master-port")


def _make_secret() -> None:
    """The agents get it as an argument of an actor's method."""
    if SECRET not in os.environ and SECRET_FILE not in os.environ:
        os.environ[SECRET] = secrets.token_hex(32)
    from ray._private.authentication.authentication_utils import is_token_auth_enabled

    if not is_token_auth_enabled():
        logger.warning(
            "Ray has no token (RAY_AUTH_MODE=token): whoever reaches the ports of this Ray cluster "
            "can run code in it, and read this engine's secret"
        )

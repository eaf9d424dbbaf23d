"""Ray as placement: which nodes an engine's stages are on, and a host agent on each of them.

Who runs here
    The foreground of ``sipipe serve``, before vLLM starts. The executor, where a program in a Ray
    actor has made the engine. Once the agents run, everything is as without Ray.
Guarantees
    An actor (:mod:`sipipe.engine.hosts.ray_claim`) holds each worker's bundle while the engine lives.
    Whatever happens to this process, Ray ends the actors with its job, and they end their agents.
Conventions that it takes over from vLLM's own Ray executor
    A placement group that the caller made, ``VLLM_RAY_BUNDLE_INDICES``,
    ``VLLM_RAY_PER_WORKER_GPUS``, ``ray_runtime_env``, the variables that are copied to other nodes,
    and that this process's node comes first.
"""

import os
import pickle
import secrets
import signal
import socket
import threading
import time
from dataclasses import dataclass
from typing import Any

import cloudpickle
from vllm import envs
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.platforms import current_platform

from sipipe.config import SiPipeConfig
from sipipe.engine.hosts.ray_bundles import Bundle, arrange, bundles_of
from sipipe.engine.hosts.ray_claim import Claim, Order
from sipipe.engine.setup.derived import settings_of
from sipipe.engine.setup.host_agreement import ports_used, versions
from sipipe.errors import ConfigError, StallError, UnsupportedError
from sipipe.gpu_slices import named_slices
from sipipe.ipc.last_word import VARIABLE as LAST_WORD
from sipipe.ipc.secret import SECRET, SECRET_FILE, read_secret
from sipipe.ipc.sockets import VARIABLE as SOCKETS
from sipipe.observe.live import RUN_VARIABLE

logger = init_logger(f"vllm.{__name__}")

OPTION = "--distributed-executor-backend ray"
PATIENCE = 10.0
"""Seconds after which the log says what Ray has no room for."""
CONNECT_SECONDS = 5.0
"""Seconds for which a connection to the Ray cluster is tried. Ray itself tries for minutes."""
TRIES = 64
"""Blocks of ports that are tried, at most."""


@dataclass
class Placement:
    """Nodes and GPUs that Ray has given, by host, from :func:`place`. Its actors end when nobody refers
    to it any more. A placement group that SiPipe made ends with this process."""

    _ray: Any
    _addresses: list[str]
    """Addresses of the hosts."""
    _claims: list[list[Any]]
    """Actors of each host's bundles."""
    _devices: list[list[str]]
    """GPUs of each host, as Ray names them."""

    def start(self, vllm_config: VllmConfig) -> None:
        """Start an agent on every other host, and return when all are about to meet the main host.

        Raises ConfigError: an agent cannot start, for the reason that it gives. StallError: one gave
        no answer within the start timeout."""
        from vllm.ray.ray_env import get_env_vars_to_copy
        from vllm.v1.executor.ray_utils import WORKER_SPECIFIC_ENV_VARS  # imports Ray

        if len(self._claims) == 1:
            return
        settings = {name for name in os.environ if name.startswith("SIPIPE_")}
        # Paths of this machine, and a run's id, mean nothing on another one.
        names = get_env_vars_to_copy(
            exclude_vars=WORKER_SPECIFIC_ENV_VARS | {SECRET_FILE, RUN_VARIABLE, SOCKETS, LAST_WORD},
            additional_vars={*current_platform.additional_env_vars, *settings},
            destination="host agents",
        )
        environment = {name: os.environ[name] for name in names if name in os.environ}
        environment[SECRET] = read_secret().decode()
        pickled_config = cloudpickle.dumps(vllm_config)
        answers = []
        for node in range(1, len(self._claims)):
            order = Order(
                node=node,
                versions=versions(),
                config=pickled_config,
                devices=self._devices[node],
            )
            first_claim = self._claims[node][0]
            answers.append(first_claim.start.remote(order, environment, os.getcwd()))
        seconds = settings_of(vllm_config).start_timeout
        reasons = _get(self._ray, answers, seconds, "starting the host agents")
        for node, reason in enumerate(reasons, start=1):
            if reason:
                raise ConfigError(f"host {node} ({self._addresses[node]}): {reason}")


def config_of(order: Order) -> VllmConfig:
    """The configuration of the host that gets ``order``, with the GPUs that Ray gave it. Called on
    that host, once its versions are known to be the main host's."""
    config: VllmConfig = pickle.loads(order.config)  # from the main host, through Ray
    settings = dict(config.additional_config["sipipe"])
    if order.devices:
        settings["devices"] = _visible(order.devices)
    if isinstance(settings.get("cores"), dict):  # a plan of the main host's cores
        settings["cores"] = "auto"
    config.additional_config = {**config.additional_config, "sipipe": settings}
    return config


def _visible(devices: list[str]) -> list[int]:
    """Numbers by which this process counts the GPUs that Ray gave, where Ray has the machine's numbers
    or names. Raises ConfigError: this process cannot see one of them."""
    physical = current_platform.device_control_id_to_physical_device_id
    variable = current_platform.device_control_env_var
    visible = os.environ.get(variable)
    shown = named_slices()
    if shown and {*devices} <= {*shown}:  # slices of one GPU have its number, all of them
        return [shown.index(device) for device in devices]
    gpus = [physical(device) for device in devices]
    if not visible:
        return gpus
    order = [physical(device) for device in visible.split(",")]
    hidden = set(gpus) - set(order)
    if hidden:
        raise ConfigError(
            f"{OPTION}: Ray gave GPU {min(hidden)}, and {variable} is {visible}: unset it"
        )
    return [order.index(gpu) for gpu in gpus]


def place(vllm_config: VllmConfig) -> Placement:
    """Claim a bundle for each worker, and write into ``vllm_config`` which hosts there are.

    Raises ConfigError: there is no Ray or no cluster, the group does not fit, or options name hosts
    or GPUs, too. StallError: the cluster has no room within the start timeout."""
    parallel = vllm_config.parallel_config
    config = settings_of(vllm_config)
    _check_options(vllm_config, config)
    ray = _connect(parallel.ray_runtime_env)
    stages = parallel.pipeline_parallel_size
    ranks = parallel.tensor_parallel_size
    device = current_platform.ray_device_key or "CPU"
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    this_node = ray.get_runtime_context().get_node_id()
    group = parallel.placement_group or ray.util.get_current_placement_group()
    makes_group = group is None
    indices = _indices(makes_group)
    if makes_group:
        group = _reserve(ray, device, stages, ranks, addresses[this_node])
    seconds = config.start_timeout
    _wait(group, seconds)
    # A bundle of SiPipe's own group has room for a stage; one of the caller's for one worker.
    nodes = ray.util.placement_group_table(group)["bundles_to_node_id"]
    bundles = bundles_of(group.bundle_specs, nodes, device, ranks if makes_group else 1)
    hosts = arrange(bundles, this_node, stages, ranks, indices)
    if device != "GPU":
        gpus: float = 0
    elif makes_group:
        gpus = ranks
    else:
        gpus = envs.VLLM_RAY_PER_WORKER_GPUS
    claims = _start_claims(ray, group, hosts, gpus)
    devices = _claimed_devices(ray, claims, device, seconds)
    settings = _settings_of_hosts(
        vllm_config, ray, hosts, claims, address=addresses[this_node], ranks=ranks
    )
    if device == "GPU":
        settings["devices"] = _visible(devices[0])
        # Ray hides all GPUs from an actor that has none itself, as the engine's usually is.
        if os.environ.get(current_platform.device_control_env_var) == "":
            del os.environ[current_platform.device_control_env_var]
    vllm_config.additional_config = {**vllm_config.additional_config, "sipipe": settings}
    parallel.placement_group = None  # nobody has to place this engine again
    return Placement(
        _ray=ray,
        _addresses=[addresses[node] for node in hosts],
        _claims=claims,
        _devices=devices,
    )


def _check_options(vllm_config: VllmConfig, config: SiPipeConfig) -> None:
    """Refuse options that would say what Ray says. Raises ConfigError, UnsupportedError."""
    parallel = vllm_config.parallel_config
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


def _start_claims(
    ray: Any, group: Any, hosts: dict[str, list[Bundle]], gpus: float
) -> list[list[Any]]:
    """Start an actor with ``gpus`` GPUs in every bundle; returns them by host."""
    # Actors inherit what else the user gave to Ray as environment.
    runtime_env = {"env_vars": dict.fromkeys(current_platform.ray_noset_device_env_vars, "1")}
    in_group = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
    actor = ray.remote(num_cpus=0, num_gpus=gpus, runtime_env=runtime_env)(Claim)
    return [
        [
            actor.options(scheduling_strategy=in_group(group, bundle.index)).remote()
            for bundle in bundles
        ]
        for bundles in hosts.values()
    ]


def _claimed_devices(
    ray: Any, claims: list[list[Any]], key: str, seconds: float
) -> list[list[str]]:
    """The accelerators of each host's bundles, as Ray names them."""
    questions = [claim.devices.remote(key) for host in claims for claim in host]
    answers = iter(_get(ray, questions, seconds, "starting an actor in every bundle"))
    return [sorted(device for _ in host for device in next(answers)) for host in claims]


def _settings_of_hosts(
    vllm_config: VllmConfig,
    ray: Any,
    hosts: dict[str, list[Bundle]],
    claims: list[list[Any]],
    *,
    address: str,
    ranks: int,
) -> dict[str, Any]:
    """SiPipe's settings with the hosts that Ray has given. Several hosts also get ports that are free
    on all of them, and a secret; ``address`` is this node's by Ray."""
    config = settings_of(vllm_config)
    settings = vllm_config.additional_config.get("sipipe") or {}
    host_settings = settings.get("hosts", {})
    port = config.hosts.port
    if len(hosts) > 1:
        if "port" not in host_settings:
            needed = ports_used(len(hosts), ranks)
            port = _free_ports(
                ray, [host[0] for host in claims], port, needed, config.start_timeout
            )
        _make_secret()
    workers = [sum(bundle.workers for bundle in bundles) for bundles in hosts.values()]
    placed = {
        "count": len(hosts),
        "address": envs.VLLM_HOST_IP or config.hosts.address or address,
        "port": port,
        "stages": [count // ranks for count in workers],
    }
    return settings | {"hosts": host_settings | placed}


def _connect(runtime_env: Any) -> Any:
    """Join the Ray cluster unless this process has; returns the module ``ray``. Raises ConfigError:
    Ray is not installed, or no cluster can be joined."""
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
    handler = signal.getsignal(signal.SIGTERM)
    address = "auto"
    try:
        address = get_ray_address_from_environment("auto", None)
        host, _, port = address.rpartition(":")
        socket.create_connection((host, int(port)), CONNECT_SECONDS).close()
        ray.init(address=address, runtime_env=runtime_env)
    except Exception as error:  # Ray raises errors of many classes
        reason = str(error).strip().split("\n")[0]
        raise ConfigError(
            f"{OPTION}: this machine cannot join a Ray cluster ({address}: {reason}): `ray start` "
            "makes one or joins one, and RAY_ADDRESS says which one is meant"
        ) from None
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)  # ray.init puts its own there
    return ray


def _indices(makes_group: bool) -> list[int]:
    """The bundles that the user has chosen; empty: none. Raises ConfigError: there is no group of the
    user's to choose from (``makes_group``), or they are no numbers."""
    words = envs.VLLM_RAY_BUNDLE_INDICES
    if words and makes_group:
        raise ConfigError("VLLM_RAY_BUNDLE_INDICES is set without a placement group to choose from")
    try:
        return [int(index) for index in words.split(",")] if words else []
    except ValueError:
        raise ConfigError(
            f'VLLM_RAY_BUNDLE_INDICES must be numbers such as 0,1, not "{words}"'
        ) from None


def _reserve(ray: Any, device: str, stages: int, ranks: int, address: str) -> Any:
    """Make a placement group of one bundle for each stage, the first one on this node. GPUs are packed
    as vLLM does it. Stages on CPUs are spread, as each host's workers use all of its cores."""
    bundles = [{device: float(ranks)} for _ in range(stages)]
    bundles[0][f"node:{address}"] = 0.001  # each node has 1 of this resource, which only names it
    return ray.util.placement_group(bundles, strategy="PACK" if device == "GPU" else "SPREAD")


def _wait(group: Any, seconds: float) -> None:
    """Wait until Ray has room for ``group``. Raises StallError: it has none within ``seconds``."""
    began = time.monotonic()
    warned = False
    # wait: `start_timeout`; room in the cluster
    while not group.wait(1):  # second by second, as Ray lets no signal through meanwhile
        waited = time.monotonic() - began
        if waited > seconds:
            raise StallError(
                f"Ray had no room for {group.bundle_specs} within {seconds:g} s: `ray status` "
                "shows what is free"
            )
        if waited > PATIENCE and not warned:
            warned = True
            logger.warning(
                "Ray has no room yet for %s (see `ray status`); waiting up to %g s",
                group.bundle_specs,
                seconds,
            )


def _get(ray: Any, answers: list[Any], seconds: float, work: str) -> list[Any]:
    """The results of calls to actors, which do ``work``. Raises StallError: one takes more than
    ``seconds``. ConfigError: one raises, or its actor has died."""
    try:
        # wait: what the caller gives; the actors' answers, or the loss of one
        return list(ray.get(answers, timeout=seconds))
    except ray.exceptions.GetTimeoutError:
        raise StallError(f"Ray: {work} took more than {seconds:g} s") from None
    except ray.exceptions.RayError as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise ConfigError(
            f"Ray: {work} failed: {lines[-1]} (the same SiPipe on every node?)"
        ) from error


def _free_ports(ray: Any, claims: list[Any], first: int, count: int, seconds: float) -> int:
    """The first of ``count`` ports in a row, from ``first`` on, that are free on all hosts. Raises
    ConfigError: there are none."""
    for port in range(first, first + TRIES * count, count):
        free = [claim.free.remote(port, count) for claim in claims]
        if all(_get(ray, free, seconds, "looking for free ports")):
            return port
    raise ConfigError(f"no {count} ports in a row from {first} on are free: choose a --master-port")


def _make_secret() -> None:
    """Make a secret for this engine's hosts unless the user has set one. Agents get it as an argument
    of an actor's method, so it is as safe as Ray is."""
    if SECRET not in os.environ and SECRET_FILE not in os.environ:
        os.environ[SECRET] = secrets.token_hex(32)
    from ray._private.authentication.authentication_utils import is_token_auth_enabled

    if not is_token_auth_enabled():
        logger.warning(
            "Ray has no token (RAY_AUTH_MODE=token): whoever reaches the ports of this Ray cluster "
            "can run code in it, and read this engine's secret"
        )

"""Agreement of several hosts: what all must have the same, how they trust each other, and where they
listen."""

from __future__ import annotations

import os
import platform
import socket
from typing import TYPE_CHECKING

import torch
import vllm
from vllm import envs

from sipipe._version import __version__
from sipipe.config import HostSettings, SiPipeConfig
from sipipe.engine.setup.stages import stages_of_hosts
from sipipe.errors import ConfigError
from sipipe.ipc.link.nixl_agent import nixl_reach
from sipipe.ipc.secret import read_secret
from sipipe.ipc.tcp import OTHER_PORT, address_of, check_port

if TYPE_CHECKING:
    from sipipe.engine.setup.record import Setup

OWN_SETTINGS = {"cores", "devices", "samplers", "trace", "trace_limit"}
"""Settings that each host may have its own value of."""


def check_hosts(hosts: HostSettings, node: int = 0, seconds: float = 0.0) -> None:
    """Refuse several hosts that cannot find or trust each other. Host ``node`` is this one, and a name
    may come to be known within ``seconds``. Raises ConfigError: no address, no such host, or no
    secret. ResourceError: the name was not known in time."""
    if hosts.count == 1:
        return
    if not hosts.address:
        raise ConfigError(
            f"--nnodes {hosts.count} needs --master-addr, the main host's address, on every host"
        )
    read_secret()
    address = main_address(hosts, node, seconds)
    if address.startswith("127.") and hosts.address not in (address, "localhost"):
        raise ConfigError(
            f"--master-addr {hosts.address} is {address} on this host (/etc/hosts), where no "
            "other host comes: give its address in a network that all are in"
        )


def main_address(hosts: HostSettings, node: int, seconds: float) -> str:
    """The main host's address, as host ``node`` has it. Raises as :func:`check_hosts`."""
    return address_of(hosts.address, "--master-addr", seconds, own=node == 0)


_PORTS_OF_A_LINK = 3
"""Ports that each link between hosts has: ZeroMQ's, and two of NIXL's."""


def control_port(hosts: HostSettings, node: int) -> int:
    """Port on which the main host listens to host ``node``, which is 1 or more."""
    return hosts.port + node - 1


def link_port(setup: Setup, rank: int) -> int:
    """Port on which the next stage listens to ``rank`` of a host's last stage. The next stage is on
    another host, and it listens there."""
    hosts = setup.config.hosts
    last_stages = [stages[-1] for stages in stages_of_hosts(setup.stages, hosts)]
    stage, tp_rank = divmod(rank, setup.ranks)
    boundary = last_stages.index(stage)
    # The ports of `control_port` come first, one for each host but the main one.
    first_port = hosts.port + hosts.count - 1
    return first_port + boundary * setup.ranks + tp_rank


def nixl_ports(setup: Setup, rank: int) -> tuple[int, int]:
    """Ports on which the next stage listens to ``rank`` if NIXL joins them: that of the packets, and that
    of the hidden states, which is used over TCP only. They are not those of the link by ZeroMQ, which is
    tried if this one fails, and perhaps hangs."""
    links = (setup.config.hosts.count - 1) * setup.ranks
    port = link_port(setup, rank)
    return port + links, port + 2 * links


def tries_nixl(config: SiPipeConfig) -> bool:
    """True where links with this host may be tried by NIXL."""
    wanted = config.transport in ("auto", "nixl") and not config.hosts.encrypt_links
    return wanted and bool(nixl_reach())


def own_address(hosts: HostSettings, seconds: float = 0.0) -> str:
    """The address of this host, which is not the main one, as others reach it: ``VLLM_HOST_IP``,
    else that of its route to the main host. A name may come to be known within ``seconds``. Raises
    ConfigError: there is no route. ResourceError: the name was not known in time."""
    if envs.VLLM_HOST_IP:
        return address_of(envs.VLLM_HOST_IP, "VLLM_HOST_IP", seconds, own=True)
    main = main_address(hosts, 1, seconds)
    family = socket.AF_INET6 if ":" in main else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((main, hosts.port))  # a datagram socket only looks for a route
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ConfigError(
            f"--master-addr {hosts.address} cannot be reached from this host ({error.strerror}): "
            "give the main host's address in a network that both are in"
        ) from None


def check_main_host(hosts: HostSettings, seconds: float = 0.0) -> None:
    """Refuse to be the main host where its ports cannot be listened on, before a model is loaded."""
    for node in range(1, hosts.count):
        address = main_address(hosts, 0, seconds)
        check_port(address, control_port(hosts, node), OTHER_PORT)


def ports_used(hosts: int, ranks: int) -> int:
    """Number of ports that an engine uses, in a row: for control connections, and for links."""
    return (hosts - 1) * (1 + _PORTS_OF_A_LINK * ranks)


def versions() -> dict[str, str]:
    """Versions of this host's software, which all hosts must have the same."""
    return {
        "SiPipe": __version__,
        "vLLM": vllm.__version__,
        "torch": torch.__version__,
        "Python": ".".join(platform.python_version_tuple()[:2]),
    }


def agreed(setup: Setup) -> dict[str, str]:
    """Values that all hosts must have the same, as text, by the names that a user knows."""
    config = setup.vllm_config
    model = config.model_config
    cache = config.cache_config
    scheduler = config.scheduler_config
    speculative = config.speculative_config
    transfer = config.kv_transfer_config
    values = {
        **versions(),
        "the model": model.model,
        "--revision": model.revision,
        "--dtype": model.dtype,
        "--quantization": model.quantization,
        "--max-model-len": model.max_model_len,
        "--seed": model.seed,
        "--enforce-eager": model.enforce_eager,
        "--load-format": config.load_config.load_format,
        "--kv-cache-dtype": cache.cache_dtype,
        "--block-size": cache.block_size,
        "--enable-prefix-caching": cache.enable_prefix_caching,
        "--max-num-seqs": scheduler.max_num_seqs,
        "--max-num-batched-tokens": scheduler.max_num_batched_tokens,
        "--speculative-config": speculative and f"{speculative.method} {setup.drafts}",
        "--enable-lora": config.lora_config is not None,
        "the connector (--kv-transfer-config)": transfer and transfer.kv_connector,
        "-pp": setup.stages,
        "-tp": setup.ranks,
        "VLLM_PP_LAYER_PARTITION": os.environ.get("VLLM_PP_LAYER_PARTITION", ""),
    }
    values |= {
        f'"{key}" (sipipe config)': value
        for key, value in setup.config.to_dict().items()
        if key not in OWN_SETTINGS
    }
    return {name: str(value) for name, value in values.items()}


def difference(main: dict[str, str], other: dict[str, str]) -> str:
    """Clauses for messages on the values that are not the same; empty if all are."""
    return ", ".join(
        f"{name} is {main.get(name)} on the main host and {other.get(name)} there"
        for name in {**main, **other}
        if main.get(name) != other.get(name)
    )

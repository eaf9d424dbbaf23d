"""Devices, links, networks, engines: the numbers of ``hardware.toml``, each with its source."""

from __future__ import annotations

import dataclasses
import functools
import os
import tomllib
from collections.abc import Mapping
from importlib.resources import files
from typing import Any, Literal

import psutil

from sipipe.errors import ConfigError

__all__ = [
    "Cluster",
    "Device",
    "Efficiency",
    "Engine",
    "Link",
    "Network",
    "Sampling",
    "device",
    "devices",
    "efficiency",
    "engine",
    "local_cpu",
    "network",
    "sampling",
]

_GIB = float(1 << 30)
_PER_CORE = ("memory_gbs", "bf16_tflops", "fp8_tflops")
"""What hardware.toml states of one core where the device is this machine's CPU."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """How the devices of one host exchange data. Rates are per device and direction."""

    name: str
    bandwidth_gbs: float
    efficiency: float
    step_us: float
    hop_us: float
    small_us: float = 0.0
    """Latency of the one-kernel all-reduce for small messages; 0: there is none."""
    small_gbs: float = 0.0
    """Its bus bandwidth."""

    @property
    def bytes_per_second(self) -> float:
        """What a ring all-reduce or a copy gets of the link."""
        return self.bandwidth_gbs * 1e9 * self.efficiency


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """Between hosts. ``gigabits`` is one adapter's rate, shared by the devices of its host."""

    gigabits: float
    adapters: int
    efficiency: float
    step_us: float
    small_step_us: float
    small_efficiency: float
    hop_us: float

    @property
    def peak_bytes_per_second(self) -> float:
        """All adapters of a host together, one direction."""
        return self.gigabits / 8 * 1e9 * self.adapters


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One accelerator, or one CPU socket."""

    name: str
    memory_gib: float
    memory_gbs: float
    bf16_tflops: float
    fp8_tflops: float
    link: Link
    host_link: Link
    """To its host's memory: how logits reach CPU samplers."""
    kind: Literal["gpu", "cpu"] = "gpu"
    cores: int = 0
    """CPU sockets: physical cores."""

    @property
    def memory_bytes(self) -> float:
        """Usable memory in bytes."""
        return self.memory_gib * _GIB

    def flops(self, weight_bytes: float) -> float:
        """Dense peak for weights of this width, FLOP/s; below 8 bits weights are widened."""
        return (self.fp8_tflops if weight_bytes == 1.0 else self.bf16_tflops) * 1e12


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """What kernels reach of a device's peak."""

    memory: float
    compute: float
    sharpness: float
    """Exponent of the soft roofline; larger is closer to the maximum of the two."""
    layer_us: float
    workspace_gib: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Cost of drawing one token, per logit."""

    device_bytes: float
    """Memory traffic of vLLM's sampler on the device, bytes."""
    vllm_core_ns: float
    """vLLM's sampler on one core of a CPU device, ns."""
    core_ns: float
    """SiPipe's kernel on one core, ns."""
    host_bytes: float
    """Memory traffic of SiPipe's kernel, bytes."""
    host_gbs: float
    """Memory bandwidth that all samplers of a host share, GB/s."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """What an engine adds to the model's own work; see the comments in ``hardware.toml``."""

    key: str
    name: str
    preparation_us: float
    preparation_sequence_us: float
    readd_us: float
    exposed: float
    transfer_us: float
    blocking: float
    uneven: float
    variation: float
    sampling: Literal["device", "host"]
    schedule_us: float
    schedule_sequence_us: float
    extra: float
    schedule_exposed: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Equal hosts, filled with equal devices."""

    device: Device
    hosts: int
    devices_per_host: int
    network: Network
    cores_per_host: int
    """CPU cores of one host, all of them."""

    @property
    def devices(self) -> int:
        """Devices in all."""
        return self.hosts * self.devices_per_host

    @property
    def sampler_cores(self) -> int:
        """Cores that the last stage's host has left: one per worker, two for the engine."""
        return max(1, self.cores_per_host - self.devices_per_host - 2)


@functools.cache
def _table() -> Mapping[str, Any]:
    text = files("sipipe.tools.planner").joinpath("hardware.toml").read_text("utf-8")
    return {key: _values(entry) for key, entry in tomllib.loads(text).items()}


def _values(entry: Any) -> Any:
    """``entry`` with every ``[value, source]`` pair reduced to its value."""
    if isinstance(entry, dict):
        return {key: _values(value) for key, value in entry.items()}
    return entry[0] if isinstance(entry, list) else entry


def devices() -> tuple[str, ...]:
    """Names that :func:`device` takes."""
    return tuple(_table()["device"])


def _pick(option: str, what: str, key: str) -> Mapping[str, Any]:
    table: Mapping[str, Mapping[str, Any]] = _table()[what]
    if key.lower() not in table:
        raise ConfigError(f"{option}: unknown {what} {key!r} (known: {', '.join(table)})")
    return table[key.lower()]


def device(key: str, *, memory_gib: float | None = None) -> Device:
    """A device by name; ``memory_gib`` replaces its memory.

    Raises:
        ConfigError: an unknown name.
    """
    entry = _pick("--gpu", "device", key)
    if key.lower() == "cpu":
        return local_cpu(1, memory_gib=memory_gib)
    links = {side: Link(**_table()["link"][entry[side]]) for side in ("link", "host_link")}
    found = Device(**{**entry, **links})
    return found if memory_gib is None else dataclasses.replace(found, memory_gib=memory_gib)


def local_cpu(devices: int, *, memory_gib: float | None = None) -> Device:
    """This machine's CPU, cut into ``devices`` equal parts; bandwidth and throughput assumed."""
    entry = _table()["device"]["cpu"]
    link = Link(**_table()["link"][entry["link"]])
    cores = len(os.sched_getaffinity(0))
    share = max(1, cores // devices)
    total = psutil.virtual_memory().total / _GIB
    return Device(
        name=f"this machine's CPU, {share} of {cores} cores",
        kind="cpu",
        cores=share,
        memory_gib=total / devices if memory_gib is None else memory_gib,
        **{name: entry[name] * cores / devices for name in _PER_CORE},
        link=link,
        host_link=link,
    )


def network(gigabits: float, adapters: int = 1) -> Network:
    """``adapters`` network adapters of ``gigabits`` Gb/s in each host."""
    return Network(**_table()["network"], gigabits=gigabits, adapters=adapters)


def efficiency() -> Efficiency:
    """What kernels reach of a device's peak."""
    return Efficiency(**_table()["efficiency"])


def engine(key: str) -> Engine:
    """An engine by name.

    Raises:
        ConfigError: an unknown name.
    """
    return Engine(**_pick("--baseline", "engine", key), key=key.lower())


def sampling(key: str) -> Sampling:
    """The cost of one combination of sampling parameters.

    Raises:
        ConfigError: an unknown name.
    """
    return Sampling(**_pick("--sampling", "sampling", key), **_table()["sampling-host"])

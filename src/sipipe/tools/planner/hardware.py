"""Devices, links, networks, engines: the numbers of ``hardware.toml``, each with its source."""

import dataclasses
import functools
import os
import tomllib
from collections.abc import Mapping
from importlib.resources import files
from typing import Any, Literal

import psutil

from sipipe.errors import ConfigError

_GIB = float(1 << 30)


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
    link: Link
    host_link: Link
    """To its host's memory: how logits reach CPU samplers."""
    kind: Literal["gpu", "cpu"] = "gpu"
    cores: int = 0
    """CPU sockets: physical cores."""
    fp8_tflops: float = 0.0
    """0: there are no FP8 units, and weights are widened to BF16."""

    @property
    def memory_bytes(self) -> float:
        return self.memory_gib * _GIB

    def flops(self, weight_bytes: float) -> float:
        """Dense peak for weights of this width, FLOP/s; below 8 bits weights are widened."""
        fp8 = self.fp8_tflops if weight_bytes == 1.0 else 0.0
        return (fp8 or self.bf16_tflops) * 1e12


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
        return self.hosts * self.devices_per_host

    @property
    def sampler_cores(self) -> int:
        """Cores that the last stage's host has left: one per worker, two for the engine."""
        return max(1, self.cores_per_host - self.devices_per_host - 2)


@functools.cache
def _table() -> Mapping[str, Any]:
    """``hardware.toml`` by kind and name, without the sources.

    An entry that is ``like`` another one, which stands before it, has that one's values but for
    those of its own.
    """
    table: dict[str, Any] = _values(
        tomllib.loads(files("sipipe.tools.planner").joinpath("hardware.toml").read_text("utf-8"))
    )
    for kind in ("device", "link", "engine"):
        for key, entry in table[kind].items():
            base = table[kind].get(entry.pop("like", None), {})
            table[kind][key] = {**base, **entry}
    return table


def _values(entry: Any) -> Any:
    """``entry`` with every ``[value, source]`` pair reduced to its value."""
    if isinstance(entry, dict):
        return {key: _values(value) for key, value in entry.items()}
    return entry[0] if isinstance(entry, list) else entry


def sources(key: str) -> dict[str, str]:
    """Where the numbers of device ``key``, its links, the network and the efficiencies are from, by name."""
    table = tomllib.loads(
        files("sipipe.tools.planner").joinpath("hardware.toml").read_text("utf-8")
    )
    parts: list[tuple[str, Any]] = [(part, table[part]) for part in ("efficiency", "network")]
    names = [("device", key.lower())]
    while names:
        kind, name = names.pop()
        entry = table[kind].get(name, {})
        parts.append((f"{kind}.{name}", entry))
        names += [(kind, entry["like"])] if "like" in entry else []
        names += [("link", entry[side]) for side in ("link", "host_link") if side in entry]
    return {
        f"{part}.{field}": f"{value[0]:g}: {value[1]}"
        for part, entry in parts
        for field, value in entry.items()
        if isinstance(value, list)
    }


def devices() -> tuple[str, ...]:
    """Names that :func:`device` takes."""
    return tuple(_table()["device"])


def _pick(option: str, what: str, key: str) -> Mapping[str, Any]:
    table: Mapping[str, Mapping[str, Any]] = _table()[what]
    if key.lower() not in table:
        raise ConfigError(f"{option}: unknown {what} {key!r} (known: {', '.join(table)})")
    return table[key.lower()]


def device(key: str, *, memory_gib: float | None = None, parts: int = 1) -> Device:
    """A device by name; ``memory_gib`` replaces its memory.

    ``cpu`` is this machine's, cut into ``parts`` equal ones; its bandwidth and throughput are
    assumed.

    Raises:
        ConfigError: an unknown name.
    """
    entry = dict(_pick("--gpu", "device", key))
    if key.lower() == "cpu":
        cores = len(os.sched_getaffinity(0))
        entry["cores"] = max(1, cores // parts)
        entry["name"] += f", {entry['cores']} of {cores} cores"
        entry["memory_gib"] = psutil.virtual_memory().total / _GIB / parts
        for name in ("memory_gbs", "bf16_tflops"):  # stated of one core
            entry[name] *= cores / parts
    if memory_gib is not None:
        entry["memory_gib"] = memory_gib
    names = {"host_link": entry["link"]} | entry
    links = {side: Link(**_table()["link"][names[side]]) for side in ("link", "host_link")}
    return Device(**entry | links)


def network(gigabits: float, adapters: int = 1) -> Network:
    """``adapters`` network adapters of ``gigabits`` Gb/s in each host."""
    return Network(**_table()["network"], gigabits=gigabits, adapters=adapters)


def efficiency() -> Efficiency:
    """What kernels reach of a device's peak."""
    return Efficiency(**_table()["efficiency"])


def engine(key: str) -> Engine:
    """An engine by name; ConfigError for an unknown one."""
    return Engine(**_pick("--baseline", "engine", key), key=key.lower())


def sampling(key: str) -> Sampling:
    """The cost of one combination of sampling parameters; ConfigError for an unknown one."""
    return Sampling(**_pick("--sampling", "sampling", key), **_table()["sampling-host"])

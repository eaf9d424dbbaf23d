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

    key: str
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

    key: str
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
    fp4_tflops: float = 0.0

    @property
    def memory_bytes(self) -> float:
        return self.memory_gib * _GIB

    def flops(self, bits: int) -> float:
        """Dense peak of products of this width, FLOP/s: BF16's where there are no such units."""
        narrow = {8: self.fp8_tflops, 4: self.fp4_tflops}.get(bits, 0.0)
        return (narrow or self.bf16_tflops) * 1e12


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """What kernels reach of a device's peak."""

    memory: float
    compute: float
    compute_narrow: float
    """Of products of 8 and 4 bits, where the device has units for them."""
    sharpness: float
    """Exponent of the soft roofline; larger is closer to the maximum of the two."""
    layer_us: float
    moe_us: float
    mla_us: float
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


Case = Literal["stated", "quickest", "slowest"]


@dataclasses.dataclass(frozen=True, slots=True)
class Assumed:
    """Which values the inputs have that nobody measured on the cluster in question."""

    case: Case = "stated"
    given: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """What the user says, by names of :func:`assumptions`: has no range."""

    def values(self, name: str, entry: Mapping[str, Any]) -> dict[str, Any]:
        """``entry`` with every ``[value, source, ...]`` reduced to its value."""
        place = {"stated": 0, "quickest": 2, "slowest": 3}[self.case]

        def value(field: str, found: Any) -> Any:
            if not isinstance(found, list):
                return found
            return self.given.get(f"{name}.{field}", found[place if len(found) > 2 else 0])

        return {field: value(field, found) for field, found in entry.items()}


STATED = Assumed()


@functools.cache
def _table() -> Mapping[str, Any]:
    """``hardware.toml`` by kind and name.

    An entry that is ``like`` another one, which stands before it, has that one's values but for
    those of its own.
    """
    table: dict[str, Any] = tomllib.loads(
        files("sipipe.tools.planner").joinpath("hardware.toml").read_text("utf-8")
    )
    for kind in ("device", "link", "engine"):
        for key, entry in table[kind].items():
            base = table[kind].get(entry.pop("like", None), {})
            table[kind][key] = {**base, **entry}
    return table


def assumptions() -> dict[str, tuple[float, float, float, str]]:
    """What :attr:`Assumed.given` may name: value, quickest, slowest, source."""
    table = _table()
    parts = {kind: table[kind] for kind in ("efficiency", "loop", "sampling-host", "network")}
    for kind in ("sampling", "engine", "device", "link"):
        parts |= {f"{kind}.{key}": entry for key, entry in table[kind].items()}
    return {
        f"{part}.{field}": (found[0], found[2], found[3], found[1])
        for part, entry in parts.items()
        for field, found in entry.items()
        if isinstance(found, list) and len(found) > 2
    }


def sources(key: str) -> dict[str, str]:
    """Where the numbers of device ``key``, its links, the network and the efficiencies are from, by name."""
    table = _table()
    device = table["device"][key.lower()]
    parts = {part: table[part] for part in ("efficiency", "network")}
    parts[f"device.{key.lower()}"] = device
    for side in ("link", "host_link"):
        if side in device:
            parts[f"link.{device[side]}"] = table["link"][device[side]]
    return {
        f"{part}.{field}": f"{value[0]:g}: {value[1]}"
        for part, entry in parts.items()
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


def _link(key: str, assumed: Assumed) -> Link:
    return Link(**assumed.values(f"link.{key}", _table()["link"][key]), key=key)


def device(
    key: str, *, memory_gib: float | None = None, parts: int = 1, assumed: Assumed = STATED
) -> Device:
    """A device by name; ``memory_gib`` replaces its memory.

    ``cpu`` is this machine's, cut into ``parts`` equal ones; its bandwidth and throughput are
    assumed.

    Raises:
        ConfigError: an unknown name.
    """
    found, key = _pick("--gpu", "device", key), key.lower()
    entry = assumed.values(f"device.{key}", found)
    if key == "cpu":
        cores = len(os.sched_getaffinity(0))
        entry["cores"] = max(1, cores // parts)
        entry["name"] += f", {entry['cores']} of {cores} cores"
        entry["memory_gib"] = psutil.virtual_memory().total / _GIB / parts
        for name in ("memory_gbs", "bf16_tflops"):  # stated of one core
            entry[name] *= cores / parts
    if memory_gib is not None:
        entry["memory_gib"] = memory_gib
    names = {"host_link": entry["link"]} | entry
    links = {side: _link(names[side], assumed) for side in ("link", "host_link")}
    return Device(**entry | links, key=key)


def network(gigabits: float, adapters: int = 1, assumed: Assumed = STATED) -> Network:
    """``adapters`` network adapters of ``gigabits`` Gb/s in each host."""
    values = assumed.values("network", _table()["network"])
    return Network(**values, gigabits=gigabits, adapters=adapters)


def at_end(cluster: Cluster, assumed: Assumed) -> Cluster:
    """``cluster``, built with what ``assumed`` gives, at that end of what is assumed of its links,
    its network and its devices."""
    found, between = cluster.device, cluster.network
    name, entry = f"device.{found.key}", _table()["device"][found.key]
    ranged = {
        field: value for field, value in entry.items() if isinstance(value, list) and value[2:]
    }
    stated = dataclasses.replace(assumed, case="stated").values(name, ranged)
    own = {  # a device's may be a part of what the table states
        field: getattr(found, field) * value / stated[field]
        for field, value in assumed.values(name, ranged).items()
    }
    return dataclasses.replace(
        cluster,
        device=dataclasses.replace(
            found,
            link=_link(found.link.key, assumed),
            host_link=_link(found.host_link.key, assumed),
            **own,
        ),
        network=network(between.gigabits, between.adapters, assumed),
    )


def efficiency(assumed: Assumed = STATED) -> Efficiency:
    """What kernels reach of a device's peak."""
    return Efficiency(**assumed.values("efficiency", _table()["efficiency"]))


def engine(key: str, assumed: Assumed = STATED) -> Engine:
    """An engine by name; ConfigError for an unknown one."""
    own = assumed.values(f"engine.{key.lower()}", _pick("--baseline", "engine", key))
    return Engine(**own, **assumed.values("loop", _table()["loop"]), key=key.lower())


def sampling(key: str, assumed: Assumed = STATED) -> Sampling:
    """The cost of one combination of sampling parameters; ConfigError for an unknown one."""
    own = assumed.values(f"sampling.{key.lower()}", _pick("--sampling", "sampling", key))
    return Sampling(**own, **assumed.values("sampling-host", _table()["sampling-host"]))

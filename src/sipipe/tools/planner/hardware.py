"""Devices, links, networks, engines: the numbers of ``hardware.toml``, each with its source.

The comments of that file say what the fields are.
"""

import dataclasses
import functools
import os
import tomllib
from collections.abc import Mapping
from importlib.resources import files
from typing import Any, Literal

import msgspec

from sipipe.errors import ConfigError
from sipipe.ipc.memory import free_bytes

_GIB = float(1 << 30)
_KINDS = ("sampling", "engine", "device", "link")
"""Parts that have several entries."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """Link between the devices of one host. Rates are per device and direction."""

    key: str
    name: str
    bandwidth_gbs: float
    efficiency: float
    step_us: float
    hop_us: float
    small_us: float = 0.0
    small_gbs: float = 0.0

    @property
    def bytes_per_second(self) -> float:
        """Rate that a ring all-reduce or a copy gets of the link."""
        return self.bandwidth_gbs * 1e9 * self.efficiency


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """Network between hosts. ``gigabits`` is one adapter's rate; a host's devices share its adapters."""

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
    kind: Literal["gpu", "cpu"] = "gpu"
    cores: int = 0
    fp8_tflops: float = 0.0
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
    """Shares of a device's peak that kernels reach."""

    memory: float
    compute: float
    compute_narrow: float
    sharpness: float
    layer_us: float
    cpu_layer_us: float
    cpu_attention: float
    moe_us: float
    mla_us: float
    workspace_gib: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Cost of drawing one token, per logit; of SiPipe's kernels also the memory traffic."""

    device_bytes: float
    vllm_core_ns: float
    core_ns: float
    host_bytes: float
    host_gbs: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """Times that an engine adds to the model's own work."""

    key: str
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
class FrontEnd:
    """CPU time of an API server, which is a process on one core."""

    token_us: float
    chunk_us: float
    busy: float

    def tokens_per_second(self, stream_interval: int) -> float:
        """Output tokens a second that one API server streams, in chunks of ``stream_interval``."""
        # A tenth of a nanosecond at least: both may be assumed to take no time.
        return self.busy * 1e6 / max(self.token_us + self.chunk_us / stream_interval, 1e-4)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Equal hosts, filled with equal devices. ``cores_per_host`` are all of a host's."""

    device: Device
    hosts: int
    devices_per_host: int
    network: Network
    cores_per_host: int

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
    """Choice of values for inputs that nobody measured on the cluster in question."""

    case: Case = "stated"
    given: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Values that the user states, by names of :func:`assumptions`; they have no range."""

    def values(self, part: str) -> dict[str, Any]:
        """A part of the table with every ``[value, source, ...]`` reduced to its value."""
        place = {"stated": 0, "quickest": 2, "slowest": 3}[self.case]
        values: dict[str, Any] = {}
        for field, entry in _parts()[part].items():
            if isinstance(entry, list):
                ranged = len(entry) > 2
                values[field] = self.given.get(f"{part}.{field}", entry[place if ranged else 0])
            else:
                values[field] = entry
        return values


STATED = Assumed()


@functools.cache
def _parts() -> dict[str, dict[str, Any]]:
    """``hardware.toml`` by part, such as ``efficiency`` and ``device.h100``. An entry that is
    ``like`` another one, which stands before it, has that one's values beside its own."""
    text = files("sipipe.tools.planner").joinpath("hardware.toml").read_text("utf-8")
    parts: dict[str, dict[str, Any]] = {}
    for part, table in tomllib.loads(text).items():
        if part not in _KINDS:
            parts[part] = table
            continue
        for key, entry in table.items():
            base = parts.get(f"{part}.{entry.pop('like', None)}", {})
            parts[f"{part}.{key}"] = {**base, **entry}
    return parts


def assumptions() -> dict[str, tuple[float, float, float, str]]:
    """Names that :attr:`Assumed.given` may have, each with value, quickest, slowest and source."""
    return {
        f"{part}.{field}": (value[0], value[2], value[3], value[1])
        for kind in ("efficiency", "loop", "sampling-host", "network", "front-end", *_KINDS)
        for part, entry in _parts().items()
        if part.split(".")[0] == kind
        for field, value in entry.items()
        if isinstance(value, list) and value[2:]
    }


def names(kind: str = "device") -> tuple[str, ...]:
    """Names that :func:`device` takes; with another ``kind`` :func:`engine` or :func:`sampling`."""
    return tuple(name[len(kind) + 1 :] for name in _parts() if name.startswith(f"{kind}."))


def _pick(option: str, kind: str, key: str, assumed: Assumed) -> dict[str, Any]:
    """The values of one device, engine or way of sampling."""
    if key.lower() not in names(kind):
        raise ConfigError(f"{option}: unknown {kind} {key!r} (known: {', '.join(names(kind))})")
    return assumed.values(f"{kind}.{key.lower()}")


def _link(key: str, assumed: Assumed) -> Link:
    return msgspec.convert(assumed.values(f"link.{key}") | {"key": key}, Link)


def device(
    key: str, *, memory_gib: float | None = None, parts: int = 1, assumed: Assumed = STATED
) -> Device:
    """A device by name (ConfigError for an unknown one); ``memory_gib`` replaces its memory. ``cpu``
    is this machine's, cut into ``parts`` equal ones; its bandwidth and throughput are assumed."""
    entry = _pick("--gpu", "device", key, assumed)
    key = key.lower()
    if key == "cpu":
        cores = len(os.sched_getaffinity(0))
        entry["cores"] = max(1, cores // parts)
        entry["name"] += f", {entry['cores']} of {cores} cores"
        entry["memory_gib"] = free_bytes() / _GIB / parts
        for name in ("memory_gbs", "bf16_tflops"):  # stated of one core
            entry[name] *= cores / parts
    if memory_gib is not None:
        entry["memory_gib"] = memory_gib
    sides = {"host_link": entry["link"]} | entry
    links = {side: _link(sides[side], assumed) for side in ("link", "host_link")}
    return msgspec.convert(entry | links | {"key": key}, Device)


def network(gigabits: float, adapters: int = 1, assumed: Assumed = STATED) -> Network:
    """``adapters`` network adapters of ``gigabits`` Gb/s in each host."""
    values = assumed.values("network") | {"gigabits": gigabits, "adapters": adapters}
    return msgspec.convert(values, Network)


def at_end(cluster: Cluster, assumed: Assumed) -> Cluster:
    """Move ``cluster`` to the end of the ranges that ``assumed`` chooses."""
    accelerator = cluster.device
    part = f"device.{accelerator.key}"
    stated = dataclasses.replace(assumed, case="stated").values(part)
    changed: dict[str, Any] = {  # a device's may be a part of what the table states
        field: getattr(accelerator, field) * assumed.values(part)[field] / stated[field]
        for field, value in _parts()[part].items()
        if isinstance(value, list) and value[2:]
    }
    for side in ("link", "host_link"):
        changed[side] = _link(getattr(accelerator, side).key, assumed)
    return dataclasses.replace(
        cluster,
        device=dataclasses.replace(accelerator, **changed),
        network=network(cluster.network.gigabits, cluster.network.adapters, assumed),
    )


def efficiency(assumed: Assumed = STATED) -> Efficiency:
    """Shares of a device's peak that kernels reach."""
    return msgspec.convert(assumed.values("efficiency"), Efficiency)


def front_end(assumed: Assumed = STATED) -> FrontEnd:
    """CPU time of an API server of vLLM, and the share of its core that it may fill."""
    return msgspec.convert(assumed.values("front-end"), FrontEnd)


def engine(key: str, assumed: Assumed = STATED) -> Engine:
    """An engine by name; ConfigError for an unknown one."""
    values = _pick("--baseline", "engine", key, assumed) | assumed.values("loop")
    return msgspec.convert(values | {"key": key.lower()}, Engine)


def sampling(key: str, assumed: Assumed = STATED) -> Sampling:
    """The cost of one combination of sampling parameters; ConfigError for an unknown one."""
    values = _pick("--sampling", "sampling", key, assumed) | assumed.values("sampling-host")
    return msgspec.convert(values, Sampling)

"""SiPipe's settings: what a user writes under ``--additional-config '{"sipipe": {...}}'``.

>>> SiPipeConfig.from_additional_config({"sipipe": {"samplers": 2, "trace": "traces"}}).samplers
2
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import types
from collections.abc import Callable, Mapping
from typing import Any, Literal, NoReturn

from sipipe.errors import ConfigError

__all__ = ["CorePlacement", "SiPipeConfig"]

Auto = Literal["auto"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CorePlacement:
    """An explicit placement of SiPipe's processes on CPU cores (logical CPU numbers)."""

    stages: tuple[tuple[int, ...], ...] = ()
    """Cores of each stage, first stage first. Tensor-parallel ranks of a stage share its cores
    out evenly, in order. Empty: the stages' threads are left where the system puts them."""

    samplers: tuple[tuple[int, ...], ...] = ()
    """Cores of each sampler process. Empty: samplers are left unbound."""

    scheduler: tuple[int, ...] = ()
    """Cores of the process that runs vLLM's scheduler and SiPipe's executor. Empty: unbound."""

    def to_dict(self) -> dict[str, Any]:
        """The same as JSON-ready lists."""
        return {
            "stages": [list(cores) for cores in self.stages],
            "samplers": [list(cores) for cores in self.samplers],
            "scheduler": list(self.scheduler),
        }


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SiPipeConfig:
    """All settings of SiPipe, validated. The defaults suit a machine that nothing else uses."""

    samplers: int | Auto = "auto"
    """Number of CPU sampler processes, 1 or more. ``"auto"``: from the cores that the stages
    leave free (see :func:`sipipe.cores.plan_cores`)."""

    inflight: int | Auto = "auto"
    """Microbatches in flight, 1 or more. ``"auto"``: the number of stages + 1, so that sampling
    and scheduling are a pipeline stage of their own. The paper's value is the number of stages."""

    cpu_sampling: Literal["auto", "on", "off"] = "auto"
    """Whether tokens are drawn by CPU sampler processes. ``"off"``: by vLLM's own sampler on the
    last stage. ``"auto"``: by samplers wherever SiPipe's path is taken; ``"on"``: an error where it
    is not. (A choice by measurement at start-up is planned, and not built.)"""

    stage_runner: Literal["auto", "sipipe", "vllm"] = "auto"
    """Who turns a scheduling output into hidden states. ``"sipipe"``: SiPipe's stage runner, or
    an error where the model cannot take it. ``"vllm"``: the stock model runner. ``"auto"``:
    SiPipe's where it can, else the stock one, said at start-up."""

    scheduler: Literal["pipeline", "vllm"] = "pipeline"
    """Which scheduler forms microbatches. ``"pipeline"``: SiPipe's, which keeps them stable and
    even. ``"vllm"``: the stock one. A class given with ``--scheduler-cls`` wins over both."""

    microbatches: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Tunables of the pipeline scheduler, such as ``{"max_moves": 4}``: the fields of
    :class:`sipipe.scheduling.SlotSettings`. Empty: its defaults."""

    layers: tuple[int, ...] | Literal["auto", "even"] = "auto"
    """Decoder layers of each stage. ``"auto"``: vLLM's even cut, unless the output projection makes
    the last stage the slowest by more than 5 %; it then gets fewer layers. ``"even"``: vLLM's cut.
    Else a list such as ``[7, 1]``. ``VLLM_PP_LAYER_PARTITION`` wins over ``"auto"``."""

    overlap: bool = True
    """Token-safe execution: prepare the next microbatch's inputs while the device runs this one.
    False: prepare and run in turn, with one version of the inputs."""

    transport: Literal["auto", "shm", "socket", "cuda_ipc", "nccl"] = "auto"
    """How hidden states travel between stages. ``"auto"``, while all stages are on one host:
    ``shm`` on CPUs, ``cuda_ipc`` on GPUs. Nothing of it has been tested on a GPU, where ``shm`` and
    ``socket`` go through host memory."""

    logits_layout: Literal["rows", "columns"] = "rows"
    """Layout of a logits slot in shared memory. ``"rows"``: [B, V], a sequence is contiguous.
    ``"columns"``: [V, B], the paper's transposed layout, tensor-parallel shards concatenate."""

    cores: CorePlacement | Literal["auto", "off"] = "auto"
    """Placement on CPU cores. ``"auto"``: planned from the machine. ``"off"``: nothing is bound.
    Else ``{"stages": [[0], [1]], "samplers": [[2], [3]], "scheduler": [4]}``."""

    trace: str | None = None
    """Directory that receives trace files, made if missing. None: no tracing."""

    check_token_safety: bool = False
    """Debug check: stamp every input version with its writer and reader, and raise at the first
    overlap. Costs a few microseconds an iteration."""

    shm_dir: str | None = None
    """Directory for the channels' slots, best on a memory file system. None: anonymous memory,
    which needs no ``/dev/shm`` and leaves nothing behind, whatever happens."""

    stall_timeout: float = 300.0
    """Seconds that one iteration may take before the engine stops with an error that names the
    stage, the iteration and what it waits for. Above 0; the first iteration may compile."""

    start_timeout: float = 600.0
    """Seconds that a worker or sampler process may take to start and load its model. Above 0."""

    @classmethod
    def from_additional_config(cls, additional_config: object) -> SiPipeConfig:
        """Settings from vLLM's ``additional_config``; its ``"sipipe"`` entry may be missing.

        Raises:
            ConfigError: one line that names the key, the value and what is allowed.
        """
        if additional_config is None:
            return cls()
        if not isinstance(additional_config, Mapping):
            raise ConfigError(
                'additional_config must be a JSON object such as {"sipipe": {...}} to carry '
                f"SiPipe's settings, not {type(additional_config).__name__}"
            )
        settings = additional_config.get("sipipe")
        if settings is None:
            for key in additional_config.keys() - {"sipipe"}:
                if str(key).lower().replace("_", "").replace("-", "") == "sipipe":
                    raise ConfigError(
                        f'additional_config: unknown key "{key}"; did you mean "sipipe"?'
                    )
            return cls()
        return cls.from_dict(settings)

    @classmethod
    def from_dict(cls, settings: object) -> SiPipeConfig:
        """Settings from the mapping under ``"sipipe"``; the inverse of :meth:`to_dict`.

        Raises:
            ConfigError: one line that names the key, the value and what is allowed.
        """
        if isinstance(settings, cls):
            return settings
        if not isinstance(settings, Mapping):
            raise ConfigError(
                'additional_config["sipipe"] must be an object such as {"samplers": 2}, '
                f"not {_show(settings)}"
            )
        values: dict[str, Any] = {}
        for key, value in settings.items():
            parse = _PARSERS.get(key)
            if parse is None:
                raise ConfigError(_unknown(f'"{key}"', str(key), list(_PARSERS)))
            values[key] = parse(key, value)
        config = cls(**values)
        config._check_together()
        return config

    def to_dict(self) -> dict[str, Any]:
        """Every setting, JSON-ready; ``from_dict`` takes it back."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        if isinstance(self.cores, CorePlacement):
            values["cores"] = self.cores.to_dict()
        values["microbatches"] = dict(self.microbatches)
        values["layers"] = self.layers if isinstance(self.layers, str) else list(self.layers)
        return values

    def resolved_inflight(self, stages: int) -> int:
        """Microbatches in flight for a pipeline of ``stages`` stages."""
        return stages + 1 if self.inflight == "auto" else self.inflight

    def _check_together(self) -> None:
        if isinstance(self.cores, CorePlacement) and self.cores.samplers:
            placed = len(self.cores.samplers)
            if self.samplers not in ("auto", placed):
                raise ConfigError(
                    f'sipipe config: "samplers" is {self.samplers}, but "cores.samplers" places '
                    f"{placed}; give the same number or leave one of them out"
                )


Parser = Callable[[str, Any], Any]


def _bad(key: str, value: object, allowed: str) -> NoReturn:
    raise ConfigError(f'sipipe config: "{key}" must be {allowed}, not {_show(value)}')


def _unknown(shown: str, key: str, known: list[str]) -> str:
    near = difflib.get_close_matches(key.lower().replace("-", "_"), known, n=1, cutoff=0.6)
    hint = f'; did you mean "{near[0]}"?' if near else ""
    return f"sipipe config: unknown key {shown}{hint} (known: {', '.join(known)})"


def _show(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _one_of(*choices: str) -> Parser:
    allowed = "one of " + ", ".join(f'"{choice}"' for choice in choices)

    def parse(key: str, value: Any) -> str:
        if not isinstance(value, str) or value not in choices:
            near = difflib.get_close_matches(str(value).lower(), choices, n=1)
            _bad(key, value, allowed + (f' (did you mean "{near[0]}"?)' if near else ""))
        return value

    return parse


def _count_or_auto(key: str, value: Any) -> int | str:
    if value == "auto" or (isinstance(value, int) and not isinstance(value, bool) and value >= 1):
        checked: int | str = value
        return checked
    _bad(key, value, 'a whole number of 1 or more, or "auto"')


def _layers(key: str, value: Any) -> tuple[int, ...] | str:
    if value in ("auto", "even"):
        named: str = value
        return named
    if (
        not isinstance(value, list | tuple)
        or not value
        or not all(isinstance(n, int) and not isinstance(n, bool) and n >= 1 for n in value)
    ):
        _bad(key, value, '"auto", "even", or a list of layers per stage such as [7, 1]')
    return tuple(value)


def _flag(key: str, value: Any) -> bool:
    if not isinstance(value, bool):
        _bad(key, value, "true or false")
    return value


def _seconds(key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        _bad(key, value, "a number of seconds above 0")
    if not (value > 0 and math.isfinite(value)):
        _bad(key, value, "a finite number of seconds above 0")
    return float(value)


def _directory(key: str, value: Any) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str) or not value:
        _bad(key, value, "a directory's path, or null")
    return value


def _core_list(key: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, list | tuple) or not all(
        isinstance(core, int) and not isinstance(core, bool) and core >= 0 for core in value
    ):
        _bad(key, value, "a list of CPU numbers such as [0, 1]")
    if len(set(value)) != len(value):
        _bad(key, value, "a list of CPU numbers, each once")
    return tuple(value)


def _core_lists(key: str, value: Any) -> tuple[tuple[int, ...], ...]:
    if not isinstance(value, list | tuple):
        _bad(key, value, "a list of lists of CPU numbers such as [[0], [1]]")
    lists = tuple(_core_list(f"{key}[{index}]", cores) for index, cores in enumerate(value))
    if any(not cores for cores in lists):
        _bad(key, value, "a list of lists with one CPU number or more each")
    return lists


def _microbatches(_key: str, value: Any) -> Mapping[str, Any]:
    from sipipe.slot_settings import SlotSettings

    SlotSettings.from_mapping(value)  # names a wrong key or value itself
    return dict(value or {})


def _placement(key: str, value: Any) -> CorePlacement | str:
    if isinstance(value, CorePlacement) or value in ("auto", "off"):
        placement: CorePlacement | str = value
        return placement
    if not isinstance(value, Mapping):
        _bad(key, value, '"auto", "off", or {"stages": [[0], [1]], "samplers": [[2]]}')
    parsers: dict[str, Parser] = {
        "stages": _core_lists,
        "samplers": _core_lists,
        "scheduler": _core_list,
    }
    values: dict[str, Any] = {}
    for name, cores in value.items():
        if name not in parsers:
            raise ConfigError(_unknown(f'"{key}.{name}"', str(name), list(parsers)))
        values[name] = parsers[name](f"{key}.{name}", cores)
    return CorePlacement(**values)


_PARSERS: Mapping[str, Parser] = types.MappingProxyType(
    {
        "samplers": _count_or_auto,
        "inflight": _count_or_auto,
        "cpu_sampling": _one_of("auto", "on", "off"),
        "stage_runner": _one_of("auto", "sipipe", "vllm"),
        "scheduler": _one_of("pipeline", "vllm"),
        "microbatches": _microbatches,
        "layers": _layers,
        "overlap": _flag,
        "transport": _one_of("auto", "shm", "socket", "cuda_ipc", "nccl"),
        "logits_layout": _one_of("rows", "columns"),
        "cores": _placement,
        "trace": _directory,
        "check_token_safety": _flag,
        "shm_dir": _directory,
        "stall_timeout": _seconds,
        "start_timeout": _seconds,
    }
)

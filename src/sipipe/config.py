"""SiPipe's settings: what a user writes under ``--additional-config '{"sipipe": {...}}'``.

The annotations are the rules: msgspec checks them, and :func:`_refusal` says in one line what it
found. A ``description`` is the end of the sentence "... must be".

>>> SiPipeConfig.from_additional_config({"sipipe": {"samplers": 2, "trace": "traces"}}).samplers
2
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping, Sequence
from math import inf
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from sipipe.errors import ConfigError

Cpus = Annotated[
    tuple[Annotated[int, Meta(ge=0, description="a CPU number of 0 or more")], ...],
    Meta(description="a list of CPU numbers such as [0, 1]"),
]
CpuLists = Annotated[
    tuple[
        Annotated[
            Cpus, Meta(min_length=1, description="a list of one CPU number or more, such as [0, 1]")
        ],
        ...,
    ],
    Meta(description="a list of lists of CPU numbers such as [[0], [1]]"),
]
Whole = Annotated[int, Meta(ge=0, description="a whole number of 0 or more")]
Count = Annotated[int, Meta(ge=1, description="a whole number of 1 or more")]
UpTo128OrAuto = Annotated[
    Annotated[int, Meta(ge=1, le=128)] | Literal["auto"],
    Meta(description='a whole number from 1 to 128, or "auto"'),
]
"""For more there is no room in channels."""
Name = Annotated[str, Meta(pattern=r"^[^\x00\ud800-\udfff]+$")]
"""Text for paths and for JSON: Python has halves of surrogate pairs for bytes that are no UTF-8."""
Seconds = Annotated[
    float, Meta(gt=0, le=1e9, description="a finite number of seconds above 0, at most 1e9")
]


class CorePlacement(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An explicit placement of SiPipe's processes on CPU cores (logical CPU numbers)."""

    stages: CpuLists = ()
    """Cores of each stage, first stage first. Tensor-parallel ranks of a stage share its cores
    out evenly, in order. Empty: the stages' threads are left where the system puts them."""
    samplers: CpuLists = ()
    """Cores of each sampler process. Empty: samplers are left unbound."""
    scheduler: Cpus = ()
    """Cores of the process that runs vLLM's scheduler and SiPipe's executor. Empty: unbound."""

    def __post_init__(self) -> None:
        named = {f"stages[{index}]": cpus for index, cpus in enumerate(self.stages)}
        named |= {f"samplers[{index}]": cpus for index, cpus in enumerate(self.samplers)}
        for key, cpus in (named | {"scheduler": self.scheduler}).items():
            if len(set(cpus)) != len(cpus):
                raise ConfigError(
                    f'sipipe config: "cores.{key}" must name each CPU number once, not {list(cpus)}'
                )


class MicrobatchSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Tunables of :class:`.SlotPolicy`. The defaults suit most deployments."""

    max_moves: Whole = 4
    """Sequences that one visit may move to another slot to level decode counts, 0 or more.
    A moved sequence waits once for up to m - 1 microbatches. 0: slots level by arrivals only."""

    min_sequences: Whole = 0
    """Decoding sequences a microbatch should have before another slot is opened. 0: as many
    slots as make the pipeline period shortest by the stage times measured so far. 1: up to m
    sequences run in microbatches of one each."""

    prefill_spread: Whole = 0
    """Microbatches over which pending prompt tokens are spread. 0: with all m slots open 4 m + 4 up
    to 24, then 2 m + 8; with fewer, twice as many as are open. More are smoother for decoding
    sequences and later for first tokens."""

    tpot_target_ms: Annotated[
        float, Meta(ge=0, le=1e9, description="a finite number of milliseconds, 0 or more")
    ] = 0.0
    """Time per output token, in ms, that prompts and drafts should leave to decoding sequences: chunks
    beside them, and drafts, are cut to what the stages' measured times allow. 0: none for drafts; chunks
    beside decoding sequences then make their time per token about five times as long, at most."""

    kv_reserve: Annotated[float, Meta(ge=0, lt=1, description="a number from 0 to below 1")] = 0.02
    """Share of the KV cache, 0 to below 1, kept free for the growth of decoding sequences: no
    new request is admitted while less is free and something else runs."""


class HostSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Stages on several hosts: what ``--nnodes``, ``--master-addr`` and ``--master-port`` set."""

    count: Count = 1
    """Hosts, 1 or more."""

    address: Annotated[
        str, Meta(pattern=r"^[^\x00\ud800-\udfff]*$", description="an address or a host's name")
    ] = ""
    """The main host's address, the same on every host."""

    port: Annotated[int, Meta(ge=1, le=65000, description="a port from 1 to 65000")] = 29501
    """The first of the ports that hosts listen on; those that follow are docs/multi-host.md's."""

    stages: tuple[Count, ...] = ()
    """Pipeline stages of each host, the main host first. Empty: as even as can be."""

    encrypt_links: bool = True
    """True: hidden states between hosts are encrypted. Everything else always is."""


class SiPipeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All settings of SiPipe, validated. The defaults suit a machine that nothing else uses."""

    samplers: UpTo128OrAuto = "auto"
    """Number of CPU sampler processes, 1 to 128. ``"auto"``: from the cores that the stages
    leave free (see :func:`sipipe.cores.plan_cores`)."""

    inflight: UpTo128OrAuto = "auto"
    """Microbatches in flight, 1 to 128. ``"auto"``: the number of stages + 1, so that sampling
    and gathering are a pipeline stage of their own. The paper's value is the number of stages."""

    cpu_sampling: Literal["auto", "on", "off", "per_row"] = "auto"
    """Use of CPU sampler processes to draw tokens. ``"off"``: by vLLM's own sampler on the
    last stage. ``"on"``: by samplers, or an error where they cannot. ``"per_row"``, on GPUs:
    requests that ask for no more than a temperature on the last stage's device, all others by
    samplers. ``"auto"``: by samplers where they can; on GPUs what is measured at start to save 3 %
    of the time between two microbatches."""

    scheduler: Literal["pipeline", "vllm"] = "pipeline"
    """Which scheduler forms microbatches. ``"pipeline"``: SiPipe's, which keeps them stable and
    even. ``"vllm"``: the stock one. A class given with ``--scheduler-cls`` wins over both."""

    microbatches: Annotated[
        MicrobatchSettings, Meta(description='an object such as {"max_moves": 4}')
    ] = MicrobatchSettings()
    """Tunables of the pipeline scheduler, such as ``{"max_moves": 4}``: the fields of
    :class:`MicrobatchSettings`. Empty: its defaults."""

    layers: Annotated[
        Annotated[tuple[Count, ...], Meta(min_length=1)] | Literal["auto", "even"],
        Meta(description='"auto", "even", or a list of layers per stage such as [7, 1]'),
    ] = "auto"
    """Decoder layers of each stage. ``"auto"``: vLLM's even cut, unless the output projection makes
    the last stage the slowest by more than 5 %; it then gets fewer layers. ``"even"``: vLLM's cut.
    Else a list such as ``[7, 1]``. ``VLLM_PP_LAYER_PARTITION`` wins over ``"auto"``."""

    vocabulary: Literal["auto", "shared", "last"] = "auto"
    """Place of the output projection. ``"shared"``: every stage, by a part of its columns,
    as many as even the stages' times; the layers are then cut evenly. ``"last"``: the last stage.
    ``"auto"``: shared where it is expected, and on the loaded model measured, to shorten the slowest
    stage by 3 %. Where it cannot be (docs/vocabulary.md), a line in the log says so."""

    kv_loss: Annotated[float, Meta(ge=0, lt=1, description="a number from 0 to below 1")] = 0.1
    """Part of the KV cache's tokens, 0 to below 1, that ``"layers": "auto"`` may give up against
    the even cut: the stage with the most layers decides how many tokens fit. The log says what a cut
    costs, and what one that costs more would be worth."""

    transport: Annotated[
        Literal["auto", "shm", "cuda_ipc", "nixl"],
        Meta(description='"auto", "shm", "cuda_ipc" or, between hosts, "nixl"'),
    ] = "auto"
    """Transport of hidden states. Within a host, ``"auto"`` is ``shm`` on CPUs, ``cuda_ipc`` on GPUs
    that reach each other, untested between several; else ``shm``. Between hosts it is ``zeromq``, or
    ``nixl`` where both have it, with GPUs or RDMA, and ``hosts.encrypt_links`` is false. ``"nixl"``:
    between hosts that, and no other; within a host as ``"auto"``."""

    devices: Annotated[
        Annotated[tuple[Whole, ...], Meta(min_length=1)] | None,
        Meta(description="a list of GPU numbers, one for each worker, such as [0, 0]"),
    ] = None
    """GPU of each stage worker, in the order of ranks (stage after stage, tensor-parallel ranks
    inside). Stages may share one, such as ``[0, 0]``: for tests, since a GPU runs processes in turn.
    None: rank r on GPU r of those that are visible."""

    hosts: Annotated[HostSettings, Meta(description='an object such as {"stages": [3, 1]}')] = (
        HostSettings()
    )
    """Stages on several hosts, which ``sipipe serve`` takes as vLLM's flags."""

    cores: Annotated[
        CorePlacement | Literal["auto", "off"],
        Meta(description='"auto", "off", or {"stages": [[0], [1]], "samplers": [[2]]}'),
    ] = "auto"
    """Placement on CPU cores. ``"auto"``: planned from the machine. ``"off"``: nothing is bound.
    Else ``{"stages": [[0], [1]], "samplers": [[2], [3]], "scheduler": [4]}``."""

    trace: Annotated[
        Name | None, Meta(description="a directory's path, in UTF-8 without NUL, or null")
    ] = None
    """Directory that receives trace files, made if missing. None: no tracing."""

    trace_limit: Annotated[
        Count | None, Meta(description="a whole number of MiB of 1 or more, or null")
    ] = 1024
    """MiB that a trace may take on each host; the oldest records give way to new ones. The
    processes have equal parts of it. None: no limit."""

    stall_timeout: Seconds = 300.0
    """Seconds that one iteration may take before the engine stops with an error that names the
    stage, the iteration and what it waits for. Above 0; the first iteration may compile."""

    start_timeout: Seconds = 600.0
    """Seconds that a worker or sampler process may take to start and load its model. Above 0."""

    grammar_timeout: Seconds = 30.0
    """Seconds that a request's grammar (a JSON schema, regex, choice) may take to compile, and may
    wait for others to be compiled before; the request then fails, and says so. Above 0."""

    self_test: Literal["auto", "off", "always"] = "auto"
    """Comparison of the stages' answers with those of all layers in one stage, at the start.
    ``"auto"``: of model families that are not in docs/compatibility.md, once. ``"always"``: of any
    model, at each start. ``"off"``: never."""

    @classmethod
    def from_additional_config(cls, additional_config: object) -> SiPipeConfig:
        """Settings from vLLM's ``additional_config``; its ``"sipipe"`` entry may be missing. Raises
        ConfigError: one line that names the key, the value and what is allowed."""
        if additional_config is None:
            return cls()
        if not isinstance(additional_config, Mapping):
            raise ConfigError(
                "additional_config (--additional-config) must be a JSON object such as "
                '{"sipipe": {...}} to carry '
                f"SiPipe's settings, not {type(additional_config).__name__}"
            )
        if (settings := additional_config.get("sipipe")) is None:
            for key in additional_config.keys() - {"sipipe"}:
                word = str(key).replace("-", "_")
                if (ours := word in cls.__struct_fields__) or _hint(word, ["sipipe"]):
                    meant = f'{{"sipipe": {{"{word}": ...}}}}' if ours else '"sipipe"'
                    wrong = f"additional_config: unknown key {_quoted(str(key))}"
                    raise ConfigError(f"{wrong}; did you mean {meant}?")
            return cls()
        return cls.from_dict(settings)

    @classmethod
    def from_dict(cls, settings: object) -> SiPipeConfig:
        """Settings from the mapping under ``"sipipe"``; the inverse of :meth:`to_dict`. Raises
        ConfigError: one line that names the key, the value and what is allowed."""
        if not isinstance(settings, Mapping):
            raise ConfigError(
                'additional_config["sipipe"] must be an object such as {"samplers": 2}, '
                f"not {_show(settings)}"
            )
        try:
            return msgspec.convert(settings, cls)
        except msgspec.ValidationError as error:
            if isinstance(error.__cause__, ConfigError):  # two settings that contradict each other
                raise error.__cause__ from None
            raise _refusal(str(error), settings) from None
        except UnicodeEncodeError as error:  # where only certain words are allowed
            raise ConfigError(
                f"sipipe config: {_show(error.object)} is no text: half of a surrogate pair"
            ) from None

    def to_dict(self) -> dict[str, Any]:
        """Every setting, JSON-ready; ``from_dict`` takes it back."""
        values: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(self))
        return values

    def resolved_inflight(self, stages: int) -> int:
        """Microbatches in flight for a pipeline of ``stages`` stages."""
        return stages + 1 if self.inflight == "auto" else self.inflight

    @property
    def most_cores(self) -> float | None:
        """A container's limit is of time: who places by hand may name any CPU. None: as it limits."""
        return inf if isinstance(self.cores, CorePlacement) else None

    def __post_init__(self) -> None:
        if isinstance(self.cores, CorePlacement) and self.cores.samplers:
            placed = len(self.cores.samplers)
            if self.samplers not in ("auto", placed):
                raise ConfigError(
                    f'sipipe config: "samplers" is {self.samplers}, but "cores.samplers" places '
                    f"{placed}; give the same number or leave one of them out"
                )


OPTIONS = ("samplers", "inflight", "layers", "vocabulary", "trace", "trace_limit", "cores")
"""Settings that commands of SiPipe take as options, too; the others stand in ``--additional-config``."""

ONLY_SIPIPE_HAS = frozenset(
    {
        "samplers",
        "inflight",
        "cpu_sampling",
        "scheduler",
        "microbatches",
        "layers",
        "vocabulary",
        "devices",
        "hosts",
        "cores",
        "trace",
        "stall_timeout",
        "start_timeout",
        "grammar_timeout",
    }
)
"""Settings that vLLM's own executor would not heed: who gives one of them wants SiPipe to run the
model, also where it steps aside otherwise (:mod:`sipipe.engine.start.aside`). The others say nothing
of one stage: it has no links, nothing is cut, and a trace's limit is none of a trace."""

STEPS_ASIDE = (
    "one stage on a GPU: vLLM's own executor runs it, which is quicker (docs/one-stage.md); "
    '"samplers": "auto" in the sipipe config (sipipe serve --samplers auto) has SiPipe run it'
)
"""The line that says so. The setting changes nothing but who runs the model."""


def asked_of_sipipe(additional_config: object) -> list[str]:
    """Names of the settings in vLLM's ``additional_config`` that only SiPipe heeds, in their order
    there; one that is null is not given. The settings have been parsed, and are right."""
    settings = (additional_config or {}).get("sipipe") or {}  # type: ignore[attr-defined]
    return [name for name in settings if name in ONLY_SIPIPE_HAS and settings[name] is not None]


def _refusal(problem: str, settings: Mapping[str, Any]) -> ConfigError:
    """The line for what msgspec found; ``found`` ends with the path of the value."""
    problem, _, path = problem.partition(" - at `$")
    schema = msgspec.json.schema(SiPipeConfig)
    kinds = schema["$defs"]
    schemas = _meant(schema, schema["$defs"])
    value: Any = settings
    allowed = ""
    for step in re.findall(r"[^.\[\]`]+", path):
        of, name = ("items", int(step)) if step.isdecimal() else ("properties", step)
        inner = next(kind[of] for kind in schemas if of in kind)
        inner = inner[name] if of == "properties" else inner
        value = value[name]
        allowed = inner.get("description", allowed)
        schemas = _meant(inner, kinds)
    key = path.strip(".`")
    if unknown := re.fullmatch("(?s)Object contains unknown field `(.*)`", problem):
        name = unknown[1]
        known = next(list(kind["properties"]) for kind in schemas if "properties" in kind)
        hint = _hint(name.replace("-", "_"), known)
        return ConfigError(
            f"sipipe config: unknown key {_quoted(f'{key}.{name}' if key else name)}"
            f"{'; did you mean ' + hint if hint else ''} (known: {', '.join(known)})"
        )
    if not key:  # a key that is no text, which only Python can write
        return ConfigError(f"sipipe config: {problem}")
    choices = [choice for kind in schemas for choice in kind.get("enum", ())]
    allowed = allowed or "one of " + ", ".join(f'"{choice}"' for choice in choices)
    hint = _hint(value, choices) if isinstance(value, str) else ""
    return ConfigError(
        f'sipipe config: "{key}" must be {allowed}{f" (did you mean {hint}?)" if hint else ""}, '
        f"not {_show(value)}"
    )


def _meant(schema: Mapping[str, Any], kinds: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """``schema``, and what it refers to or the members of a union."""
    named = [kinds[schema["$ref"].rpartition("/")[2]]] if "$ref" in schema else []
    return [schema, *(m for one in named + schema.get("anyOf", []) for m in _meant(one, kinds))]


def _hint(given: str, known: Sequence[Any]) -> str:
    near = difflib.get_close_matches(given.lower(), known, n=1, cutoff=0.6)
    return f'"{near[0]}"' if near else ""


def _quoted(key: str) -> str:
    """A key in quotes, in one line whatever characters it has."""
    return json.dumps(key, ensure_ascii=False)


def _show(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."

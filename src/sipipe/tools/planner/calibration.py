"""Costs fitted to what a real run took.

The observations come from a trace (the command line reads it; this package does not know the file
format). Each phase is fitted on its own, with terms that follow from what the phase does, so that
a fit to one (p, t) says something about another. What was never observed comes from the data
sheets and is said; batch sizes outside the observed range are refused unless asked for.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from sipipe.engine.layers.facts import ModelFacts
from sipipe.errors import ConfigError
from sipipe.tools.planner.communication import all_reduce_seconds
from sipipe.tools.planner.costs import DatasheetCosts, ForwardTime
from sipipe.tools.planner.fit import Fit, fit_robustly, group_means
from sipipe.tools.planner.hardware import Engine
from sipipe.tools.planner.placement import Stage, place
from sipipe.tools.planner.workload import Microbatch

__all__ = ["Calibration", "Observation", "Run", "calibrate"]

_MARGIN = 1.1
"""How far outside the observed range is still inside."""
_FEWEST = 8
"""Observations below which a phase is not fitted."""


@dataclasses.dataclass(frozen=True, slots=True)
class Observation:
    """One recorded phase of one iteration."""

    stage: int
    """Stage index; -1 for the executor and for samplers."""
    phase: str
    """Lower-case name of the phase: forward, logits, prepare, send, handover, schedule, dispatch,
    update, ``sample`` (a sampler's share), ``device_sample`` (a stage that samples itself), or
    ``turnaround`` (a stage's time between two microbatches when nothing is missing)."""
    batch: int
    """Sequences; for ``sample`` those of this sampler."""
    tokens: int
    """Tokens computed."""
    seconds: float
    context: float | None = None
    """Mean cached tokens of the sequences, where known."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The observations of one configuration."""

    p: int
    t: int
    observations: Sequence[Observation]
    engine: str = "sipipe"
    """``sipipe`` or ``vllm``: whose preparation, scheduling and hand-over these are."""
    cores: int = 1
    """CPU devices: cores of one rank. GPUs: 1."""
    layers: tuple[int, ...] | None = None
    """Layers of each stage; None: cut evenly."""


Terms = dict[str, float]


class _Shapes:
    """The value of every term of every phase."""

    def __init__(self, sheet: DatasheetCosts) -> None:
        self.facts: ModelFacts = sheet.facts
        self.sheet = sheet

    def forward(
        self, stage: Stage, batch: float, tokens: float, context: float | None, cores: int
    ) -> Terms:
        facts = self.facts
        active = sum(_active(facts, layer) for layer in stage.layer_range) / stage.t
        size = tokens * facts.hidden * facts.activation_bytes
        reduce = all_reduce_seconds(self.sheet.cluster, stage, size)
        terms = {
            "layers": float(stage.layers),
            # Where caches are large enough to keep a stage's weights, the vocabulary projection
            # evicts them: the last stage reads its layers from memory every time.
            "layers of the last": float(stage.layers if stage.is_last else 0),
            "products": 2.0 * active * tokens / cores,
            "all-reduce": 2 * stage.layers * reduce,
        }
        if context is not None:
            each = stage.layers * facts.attention.kv_elements / facts.attention.kv_shards(stage.t)
            terms["cache reads"] = batch * context * each
        return terms

    def logits(self, stage: Stage, batch: float, cores: int) -> Terms:
        weights = self.facts.embedding_parameters / stage.t
        return {"weights": weights, "products": 2.0 * weights * batch / cores}

    def columns(self, batch: float, t: int = 1) -> Terms:
        return {"calls": 1.0, "logits": batch * self.facts.vocabulary / t}

    def sequences(self, batch: float) -> Terms:
        return {"calls": 1.0, "sequences": float(batch)}

    def hidden(self, tokens: float) -> Terms:
        return {"calls": 1.0, "elements": tokens * self.facts.hidden}

    def of(self, seen: Observation, stage: Stage, cores: int) -> Terms | None:
        """The terms of an observation; None for a phase that is no cost (a wait)."""
        makers: Mapping[str, Callable[[], Terms]] = {
            "forward": lambda: self.forward(stage, seen.batch, seen.tokens, seen.context, cores),
            "logits": lambda: self.logits(stage, seen.batch, cores),
            "handover": lambda: self.columns(seen.batch, stage.t),
            "send": lambda: self.hidden(seen.tokens),
            "turnaround": lambda: self.sequences(seen.batch),
            "prepare": lambda: self.sequences(seen.batch),
            "schedule": lambda: self.sequences(seen.batch),
            "dispatch": lambda: self.sequences(seen.batch),
            "update": lambda: self.sequences(seen.batch),
            "sample": lambda: self.columns(seen.batch),
            "device_sample": lambda: self.columns(seen.batch),
        }
        maker = makers.get(seen.phase)
        return None if maker is None else maker()


def _active(facts: ModelFacts, layer: int) -> float:
    """Weights of a layer that one token meets."""
    parameters = facts.layer_parameters(layer)
    if layer in facts.sparse_layers and facts.moe is not None:
        parameters -= facts.moe.parameters - facts.moe.active_parameters
    return float(parameters)


_SHARED = ("forward", "logits")
"""Phases that do not depend on the engine."""


def calibrate(sheet: DatasheetCosts, runs: Sequence[Run]) -> Calibration:
    """Fit every observed phase.

    Args:
        sheet: the data-sheet costs that stand in for what no run observed.
        runs: one or more runs of ``sheet.facts``.

    Raises:
        ConfigError: no forward was observed, or a run's stages do not suit the model.
    """
    shapes = _Shapes(sheet)
    rows: dict[str, list[tuple[Terms, Observation]]] = {}
    for run in runs:
        if run.p > sheet.facts.layers:
            raise ConfigError(
                f"--calibrate: the trace has {run.p} stages, {sheet.facts.name} only "
                f"{sheet.facts.layers} layers; is it a trace of this model?"
            )
        if run.layers is not None and sum(run.layers) != sheet.facts.layers:
            raise ConfigError(
                f"--calibrate: the trace's stages have {sum(run.layers)} layers, "
                f"{sheet.facts.name} has {sheet.facts.layers}; is it a trace of this model?"
            )
        placement = place(
            sheet.facts.layers, run.p, run.t, sheet.cluster.devices_per_host, run.layers
        )
        for seen in run.observations:
            stage = placement.stages[max(0, min(seen.stage, run.p - 1))]
            terms = shapes.of(seen, stage, run.cores)
            if terms is not None and seen.seconds > 0 and seen.batch > 0:
                rows.setdefault(_key(run.engine, seen.phase), []).append((terms, seen))
    fits = {key: _fit(key, found) for key, found in rows.items() if len(found) >= _FEWEST}
    if "forward" not in fits:
        raise ConfigError(
            "--calibrate: the trace has fewer than "
            f"{_FEWEST} forward records; run the model longer with --trace"
        )
    return Calibration(
        sheet=sheet,
        fits=fits,
        degrees=frozenset((run.p, run.t) for run in runs),
        cores=max(run.cores for run in runs),
        context_known=any(seen.context is not None for run in runs for seen in run.observations),
    )


def _key(engine: str, phase: str) -> str:
    return phase if phase in _SHARED else f"{engine}: {phase}"


def _fit(key: str, rows: list[tuple[Terms, Observation]]) -> Fit:
    """Fit to all; the errors are those on one half of a fit to the other."""
    names = tuple(rows[0][0])
    values = [tuple(terms.get(name, 0.0) for name in names) for terms, _ in rows]
    seconds = np.asarray([seen.seconds for _, seen in rows])
    errors = _held_out_errors(values, seconds)
    keys, means, counts, dropped = group_means(values, seconds)
    coefficients = fit_robustly(np.asarray(keys), means, counts)
    batches = [seen.batch for _, seen in rows]
    tokens = [seen.tokens for _, seen in rows]
    return Fit(
        phase=key,
        terms=names,
        coefficients=tuple(float(value) for value in coefficients),
        count=len(rows) - dropped,
        dropped=dropped,
        mean_seconds=float(np.average(means, weights=counts)),
        median_error=float(np.quantile(errors, 0.5)),
        high_error=float(np.quantile(errors, 0.9)),
        batch_range=(float(min(batches)), float(max(batches))),
        tokens_range=(float(min(tokens)), float(max(tokens))),
    )


def _held_out_errors(values: list[tuple[float, ...]], seconds: Any) -> Any:
    """Relative errors of group means of the odd records, predicted from the even ones."""
    keys, means, counts, _ = group_means(values[::2], seconds[::2])
    coefficients = fit_robustly(np.asarray(keys), means, counts)
    keys, means, counts, _ = group_means(values[1::2], seconds[1::2])
    errors = np.abs(np.asarray(keys) @ coefficients / means - 1.0)
    return np.repeat(errors, counts.astype(int))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Costs from fits, see :class:`sipipe.tools.planner.costs.Costs`; the data sheets fill gaps."""

    sheet: DatasheetCosts
    fits: Mapping[str, Fit]
    """By phase; phases that depend on the engine as ``"sipipe: prepare"``."""
    degrees: frozenset[tuple[int, int]]
    """The (p, t) that were run."""
    cores: int
    context_known: bool

    @property
    def _shapes(self) -> _Shapes:
        return _Shapes(self.sheet)

    def _of(self, engine: str, phase: str, terms: Terms) -> float | None:
        fit = self.fits.get(_key(engine, phase))
        return None if fit is None else fit.seconds(**{n: terms.get(n, 0.0) for n in fit.terms})

    def forward(self, stage: Stage, work: Microbatch, *, gather: bool) -> ForwardTime:
        """The fitted forward; on the last stage also the projection and the logits' hand-over."""
        context = work.context if self.context_known else None
        terms = self._shapes.forward(stage, work.batch, work.tokens, context, self.cores)
        fit = self.fits["forward"]
        parts = {name: fit.part(name, value) for name, value in terms.items()}
        return ForwardTime(
            compute=parts["products"],
            weights=parts["layers"] + parts["layers of the last"],
            attention=parts.get("cache reads", 0.0),
            overhead=0.0,
            all_reduce=parts["all-reduce"],
            logits=self._logits(stage, work, gather=gather) if stage.is_last else 0.0,
        )

    def _logits(self, stage: Stage, work: Microbatch, *, gather: bool) -> float:
        terms = self._shapes.logits(stage, work.batch, self.cores)
        seconds = self._of("", "logits", terms)
        if seconds is None:
            seconds = self.sheet.forward(stage, work, gather=gather).logits
        if not gather:  # SiPipe: logits are written where the samplers read them
            columns = self._shapes.columns(work.batch, stage.t)
            seconds += self._of("sipipe", "handover", columns) or 0.0
        return seconds

    def preparation(self, engine: Engine, stage: Stage, work: Microbatch) -> float:
        """See :class:`~sipipe.tools.planner.costs.Costs`."""
        found = self._of(engine.key, "prepare", self._shapes.sequences(work.batch))
        return self.sheet.preparation(engine, stage, work) if found is None else found

    def transfer(self, engine: Engine, stage: Stage, work: Microbatch) -> float:
        """Sending, where there is a next stage, and what passes between two microbatches."""
        sending = self._of(engine.key, "send", self._shapes.hidden(work.tokens))
        between = self._of(engine.key, "turnaround", self._shapes.sequences(work.batch))
        if stage.stages == 1:
            return between or 0.0
        if sending is None and between is None:
            return self.sheet.transfer(engine, stage, work)
        return (0.0 if stage.is_last else sending or 0.0) + (between or 0.0)

    def hop(self, stage: Stage, work: Microbatch) -> float:
        """See :class:`~sipipe.tools.planner.costs.Costs`."""
        return self.sheet.hop(stage, work)

    def device_sampling(self, work: Microbatch) -> float:
        """See :class:`~sipipe.tools.planner.costs.Costs`."""
        found = self._of("vllm", "device_sample", self._shapes.columns(work.batch))
        return self.sheet.device_sampling(work) if found is None else found

    def logits_copy(self, stage: Stage, work: Microbatch) -> float:
        """Part of the fitted hand-over, where there is one."""
        if "sipipe: handover" in self.fits:
            return 0.0
        return self.sheet.logits_copy(stage, work)

    def host_sampling(self, work: Microbatch, samplers: int) -> float:
        """The sampler with the most columns."""
        columns = self._shapes.columns(math.ceil(work.batch / samplers))
        found = self._of("sipipe", "sample", columns)
        return self.sheet.host_sampling(work, samplers) if found is None else found

    def schedule(self, engine: Engine, work: Microbatch) -> float:
        """See :class:`~sipipe.tools.planner.costs.Costs`."""
        terms = self._shapes.sequences(work.batch)
        found = [self._of(engine.key, phase, terms) for phase in ("schedule", "dispatch", "update")]
        if found[0] is None:
            return self.sheet.schedule(engine, work)
        return sum(seconds for seconds in found if seconds is not None)

    def shared_cores(self) -> tuple[int, int]:
        """See :class:`~sipipe.tools.planner.costs.Costs`."""
        total, _ = self.sheet.shared_cores()
        return total, self.cores

    def outside(self, p: int, t: int, work: Microbatch) -> tuple[str, ...]:
        """Why the prediction would leave what was observed; empty: it does not."""
        del p
        found = []
        forward = self.fits["forward"]
        for name, value, (low, high) in (
            ("sequences", work.batch, forward.batch_range),
            ("tokens", work.tokens, forward.tokens_range),
        ):
            if not low / _MARGIN <= value <= high * _MARGIN:
                found.append(f"{value:g} {name} a microbatch, observed were {low:g} to {high:g}")
        seen = sorted({degree for _, degree in self.degrees})
        if t not in seen:
            found.append(f"t = {t}, observed was {', '.join(map(str, seen))}")
        return tuple(found)

    def notes(self, p: int, t: int) -> tuple[str, ...]:
        """What to know about a prediction that is inside."""
        found = []
        if (p, t) not in self.degrees:
            seen = ", ".join(f"P{a}T{b}" for a, b in sorted(self.degrees))
            found.append(f"P{p}T{t} itself was not run ({seen} was): carried over by the model")
        missing = [
            phase
            for phase in ("logits", "sipipe: prepare", "sipipe: sample", "sipipe: schedule")
            if phase not in self.fits
        ]
        if missing:
            found.append(f"from data sheets, not in the trace: {', '.join(missing)}")
        if not self.context_known:
            found.append("the trace has no context lengths: valid for lengths like the traced ones")
        return tuple(found)

    def to_dict(self) -> dict[str, Any]:
        """Fits and errors, JSON-ready."""
        return {
            "degrees": sorted([p, t] for p, t in self.degrees),
            "fits": {
                key: {
                    **dataclasses.asdict(fit),
                    "coefficients": dict(zip(fit.terms, fit.coefficients, strict=True)),
                }
                for key, fit in self.fits.items()
            },
        }

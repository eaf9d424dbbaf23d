"""Costs fitted to what a traced run took.

Each phase is fitted on its own, as a sum of terms with a physical meaning (per call, per sequence,
per product, ...), so that a fit to one (p, t) says something about another. No term can save time:
coefficients are zero or more. What was never observed comes from the data sheets.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from sipipe.engine.layers.facts import ModelFacts
from sipipe.errors import ConfigError, ResourceError
from sipipe.tools.planner.costs import DatasheetCosts, all_reduce_seconds
from sipipe.tools.planner.hardware import Cluster, Engine
from sipipe.tools.planner.placement import Stage, place
from sipipe.tools.planner.workload import Microbatch

_FEWEST = 8
"""Observations below which a phase is not fitted."""
Terms = dict[str, float]


class Observation(NamedTuple):
    """One recorded phase of one iteration."""

    stage: int
    """Stage index; -1 for the executor and for samplers."""
    phase: str
    """Lower-case name of the phase; of sampling ``sample`` (a sampler's share) or
    ``device_sample`` (a stage that samples itself). ``turnaround``: a stage's time between two
    microbatches when nothing is missing."""
    batch: int
    """Sequences; for ``sample`` those of this sampler."""
    tokens: int
    seconds: float


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
    projections: tuple[float, ...] = ()
    """Each stage's part of the output projection; empty: the last stage has it."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """One phase's fitted terms and how well they describe what was observed."""

    phase: str
    coefficients: Terms
    """Seconds per unit of each term."""
    count: int
    """Records used; others took three times the median of their like: a compilation, not a cost."""
    mean_seconds: float
    median_error: float
    """Median relative error over records, and its 90th percentile."""
    high_error: float

    def parts(self, terms: Terms) -> Terms:
        """The seconds that each of ``terms`` takes."""
        return {name: self.coefficients[name] * value for name, value in terms.items()}


def usual(seconds: Sequence[float]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """``seconds`` without those over three times their median: something else's doing."""
    found = np.asarray(seconds, dtype=np.float64)
    return found[found <= 3.0 * np.median(found)]


def _fit(phase: str, rows: list[tuple[Terms, Observation]]) -> Fit:
    """Coefficients of zero or more with the least squares of relative errors.

    Raises:
        ResourceError: scipy is not installed.
    """
    try:
        from scipy.optimize import nnls
    except ImportError:
        raise ResourceError(
            "the calibration fits with scipy, which is not installed: pip install scipy"
        ) from None
    groups: dict[tuple[float, ...], list[float]] = {}
    for terms, seen in rows:
        groups.setdefault(tuple(terms.values()), []).append(seen.seconds)
    kept = [usual(values) for values in groups.values()]
    means, counts = np.array([k.mean() for k in kept]), np.array([len(k) for k in kept])
    matrix, weights = np.array(list(groups)), np.sqrt(counts)
    scaled = matrix * (weights / means)[:, None]
    spread = scaled.max(axis=0)
    spread[spread == 0.0] = 1.0  # a term that no record has gets no coefficient
    coefficients = nnls(scaled / spread, weights)[0] / spread
    errors = np.repeat(np.abs(matrix @ coefficients / means - 1.0), counts)
    return Fit(
        phase=phase,
        coefficients=dict(zip(rows[0][0], coefficients.tolist(), strict=True)),
        count=int(counts.sum()),
        mean_seconds=float(np.average(means, weights=counts)),
        median_error=float(np.quantile(errors, 0.5)),
        high_error=float(np.quantile(errors, 0.9)),
    )


def _forward_terms(
    facts: ModelFacts, cluster: Cluster, stage: Stage, tokens: float, cores: int
) -> Terms:
    def active(layer: int) -> float:
        """Weights of a layer that one token meets."""
        parameters = facts.layer_parameters(layer)
        if layer in facts.sparse_layers and facts.moe is not None:
            parameters -= facts.moe.parameters - facts.moe.active_parameters
        return float(parameters)

    weights = sum(active(layer) for layer in stage.layer_range) / stage.t
    size = tokens * facts.hidden * facts.activation_bytes
    return {
        "layers": float(stage.layers),
        # Where caches are large enough to keep a stage's weights, the vocabulary projection
        # evicts them: a stage that has it reads its layers from memory every time.
        "layers beside a head": float(stage.layers if stage.projection else 0),
        "products": 2.0 * weights * tokens / cores,
        "all-reduce": 2 * stage.layers * all_reduce_seconds(cluster, stage, size),
    }


def _terms(
    facts: ModelFacts, phase: str, batch: float, tokens: float, part: float, cores: int
) -> Terms | None:
    """The terms of every phase but the forward; None for one that is no cost (a wait).

    ``part``: of the vocabulary's columns, that a rank has.
    """
    match phase:
        case "logits":
            weights = facts.embedding_parameters * part
            return {"weights": weights, "products": 2.0 * weights * batch / cores}
        case "handover":
            return {"calls": 1.0, "logits": batch * facts.vocabulary * part}
        case "sample" | "device_sample":
            return {"calls": 1.0, "logits": batch * facts.vocabulary}
        case "send":
            return {"calls": 1.0, "elements": tokens * facts.hidden}
        case "turnaround" | "prepare" | "schedule" | "dispatch" | "update":
            return {"calls": 1.0, "sequences": float(batch)}
    return None


def _key(engine: str, phase: str) -> str:
    return phase if phase in ("forward", "logits") else f"{engine}: {phase}"


def calibrate(sheet: DatasheetCosts, runs: Sequence[Run]) -> Calibration:
    """Fit every phase that one or more ``runs`` of ``sheet.facts`` observed; for the others
    ``sheet`` stands in.

    Raises:
        ConfigError: no forward was observed, or a run's stages do not suit the model.
        ResourceError: scipy is not installed.
    """
    facts, per_host = sheet.facts, sheet.cluster.devices_per_host
    rows: dict[str, list[tuple[Terms, Observation]]] = {}
    for run in runs:
        _check_model(facts, run)
        stages = place(facts.layers, run.p, run.t, per_host, run.layers, run.projections).stages
        for seen in run.observations:
            found: Terms | None
            stage = stages[min(seen.stage, run.p - 1)]
            if seen.phase == "forward":
                found = _forward_terms(facts, sheet.cluster, stage, seen.tokens, run.cores)
            else:
                part = stage.projection / run.t
                found = _terms(facts, seen.phase, seen.batch, seen.tokens, part, run.cores)
            if found is not None and seen.seconds > 0 and seen.batch > 0:
                rows.setdefault(_key(run.engine, seen.phase), []).append((found, seen))
    fits = {key: _fit(key, found) for key, found in rows.items() if len(found) >= _FEWEST}
    if "forward" not in fits:
        raise ConfigError(
            "calibration: the trace has fewer than "
            f"{_FEWEST} forward records; run the model longer with --trace"
        )
    return Calibration(
        **vars(sheet),
        fits=fits,
        cores=max(run.cores for run in runs),
        traced=sheet.cluster,
    )


def _check_model(facts: ModelFacts, run: Run) -> None:
    if run.p > facts.layers:
        wrong = f"the trace has {run.p} stages, {facts.name} only {facts.layers} layers"
    elif run.layers is not None and sum(run.layers) != facts.layers:
        wrong = f"the trace's stages have {sum(run.layers)} layers, {facts.name} has {facts.layers}"
    else:
        return
    raise ConfigError(f"calibration: {wrong}; is it a trace of this model?")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Calibration(DatasheetCosts):
    """Costs from fits; what has no fit comes from the data sheets of the parent."""

    fits: Mapping[str, Fit]
    """By phase; phases that depend on the engine as ``"sipipe: prepare"``."""
    cores: int
    traced: Cluster
    """Whose all-reduce times were fitted: other ends of what is assumed of links do not move them."""

    def _fitted(
        self, engine: str, phase: str, *, batch: float, tokens: float = 0.0, part: float = 1.0
    ) -> float | None:
        """Seconds of a phase that has a fit."""
        fit = self.fits.get(_key(engine, phase))
        terms = _terms(self.facts, phase, batch, tokens, part, self.cores)
        return None if fit is None or terms is None else sum(fit.parts(terms).values())

    def forward(self, stage: Stage, work: Microbatch, *, gather: bool) -> dict[str, float]:
        """The fitted forward; on the last stage also the projection and the logits' hand-over."""
        terms = _forward_terms(self.facts, self.traced, stage, work.tokens, self.cores)
        parts = self.fits["forward"].parts(terms)
        return {
            "compute": parts["products"],
            "weight reads": parts["layers"] + parts["layers beside a head"],
            "all-reduce": parts["all-reduce"],
            "logits": self._projection(stage, work, gather=gather) if stage.projection else 0.0,
        }

    def _projection(self, stage: Stage, work: Microbatch, *, gather: bool) -> float:
        part = stage.projection / stage.t
        seconds = self._fitted("", "logits", batch=work.batch, part=part)
        if seconds is None:
            seconds = super().forward(stage, work, gather=gather)["logits"]
        if not gather:  # SiPipe: logits are written where the samplers read them
            seconds += self._fitted("sipipe", "handover", batch=work.batch, part=part) or 0.0
        return seconds

    def preparation(self, engine: Engine, stage: Stage, work: Microbatch) -> float:
        found = self._fitted(engine.key, "prepare", batch=work.batch)
        return super().preparation(engine, stage, work) if found is None else found

    def transfer(self, engine: Engine, stage: Stage, work: Microbatch) -> float:
        """Sending, where there is a next stage, and what passes between two microbatches."""
        sending = self._fitted(engine.key, "send", batch=work.batch, tokens=work.tokens)
        between = self._fitted(engine.key, "turnaround", batch=work.batch)
        if stage.stages == 1:
            return between or 0.0
        if sending is None and between is None:
            return super().transfer(engine, stage, work)
        return (0.0 if stage.is_last else sending or 0.0) + (between or 0.0)

    def device_sampling(self, work: Microbatch) -> float:
        found = self._fitted("vllm", "device_sample", batch=work.batch)
        return super().device_sampling(work) if found is None else found

    def logits_copy(self, stage: Stage, work: Microbatch) -> float:
        """Part of the fitted hand-over, where there is one."""
        return 0.0 if "sipipe: handover" in self.fits else super().logits_copy(stage, work)

    def host_sampling(self, work: Microbatch, samplers: int) -> float:
        """The sampler with the most sequences."""
        found = self._fitted("sipipe", "sample", batch=math.ceil(work.batch / samplers))
        return super().host_sampling(work, samplers) if found is None else found

    def schedule(self, engine: Engine, work: Microbatch) -> float:
        if f"{engine.key}: schedule" not in self.fits:
            return super().schedule(engine, work)
        phases = ("schedule", "dispatch", "update")
        return sum(self._fitted(engine.key, phase, batch=work.batch) or 0.0 for phase in phases)

    def shared_cores(self) -> tuple[int, int]:
        return super().shared_cores()[0], self.cores

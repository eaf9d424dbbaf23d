"""Throughput and delay of a pipeline in steady state, and where its devices idle.

The stations of the loop (:mod:`sipipe.messages.period`) are the stages, their preparation, the
logits' copy, the samplers and the scheduler. A sequence gets one token per round of all m
microbatches: ``delay = m period``.
"""

import dataclasses

from sipipe.messages.period import passing, period
from sipipe.tools.planner.costs import DatasheetCosts
from sipipe.tools.planner.hardware import Engine
from sipipe.tools.planner.placement import Placement
from sipipe.tools.planner.workload import Microbatch

# Expected maximum of n standard normal variables, n = 1..16 (then nearly flat): how much the
# slowest of n stages is slower than their mean, in standard deviations.
_EXPECTED_MAXIMUM = (
    *(0.0, 0.0, 0.564, 0.846, 1.029, 1.163, 1.267, 1.352, 1.424),
    *(1.485, 1.539, 1.586, 1.629, 1.668, 1.703, 1.736, 1.766),
)
_SLOWEST = "slowest stage"
_ROUND_TRIP = "round trip"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StageTime:
    """Seconds that one microbatch costs one stage."""

    forward: dict[str, float]
    """The model's own work, by cause."""
    preparation: float
    """On the device's path."""
    transfer: float
    """Handing over, and waiting for stages that are slower just now."""
    sampling: float
    """On the last stage's device."""

    @property
    def computing(self) -> float:
        """The device's time for the model's own work."""
        return sum(self.forward.values())

    @property
    def parts(self) -> dict[str, float]:
        """Everything, by cause as the tables name it."""
        more = {"preparation": self.preparation, "hand-over": self.transfer}
        return {**self.forward, **more, "device sampling": self.sampling}

    @property
    def occupancy(self) -> float:
        """Time before the stage can take the next microbatch."""
        return self.computing + self.preparation + self.transfer + self.sampling


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Iteration:
    """The steady state of one configuration."""

    inflight: int
    microbatch: Microbatch
    stages: tuple[StageTime, ...]
    period: float
    """Seconds between two microbatches."""
    stations: dict[str, float]
    bubbles: dict[str, float]
    """Shares of the time in which a device, on average over stages, does not run the model:
    ``load_imbalance``, sampling on the last stage and the other stages' wait for the slowest;
    ``intra_stage``, input preparation on the device's path; ``inter_stage``, handing hidden states
    over; ``starved``, nothing to run: too few or uneven microbatches, slow samplers, scheduler."""

    @property
    def idle(self) -> float:
        """All bubbles: 1 less the share in which a device is busy."""
        return sum(self.bubbles.values())

    @property
    def delay(self) -> float:
        """Mean time per output token, seconds: D(p, t)."""
        return self.inflight * self.period

    @property
    def limit(self) -> str:
        """Name of what the time goes to: the largest part of the tightest bound."""
        name = max(self.stations, key=self.stations.__getitem__)
        if name == _SLOWEST:
            parts = max(self.stages, key=lambda time: time.occupancy).parts
        elif name == _ROUND_TRIP:
            of_stages = [time.parts for time in self.stages]
            parts = {cause: sum(each[cause] for each in of_stages) for cause in of_stages[0]}
            ends = (_SLOWEST, _ROUND_TRIP)
            parts |= {key: value for key, value in self.stations.items() if key not in ends}
        else:
            return name
        return max(parts, key=parts.__getitem__)


def iterate(
    costs: DatasheetCosts,
    engine: Engine,
    placement: Placement,
    work: Microbatch,
    *,
    inflight: int,
    samplers: int,
) -> Iteration:
    """The steady state of ``inflight`` (1 or more) microbatches like ``work`` in a pipeline.
    ``samplers``: CPU cores that draw tokens; ignored where the engine samples on the device."""
    on_device = engine.sampling == "device"
    last = placement.stages[-1]
    hops = [costs.hop(stage, work) for stage in placement.stages]
    preparations = [costs.preparation(engine, stage, work) for stage in placement.stages]
    prepared = max(preparations)
    waiting = engine.variation * _EXPECTED_MAXIMUM[min(placement.p, 16)]
    stages = []
    for stage in placement.stages:
        forward = costs.forward(stage, work, gather=on_device and stage.t > 1)
        moved = hops[stage.index] + (hops[stage.index - 1] if stage.index else 0.0)
        handing = costs.transfer(engine, stage, work) + engine.blocking * moved
        stages.append(
            StageTime(
                forward=forward,
                preparation=engine.exposed * preparations[stage.index],
                transfer=handing + waiting * sum(forward.values()),
                sampling=costs.device_sampling(work) if on_device and stage is last else 0.0,
            )
        )
    schedule = costs.schedule(engine, work)
    slowest = max(time.occupancy for time in stages)
    stations = {_SLOWEST: slowest, "scheduling": schedule}
    ahead = schedule + (1.0 - engine.exposed) * prepared  # before its first stage can start
    projections = [time.forward.get("logits", 0.0) for time in stages]
    round_trip = engine.schedule_exposed * ahead
    round_trip += passing((time.occupancy for time in stages), projections)
    # Hops that block are in both neighbours' occupancy, so they are taken out once.
    round_trip += sum(hops) * (1.0 - engine.blocking)
    if engine.exposed < 1.0:
        stations["preparation"] = prepared
    if not on_device:
        copies = (costs.logits_copy(stage, work) for stage in placement.stages if stage.projection)
        stations["logits copy"] = max(copies)
        stations["CPU sampling"] = costs.host_sampling(work, samplers)
        round_trip += stations["logits copy"] + stations["CPU sampling"]
    cores, sampler_cores = costs.shared_cores()
    if cores:
        on_stages = sum(
            sampler_cores * (time.computing + time.sampling) + time.transfer for time in stages
        )
        on_cores = placement.t * (on_stages + sum(preparations))
        on_cores += schedule + (0.0 if on_device else costs.host_sampling(work, 1))
        on_cores += costs.front_end_time(work)
        stations["CPU cores"] = on_cores / cores
    between = period(stations.values(), round_trip, inflight)
    stations[_ROUND_TRIP] = round_trip / inflight
    if placement.p > 1:
        between *= 1.0 + engine.uneven
    scale = 1.0 / (len(stages) * between)  # from seconds of all stages to a share of their time
    return Iteration(
        inflight=inflight,
        microbatch=work,
        stages=tuple(stages),
        period=between,
        stations=stations,
        bubbles={
            "load_imbalance": scale * sum(slowest - s.occupancy + s.sampling for s in stages),
            "intra_stage": scale * sum(s.preparation for s in stages),
            "inter_stage": scale * sum(s.transfer for s in stages),
            "starved": scale * len(stages) * (between - slowest),  # the slowest stage waits, too
        },
    )

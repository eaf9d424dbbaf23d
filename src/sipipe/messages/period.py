"""The period of a pipeline: what the scheduler, ``"cpu_sampling": "auto"`` and the planner choose by.

A station (a stage, a copy, the samplers) has one microbatch at a time, and a microbatch begins its
next round after this one. So the time between two is that of the slowest station, or a whole round
over their number (docs/planner.md, section 6, says why this bound is reached).
"""

from collections.abc import Iterable, Sequence


def period(stations: Iterable[float], round_trip: float, inflight: int) -> float:
    """Seconds between two of ``inflight`` microbatches."""
    return max(*stations, round_trip / inflight)


def passing(stages: Iterable[float], projections: Sequence[float] = ()) -> float:
    """Seconds of one microbatch's way through the stages. ``projections``: what of these times is
    the output projection's, by stage. Parts of one that is shared out run side by side, once the
    last stage has run: the longest counts."""
    return sum(stages) - sum(projections) + max(projections, default=0.0)

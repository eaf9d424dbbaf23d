"""Period of a pipeline, by which the scheduler, ``"cpu_sampling": "auto"`` and the planner choose.

A station (a stage, a copy, the samplers) has one microbatch at a time, and a microbatch begins its
next round after this one. So the time between two is that of the slowest station, or a whole round
over their number (docs/planner.md, section 6, says why this bound is reached).
"""

from collections.abc import Iterable, Sequence


def period(stations: Iterable[float], round_trip: float, inflight: int) -> float:
    """Compute the seconds between two of ``inflight`` microbatches.

    Args:
        stations: seconds that each stage, copy and the samplers take for one microbatch.
        round_trip: seconds from the begin of a microbatch to its next begin, with nobody in its way.
        inflight: microbatches in flight, 1 or more.
    """
    return max(*stations, round_trip / inflight)


def passing(stages: Iterable[float], projections: Sequence[float] = ()) -> float:
    """Compute the seconds of one microbatch's way through the stages.

    Args:
        stages: seconds of each stage, with its part of the output projection.
        projections: seconds of that part, by stage. Parts run side by side once the last stage has
            run, so that the longest counts.
    """
    return sum(stages) - sum(projections) + max(projections, default=0.0)

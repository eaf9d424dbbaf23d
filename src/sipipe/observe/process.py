"""The recorder of a process: its trace file, its block of the page, its stage times."""

from sipipe.ipc.stage_times import PhaseCounter, StageTimes
from sipipe.messages.boots import Watched
from sipipe.observe.format import Header
from sipipe.observe.live import LivePage
from sipipe.observe.phases import COUNTED_PHASES, MAIN_PHASE, Role
from sipipe.observe.recorder import PhaseSink, Recorder, open_recorder


def record_process(
    watched: Watched, role: Role, index: int = 0, rank: int = 0, layers: int = 0
) -> Recorder:
    """Open the recorder of the executor, or of stage or sampler ``index``.

    A stage's times are its first rank's.

    Raises:
        TraceError, ChannelPeerDied: the engine is gone, or the trace cannot be written.
    """
    sinks: list[PhaseSink] = []
    if watched.live is not None:
        sinks.append(LivePage.attach(watched.live).writer(role, index, rank))
    if watched.times is not None and rank == 0:
        times = StageTimes.attach(watched.times, stages=watched.stages)
        line = times.line(role, index)
        sinks.append(PhaseCounter(line, COUNTED_PHASES[role], MAIN_PHASE[role]))
    header = Header(
        role=role,
        index=index,
        rank=rank,
        stages=watched.stages,
        layers=layers,
        inflight=watched.inflight,
        run=watched.run,
        model=watched.model,
    )
    return open_recorder(watched.trace, header, sinks)

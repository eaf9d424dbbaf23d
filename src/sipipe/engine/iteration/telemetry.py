"""The engine's side of observation: its recorder and the statistics page.

``sipipe top`` and the Prometheus metrics read the page, and the scheduler chooses the number of
microbatches by it. It is memory of one host: a host agent has one in the main host's layout, and
sends what its processes wrote. The recorder writes a trace file where the settings name a directory.
"""

import uuid
from collections.abc import Callable

import msgspec
import vllm

from sipipe.best_effort import BestEffort
from sipipe.engine.iteration.iteration import Iteration
from sipipe.engine.layers.served_cut import compare_cuts
from sipipe.engine.scheduling.concurrency import ConcurrencyController, MeasuredTimes
from sipipe.engine.setup.record import Setup
from sipipe.messages.start_records import Watched
from sipipe.observe.live import Key, LivePage, PageHeader, Word
from sipipe.observe.metrics import Publisher
from sipipe.observe.phases import Phase
from sipipe.observe.recorder import record_process

_Blocks = list[tuple[Key, bytes]]


class Figures:
    """The statistics page of one host. ``samplers``: of the engine; ``run``: the same on all of its
    hosts; ``clock_offset_ns``: what to add to this host's wall clock to have the main host's."""

    def __init__(self, setup: Setup, samplers: int, run: str, clock_offset_ns: int = 0) -> None:
        model = str(setup.vllm_config.model_config.model)
        number = setup.vllm_config.parallel_config.data_parallel_index
        trace = setup.config.trace
        if trace is not None and setup.vllm_config.replicas > 1:
            trace = f"{trace}/replica-{number}"
        header = PageHeader(
            stages=setup.stages,
            ranks=setup.ranks,
            samplers=samplers,
            inflight=setup.slots,
            model=model[:300],
            engine=str(number),
        )
        self._page = LivePage.create(header)
        self._here: list[Key] = [
            ("stage", index, rank) for index in setup.host_stages for rank in range(setup.ranks)
        ]
        self._here += [("sampler", index, 0) for index in range(len(setup.cores.samplers))]
        limit = setup.config.trace_limit
        self.watched = Watched(
            stages=setup.stages,
            inflight=setup.slots,
            model=model,
            run=run,
            trace=trace,
            trace_bytes=limit and (limit << 20) // (1 + len(self._here)),
            live=self._page.path,
            clock_offset_ns=clock_offset_ns,
        )

    def figures_here(self) -> bytes:
        """Encode what this host's processes wrote to the page, for the main host's :meth:`take_figures`."""
        return msgspec.msgpack.encode([(key, bytes(self._page.block(key))) for key in self._here])

    def take_figures(self, data: bytes) -> None:
        """Put another host's figures on our page."""
        for key, block in msgspec.msgpack.decode(data, type=_Blocks):
            self._page.block(key)[:] = memoryview(block).cast("q")

    def close(self) -> None:
        """Let the page go."""
        self._page.close()


class Telemetry(Figures):
    """The main host's. Made before the workers start, closed when they have ended."""

    def __init__(self, setup: Setup, samplers: int) -> None:
        super().__init__(setup, samplers, uuid.uuid4().hex)
        self._samplers = samplers
        self.poll: Callable[[], None] = lambda: None
        """Function that looks at the figures, where SiPipe's scheduler runs. It is called while an iteration
        is out, when the engine's thread has the time."""
        self._compare_cuts: Callable[[], None] = lambda: None
        """Function that compares the cut of the layers with what was served, once the engine is ready."""
        self.live = self._page.writer("executor")
        self._publisher = Publisher(self._page)
        self._recorder = record_process(self.watched, "executor")

    def record(
        self, phase: Phase, iteration: Iteration, began: int, ended: int, tokens: int = 0
    ) -> None:
        """One phase of an iteration on the engine's side, in monotonic nanoseconds. Of what was
        gathered the batch is in rows, as stages have it; else in requests."""
        work = iteration.work
        slot = iteration.slot
        rows = len(work.sampled) if phase == Phase.GATHER else 0
        batch = max(len(work.request_ids), rows)
        self._recorder.record(phase, iteration.number, slot, began, ended, batch, tokens)

    def idle(self, began: int, ended: int) -> None:
        """There was no request, in monotonic nanoseconds."""
        self.live.set(Word.IDLE_TO, ended)
        self.live.add(Word.IDLE_NS, ended - began)
        self._recorder.record(Phase.IDLE, 0, 0, began, ended)

    def ready(self, setup: Setup) -> None:
        """The engine can serve: say on the page how it does, and from now on in files where those are
        read. Workers have been forked: a thread before would have been in the way."""
        self._page.ready(setup.path, setup.reason, vllm.__version__)
        self._compare_cuts = compare_cuts(setup, self._page)
        self._publisher.start()

    def measured_times(self, controller: ConcurrencyController, ahead: int) -> MeasuredTimes:
        """The times of stages, samplers and this process, as a controller's input."""
        way = (Phase.DISPATCH,) if ahead else ()
        times = MeasuredTimes(controller, self._page, samplers=self._samplers, way=way)
        polling = BestEffort("fitting the stages' times", bounded=False)
        comparing = BestEffort("comparing the cut of the layers with what was served")

        def poll() -> None:
            polling(None, times.poll)
            comparing(None, self._compare_cuts)

        self.poll = poll
        return times

    def close(self) -> None:
        """Write what is left of the trace, and let the page go."""
        self._recorder.close()
        self._publisher.close()
        super().close()

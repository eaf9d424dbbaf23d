"""What the engine asks of a worker's stage, while it is loaded and once it runs.

Who runs here: whoever follows BIC-I, in control calls with no iteration in the worker, and to hand
iterations over.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from sipipe.cores import bind_threads, run_soon
from sipipe.messages import calls
from sipipe.worker.links import Links, NoEnd
from sipipe.worker.loaded_stage import LoadedStage
from sipipe.worker.sampled_stage import ClosedStage, Surroundings

if TYPE_CHECKING:
    from sipipe.worker.double_buffer import DoubleBuffer


class StageLoop:
    """One worker's stage, of what is ``around``. ``sockets``: of the links from the previous stage
    and to the next one, as far as there are any."""

    def __init__(self, around: Surroundings, sockets: Sequence[socket.socket]) -> None:
        self._around = around
        self._sockets = list(sockets)
        self._links = Links(around.boot.place, NoEnd(), NoEnd())
        self._loaded = LoadedStage(around)
        self.stage = ClosedStage()
        around.worker.reserved = self._loaded.device_bytes()

    # ---- control calls --------------------------------------------------------------------------

    def answer(self, request: calls.Request[Any]) -> Any:
        """What the engine asked."""
        match request:
            case calls.Describe():
                return self._loaded.describe()
            case calls.TimeParts(sequences=sequences):
                return self._loaded.time_parts(sequences)
            case calls.TakeProjection(offers=offers, bounds=bounds):
                return self._loaded.sharing.take(offers, bounds)
            case calls.OpenChannels():
                return self.open(request)
            case calls.Measure(sequences=sequences):
                return self._loaded.measure(sequences)
            case calls.Settle(draws=draws):
                return self._settle(draws)
        raise AssertionError(f"nobody answers {request}")

    def open(self, request: calls.OpenChannels) -> None:
        """Open the links and, where samplers draw, what has to do with BIC-L."""
        around = self._around
        if around.boot.cpus:  # not before: compilers and warm-up may take all cores
            bind_threads(around.boot.cpus)
            run_soon()
        self._links = Links.open(around.boot.place, request.links, self._sockets, around.fail)
        if request.logits is None:
            self._loaded.draw_here()
        else:
            self._loaded.open(request.logits, request.finals, self._sockets)
        if not around.boot.measures:
            self.stage = self._loaded.begin(self._links)

    def _settle(self, draws: str) -> None:
        """Who draws, as ``cpu_sampling`` says it, now that it was measured; no iteration has run."""
        if draws == "off":
            self._loaded.draw_here()
        else:
            self._loaded.take_over(draws)
        self.stage = self._loaded.begin(self._links)

    # ---- iterations -----------------------------------------------------------------------------

    @property
    def double_buffer(self) -> DoubleBuffer | None:
        """The stage's two threads, once iterations can run."""
        return self.stage.double_buffer

    def call(self, function: Callable[[], Any]) -> Any:
        """What ``function`` returns, with no iteration in the worker; in the device thread, if any."""

        def alone() -> Any:
            self.stage.drain()
            return function()

        double_buffer = self.stage.double_buffer
        return alone() if double_buffer is None else double_buffer.call(alone)

    def doing(self) -> str:
        """What the threads that run iterations do now, as predicates."""
        return self.stage.doing()

    def close(self) -> None:
        """End the threads; release links and channels."""
        self.stage.close()
        self._links.close()
        self._loaded.close()

"""The cut of the layers that would have been best for what an engine has served.

Layers are cut before anything is measured, as if there were as many tokens of prompts as of answers
(:mod:`sipipe.engine.layers.cut`). For other requests, such as chats with long prompts and short answers,
another cut can be quicker. The engine compares the times that its stages have taken, and says in its log
which one.

Who runs here: the engine's thread. A comparison takes it 7 to 31 ms with eight stages and 61 to 126 layers,
at most as often as :data:`ENOUGH` says.
Rejected: to take such a cut at the next start without being told, because the room for KV cache would
then depend on what somebody happened to serve before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from vllm.logger import init_logger

from sipipe.engine.layers.choose import cut_for_times, is_free
from sipipe.engine.layers.cut import Cut, pays
from sipipe.engine.layers.facts import ModelFacts
from sipipe.engine.setup.draft_head import head_of
from sipipe.engine.setup.rank_files import stored_cut
from sipipe.engine.setup.record import Setup
from sipipe.observe.live import LivePage, Word
from sipipe.observe.phases import Phase

logger = init_logger(f"vllm.{__name__}")

EVERY = 64
"""Calls between two looks at the stages' times. An engine calls once in an iteration."""
ENOUGH = 60.0
"""Seconds of work of the busiest stage after which cuts are compared first. Then after twice as many, and
so on, so that a mix of requests which changes is seen, and an engine of a year says little."""


def compare_cuts(setup: Setup, page: LivePage) -> Callable[[], None]:
    """Return what the engine calls in each iteration to have the cut of its layers compared with what was
    served. Nothing is compared where the user has cut the layers, or a checkpoint that is stored by rank;
    where the output projection is shared out by measured times; and where the last stage also draws tokens
    or drafts, since its layers' part of the time is not known then."""
    named = not is_free(setup.config) or stored_cut(setup.vllm_config) is not None
    does_more = bool(setup.reason) or head_of(setup.vllm_config) is not None
    facts = setup.decoder.facts
    if setup.stages == 1 or named or does_more or setup.vocabulary.parts or facts is None:
        return lambda: None
    return ServedCut(setup, facts, page).look


class ServedCut:
    """Compares the cut of an engine with the best one for the times on its statistics ``page``."""

    def __init__(self, setup: Setup, facts: ModelFacts, page: LivePage) -> None:
        self._layers = setup.layers
        self._best = partial(
            cut_for_times, setup.vllm_config, facts, setup.config.kv_loss, setup.layers
        )
        self._stages = [page.block(("stage", stage, 0)) for stage in range(setup.stages)]
        self._calls = 0
        self._due = ENOUGH
        self._named: Cut = setup.layers
        """The cut that was named last."""

    def look(self) -> None:
        """Compare, where it is time for it, and write a line to the log if another cut would be quicker."""
        self._calls += 1
        if self._calls % EVERY:
            return
        layers = self._seconds(Phase.FORWARD)
        projection = self._seconds(Phase.LOGITS)[-1]
        if max(*layers, layers[-1] + projection) < self._due or min(layers) <= 0:
            return
        self._due *= 2
        cut, quicker = self._best(layers, projection)
        if pays(quicker) and cut != self._named:
            self._named = cut
            logger.info("%s", describe(self._layers, cut, quicker, layers, projection))

    def _seconds(self, phase: Phase) -> list[float]:
        """Seconds that the stages have spent in ``phase``, measured by each one's first rank."""
        return [words[Word.PHASE_NS + phase] / 1e9 for words in self._stages]


def describe(
    layers: Cut, cut: Cut, quicker: float, seconds: Sequence[float], projection: float
) -> str:
    """One line: which ``cut`` would have been better than ``layers``, and how to have it."""

    def text(numbers: Sequence[float], form: str) -> str:
        return ", ".join(format(number, form) for number in numbers)

    return (
        f"Layers of the stages: for what was served so far, {text(cut, 'd')} would be {quicker:.2f} x as "
        f"quick in the slowest stage as {text(layers, 'd')} (these took {text(seconds, '.0f')} s, and the "
        f"output projection {projection:.0f} s). The sipipe config "
        f'"layers": {list(cut)} takes it at the next start'
    )

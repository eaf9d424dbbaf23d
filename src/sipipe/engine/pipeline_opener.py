"""From loaded models to a pipeline that can run: what stages have, who multiplies, who draws.

Who runs here: the engine thread, in vLLM's start.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec
from vllm.logger import init_logger

from sipipe._version import __version__
from sipipe.engine.iteration.bus import Host
from sipipe.engine.iteration.calls import Calls
from sipipe.engine.layers.cut import COST_TOKENS
from sipipe.engine.layers.vocabulary import Vocabulary, columns, measured_vocabulary
from sipipe.engine.link_opener import LinkOpener, describe_links
from sipipe.engine.setup.record import Setup
from sipipe.engine.setup.sampling_costs import Costs
from sipipe.messages.calls import (
    ChooseDrawer,
    Describe,
    Measure,
    OpenChannels,
    TakeProjection,
    TimeParts,
)
from sipipe.messages.hosts import EndSamplers, MakeLogits, OpenSamplers
from sipipe.messages.link import LinkEndpoint
from sipipe.messages.measured import MIXES
from sipipe.messages.start_records import ProjectionOffer, StageDescription

logger = init_logger(f"vllm.{__name__}")

T = TypeVar("T")


@dataclass(frozen=True)
class Running:
    setup: Setup
    """As decided before, or with vLLM's sampler if that was measured to be better."""
    samplers: int
    vocabulary: Vocabulary
    """Who multiplies by the output projection."""
    draws: str
    """Who draws, as ``cpu_sampling`` says it."""
    links: Sequence[LinkEndpoint]

    def __str__(self) -> str:
        setup = self.setup
        parts = (
            f"{_counted(setup.stages, 'stage')} x {_counted(setup.ranks, 'rank')}",
            "vLLM's sampler on the last stage"
            if setup.reason
            else _counted(self.samplers, "sampler"),
            f"{_counted(setup.slots, 'microbatch', 'es')} in flight",
            f"links: {describe_links(self.links)}",
        )
        return f"SiPipe {__version__}: {', '.join(parts)}"


@dataclass
class PipelineOpener:
    """Opens an engine whose workers have loaded their layers."""

    _setup: Setup
    _samplers: int
    _calls: Calls
    _last: Host
    """The last stage's."""
    _addresses: Mapping[int, str]
    """Of the other hosts, by their first stage."""

    def __post_init__(self) -> None:
        self._seconds = self._setup.config.start_timeout

    def open(self) -> Running:
        """Make the channels between the processes; raises as :meth:`.Pipeline.open`."""
        setup, vocabulary, draws = self._setup, Vocabulary(), "off"
        ranks = self._calls.ask(Describe(), self._seconds)
        self._links = LinkOpener(setup, self._calls, self._addresses, ranks)
        links = self._links.join_stages()
        if setup.reason:
            self._calls.ask(OpenChannels(), self._seconds)
        else:
            vocabulary, draws = self._open_logits(ranks[-setup.ranks :]), setup.config.cpu_sampling
            drawing = self._last.do(OpenSamplers())
            draws = self._choose(drawing) if setup.measures else draws
            if draws == "off":
                setup = setup.on_device("CPU samplers would not be worth it here, as was measured")
                vocabulary = setup.vocabulary
                self._last.do(EndSamplers())
        return Running(setup, self._samplers, vocabulary, draws, links)

    def _open_logits(self, ranks: Sequence[StageDescription]) -> Vocabulary:
        """Make BIC-L as the last stage's ``ranks`` want it; returns who multiplies."""
        logits = ranks[0].logits
        assert logits is not None, "the first rank of the last stage writes logits"
        vocabulary, bounds = self._share([rank.offer for rank in ranks])
        if bounds:
            logits = msgspec.structs.replace(logits, bounds=bounds)
            self._links.join_last_stage()
        endpoint = self._last.do(MakeLogits(logits))
        self._calls.ask(OpenChannels(logits=endpoint), self._seconds)
        return vocabulary

    def _share(self, offers: Sequence[ProjectionOffer | str]) -> tuple[Vocabulary, tuple[int, ...]]:
        """Have every stage take its rows of what the last stage's ranks offer. Returns also the
        columns of all writers of logits; none where the last stage keeps them."""
        setup = self._setup
        if not setup.vocabulary.parts:
            return setup.vocabulary, ()
        rows = [offer for offer in offers if isinstance(offer, ProjectionOffer)]
        if len(rows) < len(offers):
            vocabulary = Vocabulary(why=next(why for why in offers if isinstance(why, str)))
            logger.warning("%s", vocabulary)
            return vocabulary, ()
        sequences = min(setup.microbatch, COST_TOKENS)
        times = self._calls.ask(TimeParts(sequences=sequences), self._seconds)
        vocabulary = measured_vocabulary(
            setup.vocabulary,
            setup.config,
            [max(rank.layers for rank in stage) for stage in _parts(times, setup.ranks)],
            max(rank.projection for rank in times),
            reserved=setup.vllm_config.device_config.device_type != "cpu",
        )
        logger.info("%s", vocabulary)
        if not vocabulary.parts:
            return vocabulary, ()
        bounds = columns([offer.columns for offer in rows], vocabulary.parts)
        self._calls.ask(TakeProjection(offers=rows, bounds=bounds), self._seconds)
        return vocabulary, bounds

    def _choose(self, drawing: Mapping[str, float]) -> str:
        """Measure who should draw, and tell the workers; ``drawing`` is the samplers' part."""
        setup = self._setup
        ranks = self._calls.ask(Measure(sequences=setup.microbatch), self._seconds)
        stages = _parts(ranks, setup.ranks)
        last = stages[-1]
        copied = max(last, key=lambda rank: rank.copy)
        costs = Costs(
            sequences=setup.microbatch,
            inflight=setup.slots,
            stages=tuple(max(rank.layers for rank in stage) for stage in stages),
            projection=max(rank.projection for rank in last),
            device={mix: max(rank.device[mix] for rank in last) for mix in MIXES},
            plain={mix: max(rank.plain[mix] for rank in last) for mix in last[0].plain},
            copy=copied.copy,
            copied=copied.copied,
            draws=drawing,
        )
        logger.info("%s", costs)
        self._calls.ask(ChooseDrawer(draws=costs.choice), self._seconds)
        return costs.choice


def _parts(ranks: Sequence[T], count: int) -> list[Sequence[T]]:
    """Those of each stage."""
    return [ranks[at : at + count] for at in range(0, len(ranks), count)]


def _counted(number: int, noun: str, plural: str = "s") -> str:
    return f"{number} {noun}{'' if number == 1 else plural}"

"""The last steps from loaded models to a pipeline that can run.

The links between the stages are opened, the output projection is shared out where that pays, and
where CPU samplers and a device could draw, both ways are measured.

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
    """The engine as it runs, for the log and for its scheduler."""

    setup: Setup
    """Setup that was decided before, with vLLM's sampler if that was measured to be better."""
    samplers: int
    """Number of samplers of all hosts."""
    vocabulary: Vocabulary
    """Shares of the output projection."""
    draws: str
    """Place of drawing, in the words of ``cpu_sampling``."""
    links: Sequence[LinkEndpoint]
    """Links of hidden states between the stages, by the sender's rank."""

    def __str__(self) -> str:
        """One line for the log: stages, ranks, samplers, microbatches and links."""
        setup = self.setup
        sampler = _counted(self.samplers, "sampler")
        if setup.reason:
            sampler = "vLLM's sampler on the last stage"
        parts = (
            f"{_counted(setup.stages, 'stage')} x {_counted(setup.ranks, 'rank')}",
            sampler,
            f"{_counted(setup.slots, 'microbatch', 'es')} in flight",
            f"links: {describe_links(self.links)}",
        )
        return f"SiPipe {__version__}: {', '.join(parts)}"


@dataclass(kw_only=True)
class PipelineOpener:
    """Opens an engine whose workers have loaded their layers."""

    setup: Setup
    samplers: int
    """Number of samplers of all hosts."""
    calls: Calls
    last: Host
    """Host of the last stage, which has the samplers."""
    addresses: Mapping[int, str]
    """Addresses of the other hosts, by their first stage."""

    def __post_init__(self) -> None:
        self._seconds = self.setup.config.start_timeout
        """Bound on each call of the workers."""

    def open(self) -> Running:
        """Make the channels between the processes. Raises as :meth:`.Pipeline.open`."""
        setup = self.setup
        vocabulary = Vocabulary()
        draws = "off"
        ranks = self.calls.ask(Describe(), self._seconds)
        self._links = LinkOpener(setup, self.calls, self.addresses, ranks)
        links = self._links.join_stages()
        if setup.reason:
            self.calls.ask(OpenChannels(), self._seconds)
        else:
            vocabulary = self._open_logits(ranks[-setup.ranks :])
            drawing = self.last.do(OpenSamplers())
            draws = self._choose(drawing) if setup.measures else setup.config.cpu_sampling
            if draws == "off":
                setup = setup.on_device("CPU samplers would not be worth it here, as was measured")
                vocabulary = setup.vocabulary
                self.last.do(EndSamplers())
        return Running(
            setup=setup,
            samplers=self.samplers,
            vocabulary=vocabulary,
            draws=draws,
            links=links,
        )

    def _open_logits(self, ranks: Sequence[StageDescription]) -> Vocabulary:
        """Make BIC-L as the last stage's ``ranks`` describe it; returns the shares of the output
        projection."""
        logits = ranks[0].logits
        assert logits is not None, "the first rank of the last stage writes logits"
        vocabulary, bounds = self._share([rank.offer for rank in ranks])
        if bounds:
            logits = msgspec.structs.replace(logits, bounds=bounds)
            self._links.join_last_stage()
        endpoint = self.last.do(MakeLogits(logits))
        self.calls.ask(OpenChannels(logits=endpoint), self._seconds)
        return vocabulary

    def _share(self, offers: Sequence[ProjectionOffer | str]) -> tuple[Vocabulary, tuple[int, ...]]:
        """Have every stage take its rows out of ``offers``, one for each rank of the last stage; text
        in the place of an offer says why there is none. Returns the shares, and the first columns of
        all writers of logits, which are empty where the last stage keeps all rows."""
        setup = self.setup
        if not setup.vocabulary.parts:
            return setup.vocabulary, ()
        rows = [offer for offer in offers if isinstance(offer, ProjectionOffer)]
        if len(rows) < len(offers):
            reasons = [offer for offer in offers if isinstance(offer, str)]
            vocabulary = Vocabulary(why=reasons[0])
            logger.warning("%s", vocabulary)
            return vocabulary, ()
        sequences = min(setup.microbatch, COST_TOKENS)
        times = self.calls.ask(TimeParts(sequences=sequences), self._seconds)
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
        self.calls.ask(TakeProjection(offers=rows, bounds=bounds), self._seconds)
        return vocabulary, bounds

    def _choose(self, drawing: Mapping[str, float]) -> str:
        """Measure whether the device or the samplers should draw, and tell the workers. ``drawing`` are
        the samplers' seconds by mix. Returns the choice in the words of ``cpu_sampling``."""
        setup = self.setup
        ranks = self.calls.ask(Measure(sequences=setup.measured_rows), self._seconds)
        stages = _parts(ranks, setup.ranks)
        last = stages[-1]
        if setup.drafts and any(rank.head is None for rank in last):
            logger.warning("cpu_sampling auto: CPU samplers draw, the draft head was not measured")
            return self._tell("on")
        copied = max(last, key=lambda rank: rank.copy)
        costs = Costs(
            sequences=setup.measured_rows,
            inflight=setup.slots,
            stages=tuple(max(rank.layers for rank in stage) for stage in stages),
            projection=max(rank.projection for rank in last),
            device={mix: max(rank.device[mix] for rank in last) for mix in MIXES},
            plain={mix: max(rank.plain[mix] for rank in last) for mix in last[0].plain},
            copy=copied.copy,
            copied=copied.copied,
            draws=drawing,
            head=max((rank.head for rank in last if rank.head is not None), default=None),
        )
        logger.info("%s", costs)
        return self._tell(costs.choice)

    def _tell(self, draws: str) -> str:
        """Tell the workers the choice, in the words of ``cpu_sampling``; returns it."""
        self.calls.ask(ChooseDrawer(draws=draws), self._seconds)
        return draws


def _parts(ranks: Sequence[T], count: int) -> list[Sequence[T]]:
    """The ranks of each stage, of which each has ``count``."""
    return [ranks[first : first + count] for first in range(0, len(ranks), count)]


def _counted(number: int, noun: str, plural: str = "s") -> str:
    """The number with its noun, as in "2 stages"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}{plural}"

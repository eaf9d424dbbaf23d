"""From loaded models to a pipeline that can run: what stages have, who multiplies, who draws.

Who runs here: the engine thread, in vLLM's start.
"""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import msgspec
from vllm.logger import init_logger
from vllm.platforms import current_platform

from sipipe._version import __version__
from sipipe.engine.iteration.bus import Host
from sipipe.engine.iteration.calls import Calls
from sipipe.engine.iteration.stall import ANSWER_SECONDS
from sipipe.engine.layers.cut import COST_TOKENS
from sipipe.engine.layers.vocabulary import Vocabulary, columns, settle
from sipipe.engine.setup.host_agreement import link_port
from sipipe.engine.setup.record import Setup
from sipipe.engine.setup.sampling_costs import Costs
from sipipe.errors import UnsupportedError
from sipipe.messages.calls import (
    ChooseDrawer,
    Describe,
    Measure,
    OpenChannels,
    TakeProjection,
    TimeParts,
)
from sipipe.messages.hosts import EndSamplers, MakeLogits, OpenSamplers
from sipipe.messages.link import LinkEndpoint, TransportKind
from sipipe.messages.measured import MIXES
from sipipe.messages.start_records import ProjectionOffer, StageDescription

logger = init_logger(f"vllm.{__name__}")

T = TypeVar("T")
Device = Literal["cpu", "cuda"]


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
            f"links: {', '.join(dict.fromkeys(link.transport for link in self.links)) or 'none'}",
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
        self._within = _transport(setup, reach=all(rank.reaches for rank in ranks))
        """A host: what carries hidden states, and where they are needed."""
        self._links = make_links(setup, self._addresses, *self._within)
        if setup.reason:
            self._calls.ask(OpenChannels(links=self._links), self._seconds)
        else:
            vocabulary, draws = self._open_logits(ranks[-setup.ranks :]), setup.config.cpu_sampling
            drawing = self._last.do(OpenSamplers())
            draws = self._choose(drawing) if setup.measures else draws
            if draws == "off":
                setup = setup.on_device("CPU samplers would not be worth it here, as was measured")
                vocabulary = setup.vocabulary
                self._last.do(EndSamplers())
        return Running(setup, self._samplers, vocabulary, draws, self._links)

    def _open_logits(self, ranks: Sequence[StageDescription]) -> Vocabulary:
        """Make BIC-L as the last stage's ``ranks`` want it; returns who multiplies."""
        setup, logits, finals = self._setup, ranks[0].logits, []
        assert logits is not None, "the first rank of the last stage writes logits"
        vocabulary, bounds = self._share([rank.offer for rank in ranks])
        if bounds:
            logits = msgspec.structs.replace(logits, bounds=bounds)
            finals = make_final_links(setup, *self._within)
        endpoint = self._last.do(MakeLogits(logits))
        opening = OpenChannels(links=self._links, finals=finals, logits=endpoint)
        self._calls.ask(opening, self._seconds)
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
        vocabulary = settle(
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


def make_final_links(setup: Setup, kind: TransportKind, device: Device) -> list[LinkEndpoint]:
    """Of final hidden states, from each rank of the last stage to its peers, by receiver."""
    return [
        LinkEndpoint(
            kind=kind,
            device=device,
            buffer_tokens=setup.rows,
            depth=max(2, setup.slots),
            name=f"final{setup.stages - 1}-{stage}.r{rank}",
            stall_timeout=setup.config.stall_timeout + 2 * ANSWER_SECONDS,
        )
        for stage in range(setup.stages - 1)
        for rank in range(setup.ranks)
    ]


def make_links(
    setup: Setup, addresses: Mapping[int, str], kind: TransportKind, device: Device
) -> list[LinkEndpoint]:
    """One link from every rank but the last stage's to the same rank of the next stage. Returned in
    rank order, so that rank r sends on link r and receives on link r - t. ``addresses`` are of the
    other hosts, by their first stage."""
    links = []
    encrypts = setup.config.hosts.encrypt_links
    for rank in range((setup.stages - 1) * setup.ranks):
        stage, tp_rank = divmod(rank, setup.ranks)
        address = addresses.get(stage + 1, "")
        links.append(
            LinkEndpoint(
                kind="zeromq" if address else kind,
                buffer_tokens=setup.link_tokens,
                depth=max(2, setup.slots),
                name=f"stage{stage}-{stage + 1}.r{tp_rank}",
                device=device,
                # The engine, which asks all stages, speaks before a stage that waits for another.
                stall_timeout=setup.config.stall_timeout + 2 * ANSWER_SECONDS,
                address=address,
                port=link_port(setup, rank) if address else 0,
                token=secrets.token_hex(16) if address and not encrypts else "",
            )
        )
    return links


def _transport(setup: Setup, *, reach: bool) -> tuple[TransportKind, Device]:
    """Of links within a host, and where what they carry is needed. ``reach``: whether GPUs can map
    each other's memory. Raises UnsupportedError: they cannot, and are to."""
    device: Device = "cpu" if current_platform.is_cpu() else "cuda"
    asked = setup.config.transport
    if asked == "cuda_ipc" and not reach:
        raise UnsupportedError(
            'sipipe config: "transport" is "cuda_ipc", and GPUs of this host cannot reach one '
            'another\'s memory (nvidia-smi topo -p2p r): leave it "auto"'
        )
    auto: TransportKind = "shm" if device == "cpu" or not reach else "cuda_ipc"
    return auto if asked == "auto" else asked, device


def _parts(ranks: Sequence[T], count: int) -> list[Sequence[T]]:
    """Those of each stage."""
    return [ranks[at : at + count] for at in range(0, len(ranks), count)]


def _counted(number: int, noun: str, plural: str = "s") -> str:
    return f"{number} {noun}{'' if number == 1 else plural}"

"""Which transport joins which two stages: every link is opened and tried before the first iteration.

The decision is each link's own. The transports that may join its two ranks are tried in their order,
and the first that passes its trial (:mod:`sipipe.ipc.link.trial`) carries the hidden states. All links
are tried at once; those that failed, at once again with the next transport.

Who runs here: the engine thread, in vLLM's start.
"""

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from vllm.logger import init_logger
from vllm.platforms import current_platform

from sipipe.engine.iteration.calls import Calls
from sipipe.engine.iteration.stall import ANSWER_SECONDS
from sipipe.engine.setup.host_agreement import link_port, nixl_ports
from sipipe.engine.setup.record import Setup
from sipipe.errors import ResourceError, UnsupportedError
from sipipe.gpu_slices import is_slice
from sipipe.ipc.link.schema import TOKENS, TensorSchema, TensorSpec, buffer_bytes
from sipipe.messages.calls import OpenLinks
from sipipe.messages.link import (
    TRIAL_SECONDS,
    DeviceKind,
    LinkEndpoint,
    LinkTrial,
    Pair,
    TransportKind,
    TrialReport,
    transports,
)
from sipipe.messages.start_records import StageDescription

logger = init_logger(f"vllm.{__name__}")


@dataclass(frozen=True)
class _Plan:
    """One link that is not open yet."""

    endpoint: LinkEndpoint
    """The link with the transport that is tried next."""
    tensors: bytes
    """Schema of the hidden states that the later stage takes."""
    others: tuple[LinkEndpoint, ...]
    """The link with each transport that remains if that one fails."""
    failures: tuple[str, ...] = ()
    """Why others have failed before it."""


class LinkOpener:
    """Opens the links of an engine whose workers have described themselves in ``ranks``."""

    def __init__(
        self,
        setup: Setup,
        calls: Calls,
        addresses: Mapping[int, str],
        ranks: Sequence[StageDescription],
    ) -> None:
        """``addresses`` are those of the other hosts, by their first stage."""
        self._setup = setup
        self._calls = calls
        self._addresses = addresses
        self._ranks = ranks
        self._device: DeviceKind = "cpu" if current_platform.is_cpu() else "cuda"
        self._kinds = transports(setup.config.transport, self._device)
        """Transports within a host."""

    def join_stages(self) -> list[LinkEndpoint]:
        """Open the links between stages that follow one another. Returns them by the sender's rank.

        Raises UnsupportedError: the transport that the user named has failed. ResourceError: every
        transport has. Both name the link and say why. StallError: as :meth:`.Calls.ask`."""
        links = make_links(self._setup, self._addresses, self._kinds[0], self._device)
        return self._open(
            {
                pair: self._plan(pair, link, self._ranks[pair[1]].takes)
                for pair, link in links.items()
            }
        )

    def join_last_stage(self) -> list[LinkEndpoint]:
        """Open the links of final hidden states, from the last stage to each other one, where the
        output projection is shared out. Raises as :meth:`join_stages`."""
        setup = self._setup
        rows = TensorSpec("hidden_states", setup.dtype, (TOKENS, setup.hidden_size))
        tensors = TensorSchema((rows,)).encode()
        links = make_final_links(setup, self._kinds[0], self._device)
        return self._open({pair: self._plan(pair, link, tensors) for pair, link in links.items()})

    def _plan(self, pair: Pair, link: LinkEndpoint, tensors: bytes) -> _Plan:
        """The plan of a link, which begins with its first transport. Slices of a GPU cannot map one
        another's memory, so a link of theirs begins with the first transport that does without."""
        if link.address:
            endpoint, *fallbacks = self._between_hosts(pair, link)
        else:
            slices = any(is_slice(self._ranks[rank].gpu) for rank in pair)
            endpoint, *fallbacks = [
                replace(link, kind=kind)
                for kind in self._kinds
                if not (slices and kind == "cuda_ipc")
            ]
        return _Plan(endpoint=endpoint, tensors=tensors, others=tuple(fallbacks))

    def _between_hosts(self, pair: Pair, link: LinkEndpoint) -> list[LinkEndpoint]:
        """The transports that may join ranks of two hosts, in the order in which they are tried. Raises
        UnsupportedError: NIXL was asked for, and one of the hosts does not have it."""
        config = self._setup.config
        reaches = [self._ranks[rank].nixl for rank in pair]
        over_rdma = reaches == ["rdma", "rdma"]
        if config.transport == "nixl":
            for rank, reach in zip(pair, reaches, strict=True):
                if not reach:
                    stage = rank // self._setup.ranks
                    raise UnsupportedError(
                        'sipipe config: "transport" is "nixl", and NIXL is not installed on the host of '
                        f'stage {stage}: pip install "sipipe[nixl]" there, or leave it "auto"'
                    )
        elif not (
            config.transport == "auto"
            and all(reaches)
            and (over_rdma or all(self._ranks[rank].gpu for rank in pair))
        ):
            return [link]
        elif config.hosts.encrypt_links:
            logger.info(
                "link %s: hidden states are encrypted, so that zeromq carries them; NIXL, which both "
                "hosts have, encrypts nothing (hosts.encrypt_links, docs/multi-host.md)",
                link.name,
            )
            return [link]
        packets, hidden_states = nixl_ports(self._setup, pair[0])
        by_nixl = replace(
            link,
            kind="nixl",
            port=packets,
            data_port=0 if over_rdma else hidden_states,
            token="",  # packets are encrypted: who knows them could write to the stage's memory
        )
        return [by_nixl] if config.transport == "nixl" else [by_nixl, link]

    def _open(self, plans: dict[Pair, _Plan]) -> list[LinkEndpoint]:
        """Open links, each by the first of its transports that works."""
        began = time.monotonic()
        opened: dict[Pair, LinkEndpoint] = {}
        slowest: tuple[float, LinkEndpoint] | None = None
        hung: frozenset[Pair] = frozenset()
        waiting = plans
        while waiting:
            reports = self._try_out(waiting, hung)
            failed: dict[Pair, _Plan] = {}
            for pair, plan in waiting.items():
                seconds = max(report.seconds for report in reports[pair])
                reason = _failure(reports[pair])
                if reason:
                    failed[pair] = self._next(pair, plan, reason)
                    continue
                opened[pair] = plan.endpoint
                if plan.failures:
                    logger.warning("%s", self._fallen_back(pair, plan, seconds))
                if slowest is None or seconds > slowest[0]:
                    slowest = seconds, plan.endpoint
            hung = frozenset(
                pair for pair in failed if any(report.hangs for report in reports[pair])
            )
            waiting = failed
        if slowest is not None:
            seconds, link = slowest
            logger.info(
                "hidden states go from stage to stage by %d link%s; the slowest, %s, takes %.1f ms for "
                "%d tokens (all were tried, in %.0f ms)",
                len(opened),
                "" if len(opened) == 1 else "s",
                link.describe(),
                seconds * 1e3,
                link.buffer_tokens,
                (time.monotonic() - began) * 1e3,
            )
        return [opened[pair] for pair in plans]

    def _try_out(
        self, plans: Mapping[Pair, _Plan], hung: frozenset[Pair]
    ) -> dict[Pair, list[TrialReport]]:
        """The reports of both ends of each link."""
        config = self._setup.config
        trials = [
            LinkTrial(
                pair=pair,
                endpoint=plan.endpoint,
                tensors=plan.tensors,
                # A last transport has nothing to take its place, and gets as long as an iteration: a
                # slow machine may be slow.
                seconds=TRIAL_SECONDS
                if plan.others
                else max(TRIAL_SECONDS, plan.endpoint.stall_timeout),
            )
            for pair, plan in plans.items()
        ]
        answers = self._calls.ask(OpenLinks(trials=trials, hung=hung), config.start_timeout)
        reports: dict[Pair, list[TrialReport]] = {pair: [] for pair in plans}
        for answer in answers:
            for report in answer:
                reports[report.pair].append(report)
        return reports

    def _next(self, pair: Pair, plan: _Plan, reason: str) -> _Plan:
        """The plan with its next transport, since this one has failed for ``reason``."""
        kind = plan.endpoint.kind
        failures = (*plan.failures, f"{kind} failed its trial ({reason})")
        if plan.others:
            return replace(
                plan,
                endpoint=plan.others[0],
                others=plan.others[1:],
                failures=failures,
            )
        if kind == self._setup.config.transport:
            raise UnsupportedError(
                f'sipipe config: "transport" is "{kind}", and hidden states cannot cross '
                f'{self._between(pair, plan.endpoint)} by it: {reason}; leave it "auto"'
            )
        raise ResourceError(
            f"hidden states cannot cross {self._between(pair, plan.endpoint)}: "
            f"{'; '.join(failures)}"
        )

    def _fallen_back(self, pair: Pair, plan: _Plan, seconds: float) -> str:
        """The line of a link whose first transport has failed."""
        tokens = plan.endpoint.buffer_tokens
        schema = TensorSchema.decode(plan.tensors)
        return (
            f"{self._between(pair, plan.endpoint)}: {plan.endpoint.transport} carries hidden states, "
            f"since {'; '.join(plan.failures)}. {tokens} tokens, "
            f"{buffer_bytes(schema, tokens) / 1e6:.1f} MB, take {seconds * 1e3:.1f} ms: as much "
            "later is the first token of such a prompt"
        )

    def _between(self, pair: Pair, link: LinkEndpoint) -> str:
        """The link and what it joins, in words."""
        sender, receiver = (self._ranks[rank].gpu for rank in pair)
        gpus = f" from GPU {sender} to GPU {receiver}" if sender and receiver else ""
        return f"link {link.name}{gpus}"


def describe_links(links: Sequence[LinkEndpoint]) -> str:
    """The transports of the links, and which links have another one than most."""
    names: dict[str, list[str]] = {}
    for link in links:
        names.setdefault(link.transport, []).append(link.name)
    if not names:
        return "none"
    usual, *exceptions = sorted(names, key=lambda transport: -len(names[transport]))
    parts = [usual]
    for transport in exceptions:
        parts.append(f"{transport} on {' '.join(names[transport])}")
    return ", ".join(parts)


def make_final_links(
    setup: Setup, kind: TransportKind, device: DeviceKind
) -> dict[Pair, LinkEndpoint]:
    """Links of final hidden states, from each rank of the last stage to its peers."""
    last_stage = (setup.stages - 1) * setup.ranks
    return {
        (last_stage + rank, stage * setup.ranks + rank): LinkEndpoint(
            kind=kind,
            device=device,
            buffer_tokens=setup.rows,
            depth=max(2, setup.slots),
            name=f"final{setup.stages - 1}-{stage}.r{rank}",
            stall_timeout=setup.config.stall_timeout + 2 * ANSWER_SECONDS,
        )
        for stage in range(setup.stages - 1)
        for rank in range(setup.ranks)
    }


def make_links(
    setup: Setup, addresses: Mapping[int, str], kind: TransportKind, device: DeviceKind
) -> dict[Pair, LinkEndpoint]:
    """One link from every rank but the last stage's to the same rank of the next stage.

    Args:
        setup: what was decided for the engine.
        addresses: addresses of the other hosts, by their first stage.
        kind: the transport within a host.
        device: where the stages' hidden states are.

    Returns the links by the ranks of sender and receiver.
    """
    links = {}
    encrypts = setup.config.hosts.encrypt_links
    for rank in range((setup.stages - 1) * setup.ranks):
        stage, tp_rank = divmod(rank, setup.ranks)
        address = addresses.get(stage + 1, "")
        links[rank, rank + setup.ranks] = LinkEndpoint(
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
    return links


def _failure(reports: Sequence[TrialReport]) -> str:
    """Why a link has failed its trial, by the reports of its ends; empty: it has not."""
    failed = [report for report in reports if report.failure]
    # An end that hangs says less than one that saw something, and the echo of the other's end least.
    failed.sort(key=lambda report: (report.echoes, report.hangs))
    return failed[0].failure if failed else ""

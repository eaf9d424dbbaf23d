"""Links between all GPUs of a machine, or between two hosts, tried as an engine tries them at its start.

``python -m sipipe.tools.link_trials FD`` reads a :class:`Job` as JSON from stdin and prints what
:func:`run` returns as JSON. Within a host each GPU has a process, which tries its end of one link after
another; without a GPU there are two processes, and memory of the host. Between two hosts, host 1
sends to host 0, from GPU 0 to GPU 0 where both have one.

Who runs here
    The main thread orders trials, one pair at a time, so that no trial slows another down. The
    processes end with this one's group (:mod:`sipipe.tools.child`).
"""

from __future__ import annotations

import dataclasses
import itertools
import multiprocessing
import os
import socket
from contextlib import closing, suppress
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import torch

from sipipe.errors import StallError
from sipipe.ipc.errors import LinkClosedError, PeerDiedError
from sipipe.ipc.link.nixl_agent import nixl_reach
from sipipe.ipc.link.receiver import Receiver
from sipipe.ipc.link.schema import TOKENS, TensorSchema, TensorSpec, buffer_bytes
from sipipe.ipc.link.trial import TriedReceiver, TriedSender
from sipipe.ipc.secret import read_secret
from sipipe.ipc.tcp import address_of
from sipipe.messages.link import (
    LEAST_TOKENS,
    DeviceKind,
    LinkEndpoint,
    LinkTrial,
    Pair,
    TransportKind,
    transports,
)
from sipipe.tools.child import answer

WIDTH = 4096
"""Columns of the hidden states and of the residual, in bfloat16."""
SECONDS = 15.0
"""Seconds that a trial may take; then it hangs."""
MEET_SECONDS = 120.0
"""Seconds that a trial between hosts may take, whose ends are started by hand."""
SCHEMA = TensorSchema(
    tuple(TensorSpec(name, "bfloat16", (TOKENS, WIDTH)) for name in ("hidden_states", "residual"))
)

Findings = dict[str, dict[str, Any]]
"""Findings of a pair, by transport."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """The links that are to be tried."""

    nnodes: int = 1
    node_rank: int = 0
    address: str = ""
    """Address of host 0, where there are two; host 0 listens on it."""
    port: int = 0
    """First port that host 0 listens on then; two more follow."""


def run(job: Job) -> dict[str, Any]:
    """Try the links.

    Returns a JSON object:
        ``buffer``: bytes of a full buffer.
        ``links``: by pair, such as ``"0-1"``, and by transport: that it ``passed``, and in how many
        ``ms`` a full buffer was there and released; or why it ``failed``, and whether it ``hangs``.

    Raises ConfigError: there is no secret for links between hosts, or the address is not one.
    """
    device: DeviceKind = "cuda" if torch.cuda.device_count() else "cpu"
    links = _between_hosts(job, device) if job.nnodes > 1 else _within_host(device)
    return {"buffer": buffer_bytes(SCHEMA, LEAST_TOKENS), "links": links}


def _within_host(device: DeviceKind) -> dict[str, Findings]:
    """Findings of all pairs of GPUs, in both directions."""
    count = torch.cuda.device_count() if device == "cuda" else 2
    context = multiprocessing.get_context("spawn")
    pipes: list[Connection] = []
    for gpu in range(count):
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve_gpu, args=(gpu, device, theirs), daemon=True)
        process.start()
        theirs.close()
        pipes.append(ours)
    links: dict[str, Findings] = {}
    for sender, receiver in itertools.permutations(range(count), 2):
        links[f"{sender}-{receiver}"] = {
            kind: _try_pair((sender, receiver), kind, device, pipes)
            for kind in transports("auto", device)
        }
    for pipe in pipes:
        # wait: none: the pipe has room; the process, or its end
        pipe.send(None)
    return links


def _try_pair(
    pair: Pair, kind: TransportKind, device: DeviceKind, pipes: list[Connection]
) -> dict[str, Any]:
    """Have the processes of two GPUs try a link between them."""
    link = LinkEndpoint(
        kind=kind,
        name=f"gpu{pair[0]}-{pair[1]}",
        buffer_tokens=LEAST_TOKENS,
        device=device,
        stall_timeout=SECONDS,
    )
    trial = LinkTrial(pair=pair, endpoint=link, tensors=SCHEMA.encode(), seconds=SECONDS)
    for gpu, end in zip(
        pair, socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET), strict=True
    ):
        with end:
            # wait: none: the pipe has room; the process, or its end
            pipes[gpu].send((trial, end))
    # wait: 15 s (`SECONDS`) and 5 s for closing; the processes, or their end
    return _joined([pipes[gpu].recv() for gpu in pair])


def _serve_gpu(gpu: int, device: DeviceKind, orders: Connection) -> None:
    """Be the process of a GPU: try one end after another, until there are no more."""
    if device == "cuda":
        torch.cuda.set_device(gpu)
    # wait: none, between trials; the process that orders them, or its end
    while (order := orders.recv()) is not None:
        trial, sock = order
        # wait: none: the pipe has room; the process that orders trials, or its end
        orders.send(try_end(trial, gpu, sock))
    os._exit(0)  # not by threads and memory of links that hang


def try_end(trial: LinkTrial, rank: int, sock: socket.socket | None) -> dict[str, Any]:
    """Try rank ``rank``'s end of a link, and close it. Returns its findings, as :func:`run` has them."""
    kind = TriedSender if trial.pair[0] == rank else TriedReceiver
    end = kind(trial, TensorSchema.decode(trial.tensors), sock, lambda _: None)
    report = end.report()
    if report.hangs:
        end.leave()
    elif isinstance(end, TriedReceiver) and not report.failure:
        _close_last(end.take())
    else:
        end.close()
    if report.failure:
        return {"failed": report.failure, "hangs": report.hangs, "echoes": report.echoes}
    passed: dict[str, Any] = {"passed": True}
    if kind is TriedSender:
        passed["ms"] = round(report.seconds * 1e3, 3)
    return passed


def _close_last(receiver: Receiver) -> None:
    """Close a receiver once its sender has closed: before, the last release might not be on its way."""
    with closing(receiver), suppress(LinkClosedError, PeerDiedError, StallError):
        # Nothing comes but the end of the link.
        receiver.take(1, 1, SECONDS)


def _joined(ends: list[dict[str, Any]]) -> dict[str, Any]:
    """The findings of both ends of a link in one: what failed, first at the end that saw most."""
    failed = [end for end in ends if "failed" in end]
    if not failed:
        sender, receiver = ends
        return receiver | sender  # the receiver measures nothing
    failed.sort(key=lambda end: (end["echoes"], end["hangs"]))
    return {"failed": failed[0]["failed"], "hangs": any(end["hangs"] for end in failed)}


def _between_hosts(job: Job, device: DeviceKind) -> dict[str, Findings]:
    """Findings of this host's end of the links between two hosts."""
    read_secret()
    address = address_of(job.address, "--master-addr", MEET_SECONDS, own=job.node_rank == 0)
    kinds: list[TransportKind] = ["zeromq"]
    if nixl_reach():
        kinds.append("nixl")
    findings: Findings = {}
    for number, kind in enumerate(kinds):
        link = LinkEndpoint(
            kind=kind,
            name="host1-0",
            buffer_tokens=LEAST_TOKENS,
            device=device,
            stall_timeout=MEET_SECONDS,
            address=address,
            port=job.port + number,
            data_port=job.port + 2 if kind == "nixl" and nixl_reach() == "tcp" else 0,
        )
        trial = LinkTrial(pair=(1, 0), endpoint=link, tensors=SCHEMA.encode(), seconds=MEET_SECONDS)
        findings[kind] = try_end(trial, job.node_rank, None)
        findings[kind].pop("echoes", None)
    return {"host 1-0": findings}


def work(job: dict[str, Any]) -> dict[str, Any]:
    """Do :func:`run` for a job as JSON."""
    return run(msgspec.convert(job, Job))


if __name__ == "__main__":
    answer(work)

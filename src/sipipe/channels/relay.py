"""The relay's two daemons: what to start as a process on each host."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from multiprocessing.connection import Connection

from sipipe.channels.errors import ChannelError
from sipipe.channels.memory import Endpoint
from sipipe.channels.relay_replica import RelayReplica
from sipipe.channels.relay_source import RelaySource
from sipipe.channels.sockets import SocketEndpoint

__all__ = ["serve_replica", "serve_source"]


def serve_source(
    back: Connection,
    endpoint: Endpoint,
    name: str,
    address: tuple[str, int],
    *,
    logits: bool = False,
    retry: float = 30.0,
) -> None:
    """Run a source in this process: for ``multiprocessing`` with ``spawn``.

    Sends its ``SocketEndpoint`` through ``back``, and at the end an error's line or None.
    """
    make = RelaySource.logits if logits else RelaySource.dispatch
    source = make(endpoint, name, address, retry=retry)
    back.send(source.endpoint)
    _serve(back, source)


def serve_replica(
    back: Connection,
    source: SocketEndpoint,
    *,
    readers: Sequence[str],
    slots: int = 16,
    slot_bytes: int = 1 << 16,
    directory: str | None = None,
    retry: float = 30.0,
    stall: float = 300.0,
) -> None:
    """Run a dispatch replica in this process; sends its :class:`Endpoint` through ``back``, and
    at the end an error's line or None."""
    replica = RelayReplica.dispatch(
        source,
        readers=readers,
        slots=slots,
        slot_bytes=slot_bytes,
        directory=directory,
        retry=retry,
        stall=stall,
    )
    back.send(replica.endpoint)
    _serve(back, replica)


def _serve(back: Connection, relay: RelaySource | RelayReplica) -> None:
    line = None
    try:
        relay.run()
    except ChannelError as error:
        line = str(error)
    with contextlib.suppress(OSError):
        back.send(line)

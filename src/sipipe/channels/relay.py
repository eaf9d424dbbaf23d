"""The relay's two daemons: what to start as a process on each host, for either kind of channel.

Who runs here: the main thread relays; another listens to the process that started the daemon.

Guarantees: a daemon ends when its channel ends, when the other host cannot be reached for
``retry`` seconds, or when the process that started it is gone, however that ended. Nothing is
left of it then: its memory has no name, its locks and sockets are the kernel's to free.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import threading
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

from sipipe.channels.errors import ChannelError
from sipipe.channels.memory import Endpoint
from sipipe.channels.relay_frames import RelayEndpoint
from sipipe.channels.relay_replica import RelayReplica
from sipipe.channels.relay_source import RelaySource
from sipipe.errors import SiPipeError

__all__ = ["serve_replica", "serve_source"]


def serve_source(
    back: Connection,
    endpoint: Endpoint,
    name: str,
    address: tuple[str, int],
    *,
    logits: bool = False,
    retry: float = 30.0,
    start_timeout: float = 300.0,
) -> None:
    """Run a source in this process: for ``multiprocessing`` with ``spawn``.

    Follows a dispatch or (``logits``) a logits channel as its declared reader ``name``. Sends its
    :class:`RelayEndpoint` through ``back``, and at the end, or instead, ``("end", line)``: an
    error's line or None.
    """
    make = RelaySource.logits if logits else RelaySource.dispatch
    _serve(back, lambda: make(endpoint, name, address, retry=retry, start_timeout=start_timeout))


def serve_replica(
    back: Connection,
    source: RelayEndpoint,
    *,
    readers: Sequence[str],
    slots: int | None = None,
    slot_bytes: int | None = None,
    directory: str | None = None,
    retry: float = 30.0,
    stall: float = 300.0,
) -> None:
    """Run a replica of what ``source`` follows in this process; see :meth:`RelayReplica.create`.

    Sends its :class:`Endpoint` through ``back``, and at the end ``("end", line)``. Takes
    ``("add_reader", name)`` and ``("remove_reader", name)`` from there, for readers that are
    started again, and answers with the same word and a line. A line is an error's, or None.
    """
    _serve(
        back,
        lambda: RelayReplica.create(
            source,
            readers=readers,
            slots=slots,
            slot_bytes=slot_bytes,
            directory=directory,
            retry=retry,
            stall=stall,
        ),
    )


def _serve(back: Connection, make: Callable[[], RelaySource | RelayReplica]) -> None:
    line = None
    sending = threading.Lock()
    try:
        relay = make()
        back.send(relay.endpoint)
        threading.Thread(
            target=_listen, args=(back, sending, relay), name="relay-parent", daemon=True
        ).start()
        relay.run()
    except SiPipeError as error:
        line = str(error)
    with sending, contextlib.suppress(OSError):
        back.send(("end", line))


def _listen(back: Connection, sending: threading.Lock, relay: RelaySource | RelayReplica) -> None:
    """End the process with the one that started it; until then, obey it."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "a daemon of its own process"
    open_ends: list[Any] = [back, parent.sentinel]
    while parent.sentinel not in wait(open_ends):
        try:
            what, name = back.recv()
        except (EOFError, OSError):  # it closed its end, and may live on
            open_ends = [parent.sentinel]
            continue
        assert what in ("add_reader", "remove_reader")
        assert isinstance(relay, RelayReplica)
        line = None
        try:
            getattr(relay, what)(name)
        except ChannelError as error:
            line = str(error)
        with sending, contextlib.suppress(OSError):
            back.send((what, line))
    os._exit(1)  # everything that we hold, the kernel frees

"""A connection between processes of two hosts: authenticated, watched and, by default, encrypted.

Who runs here
    One thread at a time receives; any thread sends, interrupts or closes. A thread of each
    connection makes the attempts to connect, sees the peer come and go, and looks at the network.
    ZeroMQ's own thread does the network and the heartbeats, so that sending never waits and what
    comes lies ready.
Guarantees
    The peer has the same secret (:mod:`sipipe.ipc.secret`), or this connection's own ``token``, or
    nothing is exchanged. Messages arrive whole and in order, after what was sent before them. A
    peer that ends, is stopped, or cannot be reached any more is noticed, also by a process that
    waits for something else: at once if its process ended, after ``NETWORK_MS`` and a second if the
    network is gone (by the kernel's counters: a busy process sees it late, and never wrongly), after ``SILENCE_MS``
    and a second if its process is stopped; what it sent has been received by then. A network that
    comes back within 3 s loses nothing, however often it goes: what was sent is sent again every
    second (:class:`.tcp.Unacknowledged`; on Linux before 6.15 after longer and longer pauses).
    Nothing is received before its sender is met, so that it can be answered.
    One peer is met, once: a connection that was lost is not made again, and whoever else comes to
    the port is heard by nobody, not by ZeroMQ either (:func:`.tcp.deafen`). Before that a stranger
    has ``HANDSHAKE_MS``, and no more than a frame of his is stored.
Relies on
    ``_turn`` is held around every call of ZeroMQ. A socket's descriptor wakes once for news, and a
    send may take the news in: whoever sends looks, and wakes the receiver.
    Who uses this bounds what is queued: a link ``depth`` frames, BIC-I the iterations in flight.

Rejected: a ROUTER for all hosts on one port (its events name no peer, so that a lost one would
have to be found by asking all); a second socket for sending (two connections to one peer may die
one after the other); closing the listener once the peer is in (ZeroMQ closes what came by it);
a limit as large as the largest message (for strangers too: large parts travel as :mod:`.frames`).
"""

import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils.monitor import recv_monitor_message

from sipipe.ipc import frames
from sipipe.ipc.errors import PeerDiedError, TransferMismatchError
from sipipe.ipc.frames import Place
from sipipe.ipc.secret import USER, curve_options, plain_options
from sipipe.ipc.tcp import Unacknowledged, deafen, listen, what_was_seen

HEARTBEAT_MS = 1000
"""Milliseconds between two heartbeats on an idle connection."""
SILENCE_MS = 10_000
"""Milliseconds without a word of the peer after which it is lost. Its machine may still answer."""
NETWORK_MS = 4000
"""Milliseconds after which a peer is lost whose kernel has acknowledged nothing of what was sent."""
LOOK_MS = 500
"""Milliseconds between two looks at what is unacknowledged."""
HANDSHAKE_MS = 3000
"""Milliseconds that a handshake may take."""
_LINGER_MS = 1000
"""Milliseconds for which ``close`` waits until what was sent has gone out."""
_RETRY_SECONDS = 0.2
"""Seconds between two attempts to connect."""
_REFUSALS = 3
"""Handshakes that the peer may refuse: one may be by an engine that is ending and has the same port."""
_NEVER_MS = 24 * 3600 * 1000
"""Milliseconds until ZeroMQ itself connects again: longer than an attempt lives."""
_STRANGE = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
_REFUSED = _STRANGE | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
_OPENED = zmq.EVENT_ACCEPTED | zmq.EVENT_CONNECTED
_FAILED = _REFUSED | zmq.EVENT_CONNECT_RETRIED | zmq.EVENT_DISCONNECTED
_EVENTS = _OPENED | _FAILED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_MONITOR_STOPPED


class Connection:
    """One end of a connection. The listening end takes one peer.

    Args:
        address: the listening host's address. The port is bound on it alone.
        port: the listening host's port.
        listens: makes this the listening end.
        who: the peer's name in messages.
        token: a word in the place of the secret and of encryption. The ends know it by an encrypted
            connection, and it lets one peer in, which is there before others can have read it.
        lost: called once by the connection's thread when the peer that was met is gone.

    Raises ConfigError: there is no secret, the address is not this host's, or the port is taken.
    """

    def __init__(
        self,
        address: str,
        port: int,
        *,
        listens: bool,
        who: str,
        token: str = "",
        lost: Callable[[PeerDiedError], None] = lambda _: None,
    ) -> None:
        self.who = who
        self.refused = False
        """True if a handshake has failed: somebody without the secret came, or this end was refused."""
        self.lost = lost
        self._loss = ""
        """Clause that says how the peer was lost; empty while it is not."""
        self._met = False
        """True once the peer was there. Written under ``_turn``."""
        self._gone = False
        """True once the peer is lost, or this end was interrupted or closed."""
        self._closed = False
        """True once this end is closed. Written under ``_turn``."""
        self._peers: dict[int, Unacknowledged] = {}
        """Copies of the sockets by which the peer may have come, by descriptor. They show the kernel's
        view of a connection that ZeroMQ closes before it says so. ZeroMQ does not say by which socket
        the peer came; a stranger's is closed within the handshake's bound, and the last is the
        peer's."""
        # Held around every call of ZeroMQ, whose sockets are not for several threads.
        self._turn = threading.Lock()  # wait: held for moments; nobody waits under it
        options: dict[int, int | bytes] = {
            zmq.IPV6: ":" in address,
            zmq.LINGER: _LINGER_MS,
            zmq.HEARTBEAT_IVL: HEARTBEAT_MS,
            zmq.HEARTBEAT_TIMEOUT: SILENCE_MS,
            zmq.HEARTBEAT_TTL: SILENCE_MS,
            zmq.CONNECT_TIMEOUT: HANDSHAKE_MS,
            zmq.HANDSHAKE_IVL: HANDSHAKE_MS,
            zmq.RECONNECT_IVL: _NEVER_MS,
            zmq.MAXMSGSIZE: frames.MOST_BYTES,
        }
        self._options = options | (
            plain_options(token, listens) if token else curve_options(listens)
        )
        self._where = f"tcp://[{address}]:{port}" if ":" in address else f"tcp://{address}:{port}"
        self._listener = listen(address, port) if listens else None
        self._context = zmq.Context()
        # No bound on queues, the monitor's included: with a full one ZeroMQ's thread would wait.
        self._context.setsockopt(zmq.SNDHWM, 0)
        self._context.setsockopt(zmq.RCVHWM, 0)
        self._door: ThreadAuthenticator | None = None
        if token and listens:
            self._door = ThreadAuthenticator(self._context)
            self._door.start()
            self._door.configure_plain("*", {USER: token})
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poll = select.poll()
        self._poll.register(self._wake, select.POLLIN)
        self._closing = threading.Event()
        self._attempts = 0
        self._open()
        self._thread = threading.Thread(target=self._watch, name="SiPipeConnection", daemon=True)
        self._thread.start()

    @property
    def usable(self) -> bool:
        """True while messages pass: the peer was met, is not lost, and this end was not interrupted."""
        return self._met and not self._gone

    def wait_for_peer(self, timeout: float) -> bool:
        """Wait for the peer; True if it is there. False after ``timeout`` seconds, or as soon as a
        handshake has failed (:attr:`refused`)."""
        deadline = time.monotonic() + timeout
        while True:
            seconds = deadline - time.monotonic()
            if self._met or self.refused or seconds <= 0:
                return self._met
            self._sleep(seconds)

    def send(self, *parts: bytes | memoryview) -> None:
        """Send one message, without a wait; on return it is copied. Raises PeerDiedError: the peer was
        not met yet, or is gone."""
        with self._turn:
            if self._closed or self._gone or not self._met:
                raise self.died()
            self._give(parts)

    def receive(self, timeout: float | None, place: Place | None = None) -> list[bytes] | None:
        """Wait for the next message; returns its parts, or None after ``timeout`` seconds.

        Args:
            timeout: seconds; None: without a bound.
            place: says where the parts behind the first go, which are then not returned.

        Raises TransferMismatchError: a part has another size than its place. PeerDiedError: the peer
        is gone, and everything that it sent has been received."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            # Read before the look for a message: what the lost peer sent is there by then.
            gone = self._gone
            with self._turn:
                if self._closed:
                    raise self.died()
                # Nothing is received before the peer is met, since it could not be answered.
                if self._met:
                    with suppress(zmq.Again):
                        parts = frames.receive(self._socket, place)
                        if parts is None:
                            raise TransferMismatchError(
                                f"{self.who} sent another size than it announced"
                            )
                        return parts
            if gone:
                raise self.died()
            seconds = None if deadline is None else deadline - time.monotonic()
            if not self._gone:
                if seconds is not None and seconds <= 0:
                    return None
                self._sleep(seconds)

    def died(self) -> PeerDiedError:
        """The error to raise when the peer is gone without a goodbye."""
        loss = f" ({self._loss})" if self._loss else ""
        return PeerDiedError(f"{self.who} died or cannot be reached{loss}; its own log says more")

    def interrupt(self, goodbye: bytes = b"") -> None:
        """Send ``goodbye``, if there is one, and end a ``receive`` that waits."""
        if goodbye:
            with suppress(PeerDiedError):
                self.send(goodbye)
        self._gone = True
        self._rouse()

    def close(self) -> None:
        """Close this end; what was sent still goes out, within a second. Idempotent. No thread may be
        in ``receive``."""
        with self._turn:
            if self._closed:
                return
            self._closed = True
            self._gone = True
            self._closing.set()
            self._socket.disable_monitor()
        self._thread.join()  # wait: none; it hears that its monitor has stopped
        for peer in self._peers.values():
            peer.connection.close()
        if not self._met or self._loss:  # nobody is there to take what was sent
            self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.close()
        if self._listener is not None:
            self._listener.close()
        if self._door is not None:
            self._door.stop()
        self._context.term()  # wait: 1 s (`_LINGER_MS`); what was sent has gone out
        os.close(self._wake)

    # ---- the receiving thread -------------------------------------------------------------------

    def _sleep(self, seconds: float | None) -> None:
        """Sleep until there are news, at most for ``seconds``."""
        milliseconds = None if seconds is None else min(seconds * 1e3, 1e9)
        # wait: the caller's or none; news, the peer's death or 10 s of silence, `interrupt`
        for descriptor, _ in self._poll.poll(milliseconds):
            if descriptor == self._wake:
                with suppress(BlockingIOError):
                    os.eventfd_read(self._wake)

    # ---- the thread that holds _turn ------------------------------------------------------------

    def _give(self, parts: Sequence[bytes | memoryview]) -> None:
        """Queue a message at ZeroMQ."""
        try:
            frames.send(self._socket, parts)  # wait: none: it is queued
        except zmq.ZMQError:
            raise self.died() from None
        # The socket's descriptor wakes once for news, and the call above may have taken them in.
        if int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            self._rouse()

    def _rouse(self) -> None:
        """Wake the receiving thread."""
        with suppress(OSError):  # closed
            os.eventfd_write(self._wake, 1)

    def _open(self) -> None:
        """Bind, or begin one attempt to connect. Each attempt has a socket of its own, because ZeroMQ
        would otherwise begin the next one at any time."""
        self._socket = self._context.socket(zmq.PAIR)
        for option, value in self._options.items():
            self._socket.setsockopt(option, value)
        self._attempts += 1
        self._monitor = self._socket.get_monitor_socket(_EVENTS, f"inproc://{self._attempts}")
        if self._listener is None:
            self._socket.connect(self._where)
        else:
            self._socket.setsockopt(zmq.USE_FD, os.dup(self._listener.fileno()))
            self._socket.bind(self._where)

    # ---- the connection's thread ----------------------------------------------------------------

    def _watch(self) -> None:
        """Run the connection's thread."""
        try:
            self._follow()
        except Exception as error:
            # A fault of ours. Without this thread nobody would see the peer's end, so it is lost now.
            self._lose(repr(error))
            for _ in self._news():  # ZeroMQ's `close` waits until somebody has read the last event
                pass

    def _follow(self) -> None:
        """Make attempts to connect, meet the peer and see it go, until this end is closed."""
        opened: dict[int, float] = {}
        """Connections before the peer is met: descriptors, and the times at which they opened."""
        refusals = 0
        for event, value in self._news():
            if self._met:
                if event == zmq.EVENT_DISCONNECTED and value in self._peers:
                    self._see_disconnected(value)
            elif event & _OPENED:
                opened[value] = time.monotonic()
            elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._meet(opened)
            elif self._listener is not None:
                opened.pop(value if event == zmq.EVENT_DISCONNECTED else -1, None)
                if event & _STRANGE:
                    self._refuse()
            elif refusals < _REFUSALS:
                now = time.monotonic()
                quick = any(now - began < HANDSHAKE_MS / 1e3 for began in opened.values())
                opened.clear()
                # A handshake that took its whole time was not refused: the peer gave no answer.
                if event & _REFUSED and quick:
                    refusals += 1
                    self._refuse()
                if refusals == _REFUSALS:
                    self._lose(f"it refused the handshake {refusals} times")
                else:
                    self._try_again()

    def _see_disconnected(self, descriptor: int) -> None:
        """Close the copy of a connection that has ended; with the last one the peer is lost."""
        loss = "it closed the connection"
        peer = self._peers.pop(descriptor).connection
        with peer, suppress(OSError):  # no TCP connection any more
            loss = what_was_seen(peer, HEARTBEAT_MS / 1e3)
        if not self._peers:
            self._lose(loss)

    def _news(self) -> Iterator[tuple[int, int]]:
        """ZeroMQ's events, each with its value, until its monitor stops."""
        while True:
            # wait: 0.5 s (`LOOK_MS`) once the peer is there, none before; what ZeroMQ says, `close`
            if not self._monitor.poll(LOOK_MS if self._peers else None):
                self._look_at_network()
                continue
            # wait: none; the event is there
            news = recv_monitor_message(self._monitor)
            if news["event"] == zmq.EVENT_MONITOR_STOPPED:
                self._monitor.close()
                return
            yield news["event"], news["value"]

    def _look_at_network(self) -> None:
        """End connections of which the peer's machine has acknowledged nothing for :data:`NETWORK_MS`. ZeroMQ
        then says that they are gone."""
        for peer in self._peers.values():
            with suppress(OSError):  # it has ended: ZeroMQ says so next
                if peer.seconds() >= NETWORK_MS / 1e3:
                    peer.abort()

    def _refuse(self) -> None:
        """Say to who waits for the peer that a handshake has failed."""
        self.refused = True
        self._rouse()

    def _try_again(self) -> None:
        """Begin another attempt to connect."""
        # wait: 0.2 s (`_RETRY_SECONDS`); `close`
        if self._closing.wait(_RETRY_SECONDS):
            return
        with self._turn:
            if not self._closed:
                self._socket.disable_monitor()
                self._monitor.close()
                self._socket.close(linger=0)
                self._open()

    def _meet(self, opened: Iterable[int]) -> None:
        """The peer is there: take no other, and let messages pass. It came by one of ``opened``."""
        for descriptor in opened:
            with suppress(OSError):  # closed already
                self._peers[descriptor] = Unacknowledged(socket.socket(fileno=os.dup(descriptor)))
        if self._listener is not None:
            deafen(self._listener)
        with self._turn:
            if not self._closed:
                self._met = True
                self._poll.register(self._socket.FD, select.POLLIN)
        self._rouse()
        if not self._peers:
            self._lose("it closed the connection")

    def _lose(self, loss: str) -> None:
        """The peer is lost, for the reason ``loss``. Say so, unless this end has ended before."""
        self._loss = loss
        ended = self._gone
        self._gone = True
        self._rouse()
        if not ended:
            self.lost(self.died())

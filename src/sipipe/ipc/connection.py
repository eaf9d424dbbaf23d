"""A connection between processes of two hosts: authenticated, watched and, by default, encrypted.

Who runs here
    One thread at a time receives; any thread sends, interrupts or closes. A thread of each
    connection makes the attempts to connect, and sees the peer come and go. ZeroMQ's own thread
    does the network and the heartbeats, so that sending never waits and what comes lies ready.
Guarantees
    The peer has the same secret (:mod:`sipipe.ipc.secret`), or this connection's own ``token``, or
    nothing is exchanged. Messages arrive whole and in order, after what was sent before them. A
    peer that ends, is stopped, or cannot be reached any more is noticed, also by a process that
    waits for something else: at once if its process ended, after ``NETWORK_MS`` and a second if the
    network is gone (which the kernel sees, however busy the processes are), after ``SILENCE_MS``
    and a second if its process is stopped; what it sent has been received by then.
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
from sipipe.ipc.secret import private_keys, read_secret
from sipipe.ipc.tcp import deafen, listen, what_was_seen

HEARTBEAT_MS = 1000
SILENCE_MS = 10_000
NETWORK_MS = 4000
"""For which nothing that was sent is acknowledged by the peer's kernel."""
HANDSHAKE_MS = 3000
_LINGER_MS = 1000
_RETRY_SECONDS = 0.2
_REFUSALS = 3
"""Once may be a peer that is just ending."""
_NEVER_MS = 24 * 3600 * 1000
_USER = "sipipe"
_STRANGE = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
_REFUSED = _STRANGE | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
_OPENED = zmq.EVENT_ACCEPTED | zmq.EVENT_CONNECTED
_FAILED = _REFUSED | zmq.EVENT_CONNECT_RETRIED | zmq.EVENT_DISCONNECTED
_EVENTS = _OPENED | _FAILED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_MONITOR_STOPPED


def _curve(listens: bool) -> dict[int, int | bytes]:
    """ZeroMQ's options for who has the secret."""
    listener, connector = private_keys(read_secret())
    if listens:
        return {zmq.CURVE_SERVER: 1, zmq.CURVE_SECRETKEY: listener}
    return {
        zmq.CURVE_SERVERKEY: zmq.curve_public(listener),
        zmq.CURVE_PUBLICKEY: zmq.curve_public(connector),
        zmq.CURVE_SECRETKEY: connector,
    }


def _plain(token: str, listens: bool) -> dict[int, int | bytes]:
    """ZeroMQ's options for who has ``token``."""
    if listens:
        return {zmq.PLAIN_SERVER: 1}
    return {zmq.PLAIN_USERNAME: _USER.encode(), zmq.PLAIN_PASSWORD: token.encode()}


class Connection:
    """One end. The listening one takes one peer.

    Args:
        address: the listening host's, which is all that is bound.
        who: the peer, for messages.
        token: instead of the secret, and of encryption: a word that the ends know by an encrypted
            connection, and that lets one peer in, which is there before others can read it.
        lost: told by the connection's thread, once, when the peer that was met is gone.

    Raises ConfigError: no secret; an address that is not this host's; a port that is taken.
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
        """Whether somebody without the secret was there, or we were not let in."""
        self.lost = lost
        self._seen = ""
        self._met = self._gone = self._closed = False
        # The kernel's view of the connection, which ZeroMQ closes before it says so. It does not say
        # either by which one the peer came: a stranger who was there too is thrown out within the
        # handshake's bound, and then it is the last.
        self._peers: dict[int, socket.socket] = {}
        self._turn = threading.Lock()  # wait: held for moments; nobody waits under it
        options: dict[int, int | bytes] = {
            zmq.IPV6: ":" in address,
            zmq.LINGER: _LINGER_MS,
            zmq.HEARTBEAT_IVL: HEARTBEAT_MS,
            zmq.HEARTBEAT_TIMEOUT: SILENCE_MS,
            zmq.HEARTBEAT_TTL: SILENCE_MS,
            zmq.TCP_MAXRT: NETWORK_MS,
            zmq.CONNECT_TIMEOUT: HANDSHAKE_MS,
            zmq.HANDSHAKE_IVL: HANDSHAKE_MS,
            zmq.RECONNECT_IVL: _NEVER_MS,
            zmq.MAXMSGSIZE: frames.MOST_BYTES,
        }
        self._options = options | (_plain(token, listens) if token else _curve(listens))
        self._where = f"tcp://[{address}]:{port}" if ":" in address else f"tcp://{address}:{port}"
        self._listener = listen(address, port) if listens else None
        self._context = zmq.Context()
        # Of the monitor too: with a full queue ZeroMQ's thread would wait for room in it.
        self._context.setsockopt(zmq.SNDHWM, 0)
        self._context.setsockopt(zmq.RCVHWM, 0)
        self._door: ThreadAuthenticator | None = None
        if token and listens:
            self._door = ThreadAuthenticator(self._context)
            self._door.start()
            self._door.configure_plain("*", {_USER: token})
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poll = select.poll()
        self._poll.register(self._wake, select.POLLIN)
        self._closing = threading.Event()
        self._attempts = 0
        self._open()
        self._thread = threading.Thread(target=self._watch, name="SiPipeConnection", daemon=True)
        self._thread.start()

    def wait_for_peer(self, timeout: float) -> bool:
        """Whether the peer was there within ``timeout`` seconds, or :attr:`refused` meanwhile."""
        deadline = time.monotonic() + timeout
        while True:
            left = deadline - time.monotonic()
            if self._met or self.refused or left <= 0:
                return self._met
            self._sleep(left)

    def send(self, *parts: bytes | memoryview) -> None:
        """Send one message; on return it is copied. Raises PeerDiedError: the peer is not there."""
        with self._turn:
            if self._closed or self._gone or not self._met:
                raise self.died()
            self._give(parts)

    def receive(self, timeout: float | None, place: Place | None = None) -> list[bytes] | None:
        """The parts of the next message, or None when ``timeout`` seconds passed, if it is one.
        With ``place``, the parts behind the first go where it says, and are not returned. Raises
        TransferMismatchError: a part has another size than its place. PeerDiedError: the peer is
        gone, and everything that it sent has been received."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            gone = self._gone  # before the look for a message: all that was sent is there by then
            with self._turn:
                if self._closed:
                    raise self.died()
                with suppress(zmq.Again):
                    if self._met:  # before, who receives could not answer
                        if (parts := frames.receive(self._socket, place)) is None:
                            raise TransferMismatchError(
                                f"{self.who} sent another size than it announced"
                            )
                        return parts
            if gone:
                raise self.died()
            left = None if deadline is None else deadline - time.monotonic()
            if not self._gone:
                if left is not None and left <= 0:
                    return None
                self._sleep(left)

    def died(self) -> PeerDiedError:
        """What to raise when the peer is gone without a goodbye."""
        seen = f" ({self._seen})" if self._seen else ""
        return PeerDiedError(f"{self.who} died or cannot be reached{seen}; its own log says more")

    def interrupt(self, goodbye: bytes = b"") -> None:
        """Send ``goodbye``, if there is one, and end a ``receive`` that waits."""
        if goodbye:
            with suppress(PeerDiedError):
                self.send(goodbye)
        self._gone = True
        self._rouse()

    def close(self) -> None:
        """What was sent goes out, within a second. Idempotent; nobody receives any more."""
        with self._turn:
            if self._closed:
                return
            self._closed = self._gone = True
            self._closing.set()
            self._socket.disable_monitor()
        self._thread.join()  # wait: none; it hears that its monitor has stopped
        for peer in self._peers.values():
            peer.close()
        if not self._met or self._seen:  # nobody is there to take what was sent
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
        # wait: the caller's or none; news, the peer's death or 10 s of silence, `interrupt`
        for descriptor, _ in self._poll.poll(None if seconds is None else min(seconds * 1e3, 1e9)):
            if descriptor == self._wake:
                with suppress(BlockingIOError):
                    os.eventfd_read(self._wake)

    # ---- whoever has its turn -------------------------------------------------------------------

    def _give(self, parts: Sequence[bytes | memoryview]) -> None:
        try:
            frames.send(self._socket, parts)  # wait: none: it is queued
        except zmq.ZMQError:
            raise self.died() from None
        if int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            self._rouse()

    def _rouse(self) -> None:
        with suppress(OSError):  # closed
            os.eventfd_write(self._wake, 1)

    def _open(self) -> None:
        """Bind, or begin an attempt to connect: ZeroMQ itself would make another one at any time."""
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
        try:
            self._follow()
        except Exception as error:  # of ours: without this thread the peer's end would not be seen
            self._bury(repr(error))
            for _ in self._news():  # ZeroMQ would wait for somebody to hear that it stops
                pass

    def _follow(self) -> None:
        """Until this end is closed."""
        opened: dict[int, float] = {}
        """Descriptors until the peer is met, and since when."""
        refusals = 0
        for event, value in self._news():
            if self._met:
                if event == zmq.EVENT_DISCONNECTED and value in self._peers:
                    seen = "it closed the connection"
                    with self._peers.pop(value) as peer, suppress(OSError):  # no TCP connection
                        seen = what_was_seen(peer, HEARTBEAT_MS / 1e3)
                    if not self._peers:
                        self._bury(seen)
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
                quick = any(now - since < HANDSHAKE_MS / 1e3 for since in opened.values())
                opened.clear()
                if event & _REFUSED and quick:  # else it has not answered in time
                    refusals += 1
                    self._refuse()
                if refusals == _REFUSALS:
                    self._bury(f"it refused the handshake {refusals} times")
                else:
                    self._try_again()

    def _news(self) -> Iterator[tuple[int, int]]:
        while True:
            # wait: none; what ZeroMQ says next, `close`
            news = recv_monitor_message(self._monitor)
            if news["event"] == zmq.EVENT_MONITOR_STOPPED:
                self._monitor.close()
                return
            yield news["event"], news["value"]

    def _refuse(self) -> None:
        self.refused = True
        self._rouse()

    def _try_again(self) -> None:
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
        for descriptor in opened:
            with suppress(OSError):  # closed already
                self._peers[descriptor] = socket.socket(fileno=os.dup(descriptor))
        if self._listener is not None:
            deafen(self._listener)
        with self._turn:
            if not self._closed:
                self._met = True
                self._poll.register(self._socket.FD, select.POLLIN)
        self._rouse()
        if not self._peers:
            self._bury("it closed the connection")

    def _bury(self, seen: str) -> None:
        self._seen = seen
        told = self._gone
        self._gone = True
        self._rouse()
        if not told:
            self.lost(self.died())

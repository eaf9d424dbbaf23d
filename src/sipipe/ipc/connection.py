"""One connection between two processes of different hosts: authenticated, watched and, unless it is
told otherwise, encrypted.

Who runs here
    One thread at a time receives; any thread sends, interrupts or closes. ZeroMQ's own thread
    does the network, so that sending never waits and what comes lies ready in memory.
Guarantees
    The peer has the same secret (:mod:`sipipe.ipc.secret`), or this connection's own ``token``, or
    nothing is exchanged. Messages arrive whole and in order. A peer that ends, is stopped, or cannot be reached any more is
    noticed within ``TIMEOUT_MS`` and a second, also by a process that only waits, and after all
    that it sent has been received. A connection that was lost is not made again.
Relies on
    ZeroMQ sockets may be used by several threads that take turns: ``_turn`` is held around every
    call. The descriptor of such a socket wakes once for news, and a send may take the news in:
    whoever sends looks, and wakes the receiver.
    What is queued is bounded by who uses this: a link has ``depth`` frames on their way, BIC-I as
    many iterations as are in flight.

Rejected: a ROUTER for all hosts on one port (its events name no peer, so that a lost one would
have to be found by asking all); a second socket for sending (two connections to one peer may die
one after the other).
"""

import os
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils.monitor import recv_monitor_message

from sipipe.errors import ConfigError
from sipipe.ipc.link.errors import PeerDiedError, TransferMismatchError
from sipipe.ipc.secret import key_pairs, read_secret

OTHER_PORT = (
    "choose another --master-port, or an address of this host (--master-addr on the head, "
    "VLLM_HOST_IP on others)"
)
HEARTBEAT_MS, TIMEOUT_MS = 1000, 3000
_LINGER_MS = 1000
_USER = "sipipe"
_REFUSED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_OPENED = zmq.EVENT_ACCEPTED | zmq.EVENT_CONNECTED
_EVENTS = _OPENED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | _REFUSED

Place = Callable[[bytes], Sequence[memoryview]]
"""Where the parts behind a message's first one go, each with its exact size."""


def resolve(host: str, option: str) -> str:
    """The address of ``host``. Raises ConfigError, which names ``option``."""
    try:
        # wait: the resolver's (30 s on most systems); its answer
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise ConfigError(f"{option} {host}: no such host ({error.strerror})") from None


def check_port(address: str, port: int, mend: str) -> None:
    """Refuse a port of this host that cannot be listened on; ``address`` "" stands for any.

    Raises:
        ConfigError: it is taken, or the address is not this host's; ``mend`` says what to do.
    """
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError as error:
            raise _unusable(address, port, error.errno, mend) from None


def _unusable(address: str, port: int, errno: int | None, mend: str) -> ConfigError:
    where, why = f"port {port}{' of ' if address else ''}{address}", os.strerror(errno or 0)
    return ConfigError(f"{where} cannot be listened on ({why}): {mend}")


def _curve(listens: bool) -> dict[int, int | bytes]:
    """ZeroMQ's options for who has the secret."""
    ours, theirs = key_pairs(read_secret())
    if listens:
        return {zmq.CURVE_SERVER: 1, zmq.CURVE_SECRETKEY: ours.private}
    return {
        zmq.CURVE_SERVERKEY: ours.public,
        zmq.CURVE_PUBLICKEY: theirs.public,
        zmq.CURVE_SECRETKEY: theirs.private,
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
            connection, and that lets one peer in. It is readable in the network, too late for
            others: the peer that it belongs to is in by then.

    Raises:
        ConfigError: no secret; an address that is not this host's; a port that is taken.
    """

    def __init__(
        self, address: str, port: int, *, listens: bool, who: str, token: str = ""
    ) -> None:
        self._who = who
        # wait: held for moments; nobody waits under it but `close`, for a second
        self._turn = threading.Lock()
        # Descriptors until the peer is met. ZeroMQ does not say which one it came by: a stranger
        # who was there too is thrown out within the handshake's bound, and then it is the last.
        self._open: set[int] = set()
        self._met = False
        self.refused = False
        """Whether somebody without the secret was there, or we were not let in."""
        self._gone = self._closed = False
        self._context = zmq.Context()
        self._door: ThreadAuthenticator | None = None
        self._socket = self._context.socket(zmq.PAIR)
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        options: dict[int, int | bytes] = {
            zmq.IPV6: ":" in address,
            zmq.SNDHWM: 0,
            zmq.RCVHWM: 0,
            zmq.LINGER: _LINGER_MS,
            zmq.HEARTBEAT_IVL: HEARTBEAT_MS,
            zmq.HEARTBEAT_TIMEOUT: TIMEOUT_MS,
            zmq.HEARTBEAT_TTL: TIMEOUT_MS,
            zmq.CONNECT_TIMEOUT: TIMEOUT_MS,
            zmq.HANDSHAKE_IVL: TIMEOUT_MS,
        }
        options |= _plain(token, listens) if token else _curve(listens)
        if token and listens:
            self._door = ThreadAuthenticator(self._context)
            self._door.start()
            self._door.configure_plain("*", {_USER: token})
        for option, value in options.items():
            self._socket.setsockopt(option, value)
        self._monitor = self._socket.get_monitor_socket(_EVENTS)
        self._poll = select.poll()
        for descriptor in (self._socket.FD, self._monitor.FD, self._wake):
            self._poll.register(descriptor, select.POLLIN)
        where = f"tcp://[{address}]:{port}" if ":" in address else f"tcp://{address}:{port}"
        try:
            (self._socket.bind if listens else self._socket.connect)(where)
        except zmq.ZMQError as error:
            self.close()
            raise _unusable(address, port, error.errno, OTHER_PORT) from None

    def wait_for_peer(self, timeout: float) -> bool:
        """Whether the peer was there within ``timeout`` seconds, or :attr:`refused` meanwhile."""
        deadline = time.monotonic() + timeout
        while True:
            self._look()
            left = deadline - time.monotonic()
            if self._met or self.refused or left <= 0:
                return self._met
            self._sleep(left)

    def send(self, *parts: bytes | memoryview) -> None:
        """Send one message; it has been copied on return.

        Raises:
            PeerDiedError: the peer is gone or, at the listening end, was never there.
        """
        with self._turn:
            if self._closed or self._gone:
                raise self.died()
            try:
                self._socket.send_multipart(parts, zmq.NOBLOCK)
            except zmq.ZMQError:
                raise self.died() from None
            if int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                os.eventfd_write(self._wake, 1)

    def receive(self, timeout: float | None, place: Place | None = None) -> list[bytes] | None:
        """The parts of the next message, or None when ``timeout`` seconds passed, if it is one.

        With ``place``, the parts behind the first go where it says, and are not returned.

        Raises:
            TransferMismatchError: a part has another size than its place.
            PeerDiedError: the peer is gone, and everything that it sent has been received.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            gone = self._gone  # before the look for a message: all that was sent is there by then
            with self._turn:
                if self._closed:
                    raise self.died()
                with suppress(zmq.Again):
                    return self._take(place)
            if gone:
                raise self.died()
            self._look()
            left = None if deadline is None else deadline - time.monotonic()
            if not self._gone:
                if left is not None and left <= 0:
                    return None
                self._sleep(left)

    def died(self) -> PeerDiedError:
        """What to raise when the peer is gone without a goodbye."""
        return PeerDiedError(f"{self._who} died or cannot be reached; its own log says more")

    def interrupt(self, goodbye: bytes = b"") -> None:
        """Send ``goodbye``, if there is one, and end a ``receive`` that waits."""
        if goodbye:
            with suppress(PeerDiedError):
                self.send(goodbye)
        self._gone = True
        with suppress(OSError):
            os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """What was sent goes out, within a second. Idempotent; nobody receives any more."""
        with self._turn:
            if self._closed:
                return
            self._closed = self._gone = True
            self._look()
            if self._met and not self._open:  # nobody is there to take what was sent
                self._socket.setsockopt(zmq.LINGER, 0)
            self._socket.disable_monitor()
            self._monitor.close()
            self._socket.close()
            if self._door is not None:
                self._door.stop()
            self._context.term()  # wait: 1 s (`_LINGER_MS`); what was sent has gone out
            os.close(self._wake)

    # ---- the receiving thread -------------------------------------------------------------------

    def _take(self, place: Place | None) -> list[bytes]:
        parts = [self._socket.recv(zmq.NOBLOCK)]
        targets = place(parts[0]) if place is not None else []
        came: list[int] = []
        while self._socket.getsockopt(zmq.RCVMORE):
            if len(came) < len(targets):
                # wait: none: messages come whole
                came.append(self._socket.recv_into(targets[len(came)]))
            else:
                parts.append(self._socket.recv())  # wait: none: messages come whole
        if came != [len(target) for target in targets]:
            raise TransferMismatchError(f"{self._who} sent another size than it announced")
        return parts

    def _look(self) -> None:
        """Take in what ZeroMQ says of the connection."""
        with suppress(zmq.Again):
            while True:
                news = recv_monitor_message(self._monitor, zmq.NOBLOCK)
                event = news["event"]
                if event & _OPENED and not self._met:
                    self._open.add(news["value"])
                elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                    self._met = True
                elif event & _REFUSED and not self._met:
                    self.refused = True
                elif event == zmq.EVENT_DISCONNECTED:
                    self._open.discard(news["value"])
                    self._gone = self._gone or (self._met and not self._open)

    def _sleep(self, seconds: float | None) -> None:
        # wait: the caller's or none; news, the peer's death or silence (3 s, `TIMEOUT_MS`),
        # `interrupt`
        for descriptor, _ in self._poll.poll(None if seconds is None else seconds * 1e3):
            if descriptor == self._wake:
                with suppress(BlockingIOError):
                    os.eventfd_read(self._wake)

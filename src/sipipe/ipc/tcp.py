"""TCP below a ZeroMQ connection: addresses, listening sockets, and how a peer was lost."""

import ctypes
import errno
import ipaddress
import queue
import re
import socket
import struct
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

from sipipe.errors import ConfigError, ResourceError, tell

OTHER_PORT = (
    "choose another --master-port, or an address of this host (--master-addr on the main host, "
    "VLLM_HOST_IP on others)"
)
_SO_ATTACH_FILTER = 26  # of <asm/socket.h>; Python's module has no name for it
_INSTRUCTION = struct.Struct("HBBI")  # of classic BPF: code, jumps if true and if false, operand
_TCP_INFO = struct.Struct("=B23xI24xII84xI")  # the fields of _TcpInfo, in `struct tcp_info`
_TCP_RTO_MAX_MS = 44  # of <linux/tcp.h>, 6.15 and later; Python's module has no name for it
_RETRANSMISSION_MS = 1000
"""Milliseconds after which what is unacknowledged is sent again, at most: the least that Linux takes. Its
own pauses double, so that a network which comes back after 3.1 s is tried again after 6.2 s only."""
_RETURN = 6
_LOAD_WORD = 0x20
_JUMP_IF_EQUAL = 0x15
_NETWORK_HEADER = 0xFFF00000  # SKF_NET_OFF: operands from here on count from the IP header
_SOURCE_V4 = 12
_SOURCE_V6 = 8
_ALL_BYTES = 0xFFFFFFFF
_CLOSED = 7  # TCP's state CLOSE
_CLOSED_BY_PEER = (8, 9)  # TCP's states CLOSE_WAIT and LAST_ACK

SAID_SECONDS = 10.0
"""Seconds after which a host says again what it waits for."""
_RETRY_SECONDS = 1.0
"""Seconds between two questions for a name."""
_NO_NAME = re.compile(r"[\s/:@]|^[0-9.]*$|^[-.]|\.\.")
"""Words that can be no host's name: what is no address although it looks like one, and nothing."""


def address_of(host: str, option: str, seconds: float, *, own: bool = False) -> str:
    """The address of ``host``. A name may come to be while this waits, as a pod's does in Kubernetes
    after the pod. Every 10 s a line says what is waited for.

    Args:
        host: an address, or a name.
        option: the option that names it, for messages.
        seconds: bound of the wait.
        own: the address has to be this host's. For a while a name may still mean an earlier one.

    Raises ConfigError: ``host`` can never be an address. ResourceError: it had none in time; the next
    try may find it."""
    literal = _literal(host)
    if literal is not None:
        if literal.is_unspecified or literal.is_multicast or host == "255.255.255.255":
            raise ConfigError(
                f"{option} {host}: that is no host's own address: give the one by which the other "
                "hosts reach it"
            )
        try:
            return _look_up(host)  # no resolver is asked for an address
        except OSError as error:
            raise ConfigError(f"{option} {host}: no such address ({error})") from None
    if _NO_NAME.search(host) or not host.isascii() or max(map(len, host.split("."))) > 63:
        raise ConfigError(f"{option} {host!r} is neither a host's name nor an address")
    return _wait_for_name(host, option, seconds, own)


def _literal(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The address that ``host`` is; None: it is no address, but perhaps a name."""
    try:
        return ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None


def _wait_for_name(host: str, option: str, seconds: float, own: bool) -> str:
    """The address of the name ``host``, as soon as there is one; as :func:`address_of`."""
    answers: queue.SimpleQueue[str | OSError] = queue.SimpleQueue()

    def look_up() -> None:
        try:
            answers.put(_look_up(host))
        except OSError as error:
            answers.put(error)
        except UnicodeError as error:  # a name that no resolver is asked for
            answers.put(OSError(0, str(error)))

    began = time.monotonic()
    told_at = began
    looking = False
    reason = "no answer from the resolver yet"
    while True:
        now = time.monotonic()
        if now - began >= seconds:
            raise ResourceError(
                f"{option} {host}: {reason}, after {seconds:g} s. Is the name right, and the host "
                'known to DNS or /etc/hosts? Raise "start_timeout" in the sipipe config if it '
                "comes later"
            )
        if now - told_at >= SAID_SECONDS:
            told_at = now
            tell(f"waits for {option} {host}, {now - began:.0f} s by now: {reason}")
        if not looking:
            looking = True
            # A thread, because the resolver may take half a minute, in which nothing would be said.
            threading.Thread(target=look_up, name="SiPipeName", daemon=True).start()
        answer: str | OSError | None = None
        with suppress(queue.Empty):
            # wait: 10 s (`SAID_SECONDS`), then it says so, up to `start_timeout`; the resolver
            answer = answers.get(timeout=min(SAID_SECONDS, seconds))
        if answer is None:
            continue
        looking = False
        if isinstance(answer, OSError):
            reason = f"no such host ({answer.strerror})"
        elif own and not is_here(answer):
            reason = f"it is {answer}, which is not an address of this host"
        else:
            return answer
        # wait: 1 s, up to `start_timeout`; the name
        time.sleep(min(_RETRY_SECONDS, seconds))


def _look_up(host: str) -> str:
    """The first address of ``host``. Raises OSError: it has none."""
    # wait: the resolver's (30 s on most systems); its answer
    return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])


def is_here(address: str) -> bool:
    """True if ``address`` is one of this host's. No other can be listened on."""
    with socket.socket(_family(address), socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError as error:
            return error.errno != errno.EADDRNOTAVAIL
    return True


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def listen(address: str, port: int, mend: str = OTHER_PORT) -> socket.socket:
    """A socket that listens on ``port`` of ``address``, or of any address if that is empty. Raises
    ConfigError: the port is taken, or the address is not this host's; ``mend`` says what to do."""
    if not 0 <= port < 1 << 16:
        raise ConfigError(f"port {port} is none of 1 to 65535: {mend}")
    listener = socket.socket(_family(address))
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setblocking(False)
        listener.bind((address, port))
        listener.listen()
    except (OSError, UnicodeError, TypeError) as error:  # the last two: it can be no host's name
        listener.close()
        place = f"port {port} of {address}" if address else f"port {port}"
        reason = error.strerror if isinstance(error, OSError) else "no host's name"
        raise ConfigError(f"{place} cannot be listened on ({reason}): {mend}") from None
    return listener


def check_port(address: str, port: int, mend: str) -> None:
    """Raise as :func:`listen` would, but listen on nothing."""
    listen(address, port, mend).close()


def deafen(listener: socket.socket) -> None:
    """Have the kernel drop whatever comes to ``listener`` from now on. Connections that it has accepted
    stay, which ZeroMQ would close with it. On a kernel without filters strangers still get as far as
    the handshake."""
    with suppress(OSError):
        _filter(listener, [(_RETURN, 0, 0, 0)])


def admit_only(listener: socket.socket, address: str) -> None:
    """Have the kernel drop whatever comes to ``listener`` from now on, but from ``address``; also from
    there if that is empty. Raises OSError: this kernel has no filters."""
    if not address:
        _filter(listener, [(_RETURN, 0, 0, 0)])
        return
    parsed = ipaddress.ip_address(address)
    start = _SOURCE_V4 if parsed.version == 4 else _SOURCE_V6
    words = struct.unpack(f"!{len(parsed.packed) // 4}I", parsed.packed)
    program = []
    for number, word in enumerate(words):
        last = 2 * (len(words) - number) - 1  # jumps count from the instruction behind
        program += [
            (_LOAD_WORD, 0, 0, _NETWORK_HEADER + start + 4 * number),
            (_JUMP_IF_EQUAL, 0, last, word),
        ]
    _filter(listener, [*program, (_RETURN, 0, 0, _ALL_BYTES), (_RETURN, 0, 0, 0)])


def _filter(listener: socket.socket, program: Sequence[tuple[int, int, int, int]]) -> None:
    """Attach a classic BPF program to a socket, in the place of the one that it has. Raises OSError."""
    instructions = b"".join(_INSTRUCTION.pack(*instruction) for instruction in program)
    code = ctypes.create_string_buffer(instructions, len(instructions))
    attached = struct.pack("HL", len(program), ctypes.addressof(code))
    listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, attached)


class _TcpInfo(NamedTuple):
    """Some fields of a socket in the kernel, by ``struct tcp_info``."""

    state: int
    """State of TCP, such as :data:`_CLOSED`."""
    sent: int
    """Segments that are on their way, and not acknowledged."""
    data_ms: int
    """Milliseconds since data came."""
    acknowledged_ms: int
    """Milliseconds since an acknowledgement came."""
    unsent: int
    """Bytes that have not left this host; 0 on kernels before 4.6, which do not say it."""


def _tcp_info(connection: socket.socket) -> _TcpInfo:
    """Ask the kernel about a socket. Raises OSError: it is no TCP connection any more."""
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
    return _TcpInfo(*_TCP_INFO.unpack(info.ljust(_TCP_INFO.size, b"\0")))


def waiting_connections(listener: socket.socket) -> int:
    """Connections to ``listener`` that nobody has accepted."""
    return _tcp_info(listener).sent  # of a listening socket, the queue's length


class Unacknowledged:
    """A connection, and how long the peer's machine has acknowledged nothing of what was sent.

    It has to be looked at again and again. A look that comes late, as on a busy machine, counts nothing
    for the time before it: the kernel says when the last acknowledgement came.

    Rejected: ``TCP_USER_TIMEOUT`` (ZeroMQ's ``TCP_MAXRT``). Where a segment cannot leave this host, as
    while a cable is out, Linux (6.18) notes the time, and does not always forget it when the segment has
    gone. The next such moment, hours later, then counts from the first one, and ends the connection at
    once.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        with suppress(OSError):  # an older kernel, or the connection has ended
            connection.setsockopt(socket.IPPROTO_TCP, _TCP_RTO_MAX_MS, _RETRANSMISSION_MS)
        self._since: float | None = None
        """Time of the first of the looks in a row that found nothing new acknowledged; None: the last
        look found nothing that is to be acknowledged."""

    def seconds(self) -> float:
        """Look, and return the seconds. Raises OSError: it is no TCP connection any more."""
        info = _tcp_info(self.connection)
        now = time.monotonic()
        if not info.sent and not info.unsent:
            self._since = None
            return 0.0
        if self._since is None or now - info.acknowledged_ms / 1e3 > self._since:
            self._since = now
        return now - self._since

    def abort(self) -> None:
        """End the connection, and forget what was sent. Raises OSError: it has ended."""
        never_lingers = struct.pack("ii", 1, 0)
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, never_lingers)
        self.connection.shutdown(socket.SHUT_RDWR)


def what_was_seen(connection: socket.socket, heartbeat: float) -> str:
    """The way in which ``connection`` ended, as a clause. Something came on it every ``heartbeat``
    seconds while it lived."""
    info = _tcp_info(connection)
    if info.state in _CLOSED_BY_PEER:
        return "it closed the connection"
    bound_ms = 2e3 * heartbeat
    if info.data_ms < bound_ms:
        return "it reset the connection" if info.state == _CLOSED else "it broke the protocol"
    silence = f"it was silent for {info.data_ms / 1e3:.1f} s"
    if info.acknowledged_ms < bound_ms:
        return f"{silence}, while its machine answered"
    return silence

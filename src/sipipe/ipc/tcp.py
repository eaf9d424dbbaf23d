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
from contextlib import suppress

from sipipe.errors import ConfigError, ResourceError, tell

OTHER_PORT = (
    "choose another --master-port, or an address of this host (--master-addr on the main host, "
    "VLLM_HOST_IP on others)"
)
_SO_ATTACH_FILTER = 26
_DROP_ALL = struct.pack("HBBI", 6, 0, 0, 0)  # BPF: return 0
# TCP's states CLOSE, CLOSE_WAIT and LAST_ACK
_CLOSED = 7
_CLOSED_BY_PEER = (8, 9)


SAID_SECONDS = 10.0
"""After which a host says again what it waits for."""
_RETRY_SECONDS = 1.0


def address_of(host: str, option: str, seconds: float, *, own: bool = False) -> str:
    """The address of ``host``, which may be a name that comes to be within ``seconds``, as a pod's
    does in Kubernetes after the pod; what is waited for is said every 10 s. ``own``: it has to be an
    address of this host; what a name means may be that of an earlier one for a while.

    Raises ConfigError, which names ``option``: it can never be one. ResourceError: it was none in
    time; the next try may find it."""
    try:
        ipaddress.ip_address(host.partition("%")[0])
        return _look_up(host)  # which asks nobody
    except OSError as error:
        raise ConfigError(f"{option} {host}: no such address ({error})") from None
    except ValueError:
        pass
    if _NO_NAME.search(host) or not host.isascii() or max(map(len, host.split("."))) > 63:
        raise ConfigError(f"{option} {host!r} is neither a host's name nor an address")
    return _wait_for_name(host, option, seconds, own)


_NO_NAME = re.compile(r"[\s/:@]|^[0-9.]*$|^-|\.\.")
"""What no name of a host has: addresses that are none too, and nothing at all."""


def _wait_for_name(host: str, option: str, seconds: float, own: bool) -> str:
    found: queue.SimpleQueue[str | OSError] = queue.SimpleQueue()

    def look_up() -> None:
        try:
            found.put(_look_up(host))
        except OSError as error:
            found.put(error)

    began = time.monotonic()
    said = began
    looking = False
    why = "no answer from the resolver yet"
    while True:
        now = time.monotonic()
        if now - began >= seconds:
            raise ResourceError(
                f"{option} {host}: {why}, after {seconds:g} s. Is the name right, and the host "
                'known to DNS or /etc/hosts? Raise "start_timeout" in the sipipe config if it '
                "comes later"
            )
        if now - said >= SAID_SECONDS:
            said = now
            tell(f"waits for {option} {host}, {now - began:.0f} s by now: {why}")
        if not looking:
            looking = True
            # A thread, because the resolver may take half a minute, in which nothing would be said.
            threading.Thread(target=look_up, name="SiPipeName", daemon=True).start()
        answer: str | OSError | None = None
        with suppress(queue.Empty):
            # wait: 10 s (`SAID_SECONDS`), then it says so, up to `start_timeout`; the resolver
            answer = found.get(timeout=min(SAID_SECONDS, seconds))
        if answer is None:
            continue
        looking = False
        if isinstance(answer, OSError):
            why = f"no such host ({answer.strerror})"
        elif own and not is_here(answer):
            why = f"it is {answer}, which is not an address of this host"
        else:
            return answer
        # wait: 1 s, up to `start_timeout`; the name
        time.sleep(min(_RETRY_SECONDS, seconds))


def _look_up(host: str) -> str:
    # wait: the resolver's (30 s on most systems); its answer
    return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])


def is_here(address: str) -> bool:
    """Whether ``address`` is one of this host's, which alone can be listened on."""
    with socket.socket(_family(address), socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError as error:
            return error.errno != errno.EADDRNOTAVAIL
    return True


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def listen(address: str, port: int, mend: str = OTHER_PORT) -> socket.socket:
    """A socket that listens; ``address`` "" stands for any. Raises ConfigError: the port is taken,
    or the address is not this host's; ``mend`` says what to do."""
    if not 0 <= port < 1 << 16:
        raise ConfigError(f"port {port} is none of 1 to 65535: {mend}")
    listener = socket.socket(_family(address))
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setblocking(False)
        listener.bind((address, port))
        listener.listen()
    except OSError as error:
        listener.close()
        where = f"port {port}{' of ' if address else ''}{address}"
        raise ConfigError(f"{where} cannot be listened on ({error.strerror}): {mend}") from None
    return listener


def check_port(address: str, port: int, mend: str) -> None:
    """Raise what :func:`listen` does."""
    listen(address, port, mend).close()


def deafen(listener: socket.socket) -> None:
    """Have the kernel drop whatever comes to ``listener`` from now on, without touching what it has
    accepted, as ZeroMQ's close would. A kernel without filters leaves it open to handshakes."""
    code = ctypes.create_string_buffer(_DROP_ALL, len(_DROP_ALL))
    program = struct.pack("HL", 1, ctypes.addressof(code))
    with suppress(OSError):
        listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)


def what_was_seen(connection: socket.socket, heartbeat: float) -> str:
    """How a connection ended, in which something came every ``heartbeat`` seconds."""
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 60)
    state, *milliseconds = struct.unpack("=B7x36x4I", info)
    _, _, data, ack = (value / 1e3 for value in milliseconds)
    if state in _CLOSED_BY_PEER:
        return "it closed the connection"
    if data < 2 * heartbeat:
        return "it reset the connection" if state == _CLOSED else "it broke the protocol"
    silent = f"it was silent for {data:.1f} s"
    return f"{silent}, while its machine answered" if ack < 2 * heartbeat else silent

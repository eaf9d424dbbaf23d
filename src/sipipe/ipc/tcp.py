"""TCP below a ZeroMQ connection: addresses, listening sockets, and how a peer was lost."""

import ctypes
import socket
import struct
from contextlib import suppress

from sipipe.errors import ConfigError

OTHER_PORT = (
    "choose another --master-port, or an address of this host (--master-addr on the main host, "
    "VLLM_HOST_IP on others)"
)
_SO_ATTACH_FILTER = 26
_DROP_ALL = struct.pack("HBBI", 6, 0, 0, 0)  # BPF: return 0
_CLOSED, _CLOSED_BY_PEER = 7, (8, 9)  # TCP's states CLOSE, CLOSE_WAIT and LAST_ACK


def resolve(host: str, option: str) -> str:
    """The address of ``host``. Raises ConfigError, which names ``option``."""
    try:
        # wait: the resolver's (30 s on most systems); its answer
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"{option} {host}: no such host ({error})") from None


def listen(address: str, port: int, mend: str = OTHER_PORT) -> socket.socket:
    """A socket that listens; ``address`` "" stands for any. Raises ConfigError: the port is taken,
    or the address is not this host's; ``mend`` says what to do."""
    if not 0 <= port < 1 << 16:
        raise ConfigError(f"port {port} is none of 1 to 65535: {mend}")
    listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
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

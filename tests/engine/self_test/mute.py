"""``python -m tests.engine.self_test.mute HOW FD``: stands in for the process with all layers."""

import os
import socket
import sys
from multiprocessing.connection import Connection


def main() -> None:
    how, descriptor = sys.argv[1:]
    if how == "dies":
        os._exit(3)
    pipe = Connection(int(descriptor))
    pipe.recv_bytes()
    match how:
        case "refuses":
            pipe.send("ValueError: no such layer")
        case "babbles":
            pipe.send_bytes(b"\x80\x05.")
        case "stops":
            os.write(pipe.fileno(), b"\x00\x00\x10\x00half")
            wait_for_end(pipe)
        case "hangs":
            wait_for_end(pipe)


def wait_for_end(pipe: Connection) -> None:
    """Return when the engine has closed its end."""
    with socket.socket(fileno=os.dup(pipe.fileno())) as ours:
        while ours.recv(1):
            pass


if __name__ == "__main__":
    main()

"""The server process, ``python -m sipipe.engine.start.server FD JSON...``, of :mod:`sipipe.cli.supervise`.

FD is its end of a socket pair: messages to the supervisor are written to it, and the process group
ends as soon as the other end is closed.

Who runs here
    vLLM's front end, in the main thread; a thread that sleeps on FD; one that says when it serves.
Guarantees
    The process group does not outlive the supervisor. An engine that dies while it starts, which
    vLLM watches, ends the server; the supervisor says why.
"""

import gc
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from contextlib import suppress
from typing import Any

import psutil

from sipipe.engine.children.forking import importing
from sipipe.errors import EngineDiedError, SiPipeError, tell
from sipipe.ipc.lost_exit import ask_again_for_lost_exits
from sipipe.ipc.parent import end_group_with
from sipipe.start_log import shorten
from sipipe.versions import explained


def main() -> int:
    """Serve, with the arguments of :func:`sipipe.engine.start.launch.serve` in JSON."""
    supervisor = socket.socket(fileno=int(sys.argv[1]))
    os.set_inheritable(supervisor.fileno(), False)
    end_group_with(supervisor)
    ask_again_for_lost_exits()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # until vLLM or the agent takes it over
    arguments = json.loads("".join(sys.argv[2:]))  # cut, as a word has a limit
    shorten()
    # The objects of vLLM's 5,000 modules stay, and the collector would go through them again and
    # again: a quarter of the time that importing takes. Frozen, they are shared with forked processes.
    gc.disable()
    try:
        with importing(*arguments), explained():
            from sipipe.engine.start.launch import serve

        gc.freeze()
        gc.enable()
        agent = bool(arguments[2])  # its host's number
        return serve(*arguments, started=lambda args: _started(supervisor, args, agent))
    except EngineDiedError as error:
        # The supervisor says why, last of all. The interpreter's own end would wait for what vLLM's
        # start has left behind.
        os._exit(error.status)
    except SiPipeError as error:
        tell(error)
        return error.status
    except KeyboardInterrupt:
        return 130
    except Exception:
        traceback.print_exc()
        os._exit(1)


def _started(supervisor: socket.socket, args: Any, agent: bool) -> None:
    """Tell the supervisor, once all checks have passed, how long a shutdown may take; a thread then
    says when the server serves."""
    # wait: none: a line; the supervisor, whose death ends this process
    supervisor.sendall(f"{args.shutdown_timeout}\n".encode())
    # Of --port 0 the kernel makes another one, which vLLM says.
    if args.uds or agent or not args.port:
        return
    # Looked up here, not in the thread: a process forked amid a look-up has its lock for ever.
    loopback = {None: "127.0.0.1", "": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}
    host = loopback.get(args.host, args.host)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET  # as vLLM listens
    # wait: the resolver's own time, as when the port was checked; its answer
    addresses = socket.getaddrinfo(host, args.port, family, socket.SOCK_STREAM)
    threading.Thread(
        target=_say_served, args=(args, addresses[0]), name="SiPipeStart", daemon=True
    ).start()


def _say_served(args: Any, address: Any) -> None:
    """Say what is served, and where, once the server listens.

    Args:
        args: vLLM's arguments.
        address: One of :func:`socket.getaddrinfo`.
    """
    host = "localhost" if args.host in (None, "", "0.0.0.0", "::") else args.host
    while True:
        # wait: 0.1 s, again and again; the server's port, or the end of this process
        time.sleep(0.1)
        with suppress(OSError), socket.socket(address[0]) as probe:
            probe.settimeout(1.0)
            probe.connect(address[-1])
            scheme = "https" if args.ssl_certfile else "http"
            place = f"[{host}]" if ":" in host else host
            url = f"{scheme}://{place}:{args.port}/v1"
            name = (args.served_model_name or [args.model])[0]
            seconds = time.time() - psutil.Process().create_time()
            tell(
                f"{name} is served at {url}, {seconds:.0f} s after the start; "
                f"try: vllm complete --url {url}"
            )
            return


if __name__ == "__main__":
    sys.exit(main())

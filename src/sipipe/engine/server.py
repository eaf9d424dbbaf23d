"""``python -m sipipe.engine.server FD JSON``: the server that :mod:`sipipe.cli.supervise` starts.

FD is its end of a socket pair: what the supervisor has to know is written to it, and the process
group ends as soon as the other end is closed.

Who runs here
    vLLM's front end, in the main thread; a thread that sleeps on FD; a thread that watches the
    engine process while it starts, and says when it serves.
Guarantees
    The process group does not outlive the supervisor. An engine that dies while it starts ends the
    server, with a line that says so.
Relies on
    vLLM watches the engine itself from the moment on that its client's thread
    :data:`VLLMS_WATCH` runs, and from the first moment where it has several API servers.
"""

import gc
import json
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
import traceback
from contextlib import suppress
from multiprocessing.connection import wait
from typing import Any

import psutil

from sipipe.engine.forking import importing
from sipipe.errors import SiPipeError, tell
from sipipe.ipc.parent import end_group_with

VLLMS_WATCH = "MPClientEngineMonitor"
LAST_WORDS = 3.0
"""Seconds for vLLM to say itself that its engine is gone."""


def main() -> int:
    """Serve, with the arguments of :func:`sipipe.engine.launch.serve` in JSON."""
    supervisor = socket.socket(fileno=int(sys.argv[1]))
    os.set_inheritable(supervisor.fileno(), False)
    end_group_with(supervisor)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # until vLLM or the agent takes it over
    arguments = json.loads(sys.argv[2])
    # What vLLM's 5,000 modules make stays, and the collector would go through it again and again: a
    # quarter of the time that importing takes. Frozen, it is shared with what is forked.
    gc.disable()
    try:
        with importing(*arguments):
            from sipipe.engine.launch import serve

        gc.freeze()
        gc.enable()
        return serve(*arguments, started=lambda args: _started(supervisor, args))
    except SiPipeError as error:
        tell(error)
        return error.status
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        # vLLM's start failed. The interpreter's own end would wait for what that left behind.
        if "See root cause above" not in str(error):
            traceback.print_exc()
        os._exit(1)


def _started(supervisor: socket.socket, args: Any) -> None:
    """All checks have passed: tell how long a shutdown may take, and watch the engine's start."""
    from vllm import envs

    # wait: none: a line; the supervisor, whose death ends this process
    supervisor.sendall(f"{args.shutdown_timeout}\n".encode())
    one = (1, None) if args.data_parallel_size == 1 else (1,)  # vLLM's default is one for each
    if args.api_server_count in one and not envs.VLLM_USE_RUST_FRONTEND:
        watch = threading.Thread(target=_watch_start, args=(args,), name="SiPipeStart", daemon=True)
        watch.start()


def _watch_start(args: Any) -> None:
    """End the command if the engine dies before vLLM's client watches it; then say what is served.

    The client waits for an engine's first message without looking whether the engine lives. It
    watches once all engines have answered, and then this thread ends.
    """
    seen: dict[int, Any] = {}
    while not any(thread.name == VLLMS_WATCH for thread in threading.enumerate()):
        children = multiprocessing.active_children()
        seen |= {c.sentinel: c for c in children if c.name.startswith("EngineCore")}
        # A tenth of a second: children that start later have to be found.
        # wait: 0.1 s, again and again while the engine starts; the engine's death, or vLLM's own
        # watch, which takes over
        for sentinel in wait(list(seen), 0.1) if seen else ():
            time.sleep(LAST_WORDS)  # wait: 3 s (`LAST_WORDS`), once; nobody
            status = seen[sentinel].exitcode  # type: ignore[index]
            tell(f"the engine ended while it started (exit code {status}): the reason is above")
            os._exit(1)
        if not seen:
            # wait: 0.1 s, again and again; the engine's process, or the end of this one
            time.sleep(0.1)
    host = "localhost" if args.host in (None, "", "0.0.0.0", "::") else args.host
    while not args.uds:
        # wait: 0.1 s, again and again; the server's port, or the end of this process
        time.sleep(0.1)
        with suppress(OSError), socket.create_connection((host, args.port), 1.0):
            place = f"[{host}]" if ":" in host else host
            url = f"http{'s' * bool(args.ssl_certfile)}://{place}:{args.port}/v1"
            name = (args.served_model_name or [args.model])[0]
            took = f"{time.time() - psutil.Process().create_time():.0f} s after the start"
            tell(f"{name} is served at {url}, {took}; try: vllm complete --url {url}")
            return


if __name__ == "__main__":
    sys.exit(main())

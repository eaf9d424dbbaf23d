"""Runs ``supervise`` with a stand-in for the server: ``supervised.py SERVER [--restart]``."""

import ctypes
import errno
import os
import sys

from sipipe.cli import supervise

SERVERS = {
    "ignores": "signal.signal(signal.SIGTERM, signal.SIG_IGN); say('up'); hang()",
    # As the real one: it tells its shutdown timeout, which nobody reads before the end.
    "serves": "pair.send(b'0\\n'); say('up'); hang()",
    "is told": "signal.signal(signal.SIGTERM, lambda *_: (open(sys.argv[3], 'w'), sys.exit(0))); "
    "say('up'); hang()",
    "ends": "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); say('up'); hang()",
    "drains": "pair.send(b'60\\n'); signal.signal(signal.SIGTERM, drain); say('up'); hang()",
    "is done": "pair.send(b'0\\n'); say('up'); sys.exit(0)",
    "helps": "say('up'); sys.exit(0)",
    "is wrong": "say('up'); sys.exit(2)",
    "served before": "say('up'); sys.exit(2) if os.path.exists(sys.argv[3]) else "
    "(open(sys.argv[3], 'w'), pair.send(b'0\\n'), sys.exit(1))",
    "dies": "leave_last_word('sampler0 keeps\\n dying'); say('up'); os.abort()",
    "leaves an orphan": "child = os.fork() or hang(); signal.signal(signal.SIGTERM, quit); "
    "say('up'); os.kill(child, signal.SIGTERM); hang() if os.path.exists(sys.argv[3]) else "
    "(open(sys.argv[3], 'w'), os.abort())",
    # As vLLM's: with a name in /dev/shm, which Python's resource tracker takes away.
    "has a semaphore": "signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    "lock = multiprocessing.get_context('spawn').Lock(); "
    "open(sys.argv[3], 'w').write(lock._semlock.name); say('up'); hang()",
    "leaves one": "child = os.fork() or hang(); os.kill(child, signal.SIGSTOP); "
    "print('up', child, flush=True); sys.exit(1)",
    # As Python does before it starts a process, after a log line that went nowhere.
    "starts processes": "sys.stderr.write('a line\\n'); multiprocessing.util._flush_std_streams(); "
    "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); say('up'); "
    "hang() if os.path.exists(sys.argv[3]) else (open(sys.argv[3], 'w'), os.abort())",
    "comes back": "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); say('up'); "
    "hang() if os.path.exists(sys.argv[3]) else (open(sys.argv[3], 'w'), os.abort())",
}
CODE = """
import multiprocessing.util, os, signal, socket, sys, time
sys.argv[1:] = sys.argv[2:] + [sys.argv[1]]
pair = socket.socket(fileno=int(sys.argv[1]))
sys.path[:] = {path!r}
from sipipe.ipc.parent import end_group_with
from sipipe.ipc.last_word import leave_last_word
end_group_with(pair)
def say(word): print(word, os.getpid(), flush=True)
def hang():
    # Briefly: a signal that comes just before a sleep begins is handled at its end.
    while True: time.sleep(0.05)
def quit(*_):
    sys.exit(0)
def drain(*_):
    time.sleep(1.5)  # more than the supervisor's own grace
    sys.exit(0)
"""

if __name__ == "__main__":
    name, marker = sys.argv[1:3]
    if "--first" in sys.argv:  # as a container's first process, the parent of all orphans
        ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER
    if "--log" in sys.argv:  # a closed terminal, from here on
        os.dup2(os.open("/dev/full", os.O_WRONLY), 2)
    if "--no-reader" in sys.argv:  # who reads the log ends
        reader, writer = os.pipe()
        os.close(reader)
        os.dup2(writer, 2)
    if "--no-room" in sys.argv:  # for another process, when the second is started
        start, refusals = supervise.start_child, iter([0, errno.EAGAIN])

        def start_child(*arguments, **options):
            if number := next(refusals, 0):
                raise OSError(number, os.strerror(number))
            return start(*arguments, **options)

        supervise.start_child = start_child
    supervise.GRACE = 3600.0 if "--patient" in sys.argv else 0.5
    supervise.FIRST_BREAK = 0.01
    code = CODE.replace("{path!r}", repr(sys.path)) + SERVERS[name]
    supervise.SERVER = ("-c", code, marker)
    sys.exit(supervise.supervise([], restart="--restart" in sys.argv))

"""A process of multiprocessing whose starter is killed ends, whatever it waits for."""

import multiprocessing
import os
import signal
import threading
from contextlib import suppress

import psutil

from sipipe.ipc import parent


class Configuration:
    """What is told to a process; it is unpickled before the process knows who started it."""

    def __setstate__(self, state):
        parent.end_after_starter()
        parent.end_after_starter()

    def __getstate__(self):
        return {"kept": 1}


def _wait_for_ever(pipe, _):
    parent.GRACE_SECONDS = 0.1
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    pipe.send([os.getpid(), *(thread.name for thread in threading.enumerate())])
    signal.pause()


def _start_one(pipe):
    told = pipe, Configuration()
    multiprocessing.get_context("spawn").Process(target=_wait_for_ever, args=told).start()
    signal.pause()


def test_it_ends():
    ours, theirs = multiprocessing.Pipe()
    starter = multiprocessing.get_context("fork").Process(target=_start_one, args=(theirs,))
    starter.start()
    theirs.close()
    number, *threads = ours.recv()
    child = psutil.Process(number)
    starter.kill()
    starter.join()
    try:
        assert threads == ["MainThread", parent.STARTER]
        child.wait(60)
    finally:
        with suppress(psutil.NoSuchProcess):
            child.kill()
        ours.close()


def test_a_process_that_multiprocessing_did_not_spawn_is_left_alone(monkeypatch):
    monkeypatch.setattr(parent, "_watch_starter", None)
    parent.end_after_starter()

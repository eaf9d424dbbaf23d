"""A process of multiprocessing whose starter is killed ends, whatever it waits for."""

import multiprocessing
import os
import signal

import psutil
import pytest

from sipipe.ipc import parent


def _wait_for_ever(pipe):
    parent.GRACE_SECONDS = 0.1
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    parent.end_after_starter()
    parent.end_after_starter()
    pipe.send(os.getpid())
    signal.pause()


class _Watched:
    """As a VllmConfig is on its way to the engine."""

    def __setstate__(self, _):
        parent.GRACE_SECONDS = 0.1
        parent.end_after_starter()

    def __getstate__(self):
        return {"any": 1}


def _wait_watched(pipe, _):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    pipe.send(os.getpid())
    signal.pause()


def _start_one(pipe, method):
    target, more = (_wait_for_ever, ()) if method == "fork" else (_wait_watched, (_Watched(),))
    multiprocessing.get_context(method).Process(target=target, args=(pipe, *more)).start()
    signal.pause()


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_it_ends(method):
    ours, theirs = multiprocessing.Pipe()
    starter = multiprocessing.get_context("fork").Process(target=_start_one, args=(theirs, method))
    starter.start()
    theirs.close()
    child = psutil.Process(ours.recv())
    starter.kill()
    starter.join()
    child.wait(60)
    ours.close()


def test_a_process_that_nobody_of_multiprocessing_started_is_left_alone(monkeypatch):
    monkeypatch.setattr(parent.threading, "Thread", None)
    parent.end_after_starter.cache_clear()
    parent.end_after_starter()

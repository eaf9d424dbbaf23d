"""A process of multiprocessing whose starter is killed ends, whatever it waits for."""

import multiprocessing
import os
import signal

import psutil

from sipipe.ipc import parent


def _wait_for_ever(pipe):
    parent.GRACE_SECONDS = 0.1
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    parent.end_after_starter()
    parent.end_after_starter()
    pipe.send(os.getpid())
    signal.pause()


def _start_one(pipe):
    multiprocessing.get_context("fork").Process(target=_wait_for_ever, args=(pipe,)).start()
    signal.pause()


def test_it_ends():
    ours, theirs = multiprocessing.Pipe()
    starter = multiprocessing.get_context("fork").Process(target=_start_one, args=(theirs,))
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

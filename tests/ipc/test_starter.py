"""A process that vLLM starts ends with its starter, whatever it does or waits for."""

import multiprocessing
import os
import pickle
import signal
from contextlib import suppress

import psutil
import pytest

from sipipe.ipc import starter
from sipipe.ipc.starter import Tied, tied
from sipipe.linux import pidfd_open


class Importing:
    """An argument that takes for ever to arrive, as one whose class has vLLM imported."""

    def __init__(self, pipe):
        self._pipe = pipe

    def __reduce__(self):
        return _import_for_ever, (self._pipe,)


def _import_for_ever(pipe):
    pipe.send(os.getpid())
    signal.pause()


def _handshake(pipe):
    """As an engine that waits for a front end, and is not to be ended by SIGTERM."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    pipe.send(os.getpid())
    signal.pause()


def _in_order(pipe):
    starter.GRACE_SECONDS = 0.2
    starter.ends_in_order()
    _handshake(pipe)


def _start_one(method, target, argument, pipe):
    run = Tied(target)
    process = multiprocessing.get_context(method).Process(target=run, args=(argument(pipe),))
    process.start()
    signal.pause()


def _plain(pipe):
    return pipe


@pytest.mark.parametrize(
    ("method", "target", "argument"),
    [
        ("spawn", _handshake, Importing),
        ("spawn", _handshake, _plain),
        ("fork", _handshake, _plain),
        ("fork", _in_order, _plain),
    ],
)
def test_it_ends(method, target, argument):
    ours, theirs = multiprocessing.Pipe()
    begin = multiprocessing.get_context("fork").Process(
        target=_start_one, args=(method, target, argument, theirs)
    )
    begin.start()
    theirs.close()
    child = psutil.Process(ours.recv())
    begin.kill()
    begin.join()
    try:
        child.wait(60)
    finally:
        with suppress(psutil.NoSuchProcess):
            child.kill()
        ours.close()


@pytest.fixture
def _nothing_left(monkeypatch):
    """Close the descriptors of this process that are opened for its children; else it has them for life."""
    descriptors = []

    def opened(pid):
        descriptors.append(pidfd_open(pid))
        return descriptors[-1]

    monkeypatch.setattr(starter, "pidfd_open", opened)
    yield
    for descriptor in descriptors:
        os.close(descriptor)


def _add(number):
    return number + 1


@pytest.mark.usefixtures("_nothing_left")
def test_a_function_is_tied_once_in_a_process_and_anew_in_its_forks():
    once = tied(_add)
    assert tied(once) is once
    assert once.pid == os.getpid()
    ours, theirs = multiprocessing.Pipe()
    context = multiprocessing.get_context("fork")
    child = context.Process(target=lambda: theirs.send(tied(once).pid == os.getpid()))
    child.start()
    assert ours.recv()
    child.join()


@pytest.mark.usefixtures("_nothing_left")
def test_it_is_sent_to_processes_that_are_started_alone():
    once = tied(_add)
    with pytest.raises(AssertionError):
        pickle.dumps(once)

"""NUMA nodes of the memory of one host's channels."""

import os
from contextlib import ExitStack
from types import SimpleNamespace

from sipipe.engine.hosts import local as host
from sipipe.engine.hosts.local import LocalHost
from sipipe.messages.hosts import MakeLogits


def test_logits_lie_beside_the_workers_that_write_them(monkeypatch):
    """The kernel takes memory from the NUMA node of whoever asks for it first: BIC-L is asked for
    as a whole when it is made, from the cores of the last stage's workers."""
    before = os.sched_getaffinity(0)
    affinities = []

    def channel(*_, **__):
        affinities.append(os.sched_getaffinity(0))
        return SimpleNamespace(close=None, endpoint="there")

    monkeypatch.setattr(host, "LogitsChannel", channel)
    made = object.__new__(LocalHost)
    made._closing = ExitStack()
    made._samplers = SimpleNamespace(names=["sampler0"])
    for workers, where in (
        ((((),), ((max(before),),)), {max(before)}),
        ((((max(before),),), ((),)), before),
    ):
        made._setup = SimpleNamespace(
            cores=SimpleNamespace(workers=workers),
            logits_rows=4,
            slots=3,
            config=SimpleNamespace(start_timeout=1.0),
        )
        assert made.do(MakeLogits(None)) == "there"
        assert affinities.pop() == where
        assert os.sched_getaffinity(0) == before

"""NUMA nodes of the memory of one host's channels."""

import os
from types import SimpleNamespace
from unittest.mock import Mock

from sipipe.engine.hosts import local as host
from sipipe.engine.hosts.local import LocalHost
from sipipe.messages.hosts import EndSamplers, MakeLogits
from sipipe.observe.live import LivePage, PageHeader


def started(workers):
    """A host whose ``workers``, by stage and rank, are on these CPUs. Its processes are stand-ins."""
    setup = SimpleNamespace(
        cores=SimpleNamespace(workers=workers, samplers=[()]),
        dtype="float32",
        vocab_size=8,
        logits_rows=4,
        slots=3,
        config=SimpleNamespace(start_timeout=1.0, stall_timeout=1.0),
        vllm_config=SimpleNamespace(
            reasoning_config=None,
            speculative_config=None,
            model_config=SimpleNamespace(logprobs_mode="raw_logprobs"),
        ),
    )
    page = LivePage.create(PageHeader(stages=2, samplers=1))
    made = LocalHost(setup, SimpleNamespace(live=page.path), Mock(turn=lambda: 1.0))
    made.start()
    page.close()
    return made


def test_logits_lie_beside_the_workers_that_write_them(monkeypatch):
    """The kernel takes memory from the NUMA node of whoever asks for it first: BIC-L is asked for
    as a whole when it is made, from the cores of the last stage's workers."""
    before = os.sched_getaffinity(0)
    affinities = []

    def channel(*_, **__):
        affinities.append(os.sched_getaffinity(0))
        return SimpleNamespace(close=lambda: None, endpoint="there")

    monkeypatch.setattr(host, "LogitsChannel", channel)
    monkeypatch.setattr(host, "Workers", lambda *_: Mock(names=["stage0"]))
    monkeypatch.setattr(host, "Samplers", lambda *_, **__: Mock(names=["sampler0"], sockets=[]))
    for workers, where in (
        ((((),), ((max(before),),)), {max(before)}),
        ((((max(before),),), ((),)), before),
    ):
        made = started(workers)
        assert made.do(MakeLogits(None)) == "there"
        made.close()
        assert affinities.pop() == where
        assert os.sched_getaffinity(0) == before


def test_samplers_are_let_go_before_they_are_asked_to_end(monkeypatch):
    """The successor of one that has just died would otherwise be started by a thread that does not know
    of the end, and become a reader for which every publisher waits."""
    calls = Mock()
    calls.Samplers.return_value = Mock(names=["sampler0"], sockets=[])
    calls.Samplers.return_value.let_go = calls.let_go
    monkeypatch.setattr(host, "LogitsChannel", Mock())
    monkeypatch.setattr(host, "Workers", lambda *_: Mock(names=["stage0"]))
    monkeypatch.setattr(host, "Samplers", calls.Samplers)
    monkeypatch.setattr(host.DispatchProducer, "remove_reader", calls.remove_reader)
    monkeypatch.setattr(host.Children, "end", calls.end)
    made = started((((),), ((),)))
    made.do(MakeLogits(None))
    calls.reset_mock()
    made.do(EndSamplers())
    assert [call[0] for call in calls.mock_calls] == ["let_go", "end", "remove_reader"]
    made.close()

"""The transport of each link is the first that passes its own trial, whatever others do."""

from __future__ import annotations

import itertools
import re
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sipipe.config import HostSettings, SiPipeConfig
from sipipe.engine import link_opener
from sipipe.engine.link_opener import LinkOpener, describe_links
from sipipe.errors import ResourceError, UnsupportedError
from sipipe.ipc.link.schema import TOKENS, TensorSchema, TensorSpec
from sipipe.messages.link import TRIAL_SECONDS, TrialReport
from sipipe.messages.start_records import StageDescription

TAKES = TensorSchema((TensorSpec("hidden_states", "bfloat16", (TOKENS, 8)),)).encode()
ENDS = {
    "works": ({"seconds": 0.002}, {}),
    "refused": ({"failure": "CUDA refuses it"}, {"failure": "closed", "echoes": True}),
    "corrupt": ({"failure": "closed", "echoes": True}, {"failure": "other bytes came"}),
    "hangs": ({"failure": "not finished", "hangs": True}, {"failure": "nothing", "hangs": True}),
    "half hangs": ({"failure": "not finished", "hangs": True}, {"failure": "other bytes came"}),
}
"""What the sender's and the receiver's end say of a trial."""
REASONS = {
    "refused": "CUDA refuses it",
    "corrupt": "other bytes came",
    "hangs": "not finished",
    "half hangs": "other bytes came",
}


class Stages:
    """In place of ``Calls``: all ranks answer; ``outcome`` of a pair and a transport, else it works."""

    def __init__(self, ranks, outcome):
        self.ranks = ranks
        self.outcome = outcome
        self.asked = []

    def ask(self, request, _seconds):
        self.asked.append(request)
        answers = [[] for _ in range(self.ranks)]
        for trial in request.trials:
            how = self.outcome.get((trial.pair, trial.endpoint.kind), "works")
            for rank, said in zip(trial.pair, ENDS[how], strict=True):
                answers[rank].append(TrialReport(pair=trial.pair, **said))
        return answers


def opener(
    stages=2,
    ranks=1,
    outcome=None,
    *,
    transport="auto",
    on_cpu=False,
    addresses=None,
    encrypts=True,
    nixl=(),
    gpus=(),
):
    hosts = HostSettings(count=1 + bool(addresses), encrypt_links=encrypts)
    config = SiPipeConfig(transport=transport, hosts=hosts)
    setup = SimpleNamespace(
        stages=stages, ranks=ranks, slots=stages + 1, link_tokens=512, rows=8, config=config
    )
    setup.dtype = "bfloat16"
    setup.hidden_size = 8
    described = [
        StageDescription(
            takes=TAKES,
            gpu=gpus[rank] if gpus else "" if on_cpu else f"uuid-{rank}",
            nixl=nixl[rank // ranks] if nixl else "",
        )
        for rank in range(stages * ranks)
    ]
    calls = Stages(stages * ranks, outcome or {})
    link_opener.current_platform = SimpleNamespace(is_cpu=lambda: on_cpu)
    return LinkOpener(setup, calls, addresses or {}, described), calls


@pytest.fixture(autouse=True)
def lines(monkeypatch):
    """What is logged."""
    monkeypatch.setattr(link_opener, "current_platform", None)
    said = []
    log = SimpleNamespace(
        warning=lambda text, *args: said.append(text % args),
        info=lambda text, *args: said.append(text % args),
    )
    monkeypatch.setattr(link_opener, "logger", log)
    return said


@given(data=st.data(), stages=st.integers(2, 8), ranks=st.integers(1, 2))
def test_each_link_has_the_first_transport_that_works_for_it(data, stages, ranks):
    pairs = [(rank, rank + ranks) for rank in range((stages - 1) * ranks)]
    hows = st.sampled_from([*ENDS])
    first = {pair: data.draw(hows) for pair in pairs}
    opening, calls = opener(stages, ranks, {(pair, "cuda_ipc"): how for pair, how in first.items()})
    links = opening.join_stages()
    kinds = {pair: link.kind for pair, link in zip(pairs, links, strict=True)}
    assert kinds == {pair: "cuda_ipc" if first[pair] == "works" else "shm" for pair in pairs}
    failed = {pair for pair in pairs if first[pair] != "works"}
    assert [{trial.pair for trial in request.trials} for request in calls.asked] == [
        {*pairs},
        *([failed] if failed else []),
    ]
    if failed:
        assert calls.asked[1].hung == {pair for pair in pairs if "hangs" in first[pair]}
    seconds = [{trial.seconds for trial in request.trials} for request in calls.asked]
    assert seconds[0] == {TRIAL_SECONDS}
    assert all(each > TRIAL_SECONDS for later in seconds[1:] for each in later)


@pytest.mark.parametrize("how", REASONS)
def test_a_line_names_the_pair_the_reason_and_the_cost(lines, how):
    opening, _ = opener(3, 2, {((3, 5), "cuda_ipc"): how})
    links = opening.join_stages()
    warning, tried = lines
    assert warning == (
        "link stage1-2.r1 from GPU uuid-3 to GPU uuid-5: shm (untested between GPUs) carries hidden "
        f"states, since cuda_ipc failed its trial ({REASONS[how]}). 512 tokens, 0.0 MB, take 2.0 ms: "
        "as much later is the first token of such a prompt"
    )
    assert tried.startswith("hidden states go from stage to stage by 4 links; the slowest, ")
    assert re.search(r"\(all were tried, in \d+ ms\)$", tried)
    assert describe_links(links) == (
        "cuda_ipc (untested between GPUs), shm (untested between GPUs) on stage1-2.r1"
    )


def test_two_islands_of_four_are_joined_by_host_memory_at_the_one_place():
    """A pair that nobody uses is not asked about."""
    opening, _ = opener(8, 1, {((3, 4), "cuda_ipc"): "refused"})
    kinds = [link.kind for link in opening.join_stages()]
    assert kinds == ["cuda_ipc"] * 3 + ["shm"] + ["cuda_ipc"] * 3
    opening, _ = opener(4, 2, {((r, r + 2), "cuda_ipc"): "refused" for r in (2, 3)})
    kinds = [link.kind for link in opening.join_stages()]
    assert kinds == ["cuda_ipc"] * 2 + ["shm"] * 2 + ["cuda_ipc"] * 2


@given(data=st.data(), stages=st.integers(2, 5))
def test_slices_of_gpus_are_joined_by_host_memory_without_a_trial(data, stages):
    """They cannot map one another's memory, and a trial of that may hang."""
    names = st.sampled_from(["uuid", "MIG"])
    kinds = data.draw(st.lists(names, min_size=stages, max_size=stages))
    opening, calls = opener(stages, gpus=[f"{kind}-{rank}" for rank, kind in enumerate(kinds)])
    found = [link.kind for link in opening.join_stages()]
    pairs = itertools.pairwise(kinds)
    assert found == ["shm" if "MIG" in pair else "cuda_ipc" for pair in pairs]
    assert len(calls.asked) == 1


@pytest.mark.parametrize("how", REASONS)
def test_a_transport_that_was_asked_for_is_refused_by_name(how):
    opening, _ = opener(2, 1, {((0, 1), "cuda_ipc"): how}, transport="cuda_ipc")
    with pytest.raises(
        UnsupportedError,
        match=r'"transport" is "cuda_ipc", and hidden states cannot cross link stage0-1\.r0 from GPU '
        rf'uuid-0 to GPU uuid-1 by it: {REASONS[how]}; leave it "auto"$',
    ):
        opening.join_stages()
    opening, calls = opener(2, 1, {((0, 1), "cuda_ipc"): how}, transport="shm")
    assert [link.kind for link in opening.join_stages()] == ["shm"]
    assert len(calls.asked) == 1


def test_the_start_ends_where_no_transport_is_left():
    outcome = {((0, 1), "cuda_ipc"): "refused", ((0, 1), "shm"): "corrupt"}
    opening, _ = opener(outcome=outcome)
    with pytest.raises(
        ResourceError,
        match=r"^hidden states cannot cross link stage0-1\.r0 from GPU uuid-0 to GPU uuid-1: "
        r"cuda_ipc failed its trial \(CUDA refuses it\); shm failed its trial \(other bytes came\)$",
    ):
        opening.join_stages()
    opening, _ = opener(3, 1, {((1, 2), "zeromq"): "hangs"}, on_cpu=True, addresses={2: "10.0.0.2"})
    with pytest.raises(ResourceError, match=r"link stage1-2\.r0.*zeromq failed its trial"):
        opening.join_stages()


def test_links_between_hosts_and_of_cpus_have_one_transport():
    opening, calls = opener(3, 2, on_cpu=True, addresses={2: "10.0.0.2"})
    assert [link.kind for link in opening.join_stages()] == ["shm", "shm", "zeromq", "zeromq"]
    assert len(calls.asked) == 1


REACHES = st.sampled_from(["", "tcp", "rdma"])


@given(sender=REACHES, receiver=REACHES, on_cpu=st.booleans(), encrypts=st.booleans())
def test_nixl_joins_hosts_that_both_have_it_with_rdma_or_gpus(sender, receiver, on_cpu, encrypts):
    opening, _ = opener(
        on_cpu=on_cpu, addresses={1: "10.0.0.2"}, encrypts=encrypts, nixl=(sender, receiver)
    )
    (link,) = opening.join_stages()
    over_rdma = sender == receiver == "rdma"
    joins = sender and receiver and not encrypts and (over_rdma or not on_cpu)
    assert link.kind == ("nixl" if joins else "zeromq")
    if joins:
        assert bool(link.data_port) != over_rdma
        assert not link.token, "its packets are encrypted"
        assert len({29501, 29502, link.port, link.data_port}) == 4


@pytest.mark.parametrize("how", REASONS)
def test_zeromq_takes_the_place_of_nixl_on_a_port_of_its_own(lines, how):
    """The port of one that hangs stays taken."""
    opening, calls = opener(
        outcome={((0, 1), "nixl"): how},
        addresses={1: "10.0.0.2"},
        encrypts=False,
        nixl=("rdma", "rdma"),
    )
    (link,) = opening.join_stages()
    assert link.kind == "zeromq"
    assert link.token
    assert "zeromq, not encrypted" in lines[0]
    assert f"nixl failed its trial ({REASONS[how]})" in lines[0]
    ports = [trial.endpoint.port for request in calls.asked for trial in request.trials]
    assert len({*ports}) == 2


def test_nixl_that_was_asked_for_is_refused_by_name():
    asked = {"transport": "nixl", "addresses": {1: "10.0.0.2"}, "encrypts": False, "on_cpu": True}
    opening, calls = opener(nixl=("tcp", ""), **asked)
    with pytest.raises(
        UnsupportedError, match=r'"nixl".*not installed on the host of stage 1: pip'
    ):
        opening.join_stages()
    assert not calls.asked
    opening, _ = opener(outcome={((0, 1), "nixl"): "hangs"}, nixl=("tcp", "tcp"), **asked)
    with pytest.raises(
        UnsupportedError, match=r'"nixl".*stage0-1\.r0 by it: not finished; leave it'
    ):
        opening.join_stages()
    opening, _ = opener(nixl=("tcp", "rdma"), **asked)
    assert [link.kind for link in opening.join_stages()] == ["nixl"]


def test_final_hidden_states_are_tried_too():
    opening, calls = opener(3, 1, {((2, 0), "cuda_ipc"): "corrupt"})
    assert [link.kind for link in opening.join_last_stage()] == ["shm", "cuda_ipc"]
    first, second = calls.asked
    assert [trial.pair for trial in first.trials] == [(2, 0), (2, 1)]
    assert [trial.pair for trial in second.trials] == [(2, 0)]


def test_without_links_nothing_is_tried(lines):
    opening, calls = opener(1)
    assert opening.join_stages() == []
    assert (calls.asked, lines) == ([], [])
    assert describe_links([]) == "none"

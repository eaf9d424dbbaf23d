"""The emulated device on a clock of the test's own, and what an emulated worker makes of a step."""

from __future__ import annotations

import copy
import socket
from types import SimpleNamespace

import msgspec
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm", reason="stands for vLLM's worker")

import numpy as np  # noqa: E402
from benchmarks.emulation import worker as emulated  # noqa: E402
from benchmarks.emulation.profile import Curve, Profile, StageProfile  # noqa: E402
from benchmarks.emulation.worker import EmulatedDevice, EmulatedWorker  # noqa: E402
from tests.scheduled import new_request  # noqa: E402
from vllm.config import VllmConfig  # noqa: E402
from vllm.distributed import parallel_state  # noqa: E402
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput  # noqa: E402

from sipipe.config import SiPipeConfig  # noqa: E402
from sipipe.ipc.ring.logits import LogitsChannel, LogitsReader  # noqa: E402
from sipipe.messages.calls import TakeProjection, TimeParts  # noqa: E402
from sipipe.messages.link import LinkEndpoint  # noqa: E402
from sipipe.messages.logits import LogitsShape  # noqa: E402
from sipipe.messages.places import StagePlace  # noqa: E402
from sipipe.observe.format import Header  # noqa: E402
from sipipe.observe.recorder import open_recorder  # noqa: E402
from sipipe.worker.loop import StageLoop  # noqa: E402
from sipipe.worker.world import PipelineStandIn  # noqa: E402

MS = 1_000_000
WIDTH = 8


@pytest.fixture
def clock(monkeypatch):
    """Time passes only where somebody sleeps."""
    found = SimpleNamespace(now=0)
    found.monotonic_ns = lambda: found.now
    found.sleep = lambda seconds: setattr(found, "now", found.now + round(seconds * 1e9))
    monkeypatch.setattr(emulated, "time", found)
    return found


def profile(*milliseconds, copy=0.0):
    nothing = Curve((0, 1), (0.0, 0.0))
    stages = (
        StageProfile(Curve((0, 1), (ms / 1e3, ms / 1e3)), nothing, nothing, 0.0, 0.0)
        for ms in milliseconds
    )
    return Profile(
        name="a", stages=tuple(stages), copy=Curve((0, 1), (copy / 1e3, copy / 1e3)), kv_tokens=1
    )


def ready():
    return torch.zeros(1, dtype=torch.int64)


def test_work_is_in_order_and_takes_its_time(clock):
    hidden = ready()
    device = EmulatedDevice(profile(1), torch.float32, hidden, 5)
    first = device.mark()
    device.launch(0.002)
    middle = device.mark()
    device.launch(0.003)
    last = device.mark()
    assert clock.now == 0, "who launches does not wait"
    assert device.nanoseconds(first, middle) == 2 * MS
    device.wait(last)
    assert clock.now == 5 * MS
    clock.now = 9 * MS
    assert device.mark() == 9 * MS, "an idle stream is where the clock is"
    hidden[0] = 12 * MS  # when hidden states will be there
    device.launch(0.001)
    assert device.mark() == 13 * MS


def test_copies_come_after_their_source_and_one_another(clock):
    device = EmulatedDevice(profile(1, copy=4), torch.float32, ready(), 5)
    logits = torch.empty(3, 5, device="meta")
    device.launch(0.010)
    first = device.fetch(logits, torch.empty(3, 5), device.mark())
    second = device.fetch(logits, torch.empty(3, 5), 0)
    assert (first, second) == (14 * MS, 18 * MS)


def test_a_product_runs_beside_forward_passes(clock):
    """At half its speed; a pass of the worker has the time in its own."""
    device = EmulatedDevice(profile(1, copy=8), torch.float32, ready(), 5)
    beside = device.beside()
    assert beside.beside() is beside
    device.launch(0.010)
    beside.compute(4 * MS, 0.002)  # its rows come amid the forward pass
    assert clock.now == 4 * MS, "who multiplies waits for the rows"
    assert (beside.mark(), beside.nanoseconds(0, 0)) == (8 * MS, 0)
    assert device.mark() == 10 * MS
    assert beside.fetch(torch.empty(1, 2), torch.empty(1, 2), beside.mark()) == 16 * MS
    beside.compute(5 * MS, 0.001)
    assert beside.mark() == 10 * MS, "one product after the other"


def test_the_places_of_the_logits_are_filled():
    memory = bytearray(3_000_000)
    EmulatedDevice(profile(1), torch.bfloat16, ready(), 5).lock_pages(memoryview(memory))
    logits = torch.frombuffer(memory, dtype=torch.bfloat16).float()
    assert torch.isfinite(logits).all()
    assert 0.9 < logits.std() < 1.1


def unseen(name):
    return new_request(name, [0] * 5, blocks=([1],), prefill=[0] * 5)


def vllm_config():
    config = VllmConfig()
    config.cache_config.block_size = 16
    config.scheduler_config.max_num_batched_tokens, config.scheduler_config.max_num_seqs = 16, 4
    config.model_config = SimpleNamespace(
        dtype=torch.bfloat16,
        max_model_len=32,
        rswa_window=None,
        enable_prompt_embeds=False,
        get_vocab_size=lambda: 7,
        get_hidden_size=lambda: WIDTH,
    )
    return config


def test_a_stage_takes_longer_for_more():
    stage = StageProfile(
        layers=Curve((1, 2, 4), (1.0, 1.5, 3.5)),
        projection=Curve((1, 2), (0.25, 0.5)),
        hop=Curve((1, 2), (0.0, 0.0)),
        decode_context=0.001,
        prompt_context=0.0001,
    )
    ten, one, three = np.array([[10], [1], [3]])
    assert stage.seconds(ten, one) == pytest.approx(1.0 + 0.001 * 10.5)
    assert stage.seconds(ten, three) == pytest.approx(2.5 + 0.0001 * 3 * 11.5)
    assert np.isclose(stage.layers(8), 7.5), "beyond the last point as before it"


def watch(monkeypatch, receiver, came):
    """Copy what the receiver takes into ``came``."""
    take = receiver.take

    def taken(*args, **more):
        found = take(*args, **more)
        assert list(found) == ["hidden_states", "residual"]
        came.append([hidden.clone() for hidden in found.values()])
        return found

    monkeypatch.setattr(receiver, "take", taken)


@pytest.mark.parametrize(
    ("stages", "shared"), [(1, False), (2, False), (4, False), (2, True), (4, True)]
)
def test_stages_publish_what_samples(monkeypatch, tmp_path, stages, shared):
    """Real links, publishers and BIC-L; one thread launches all stages, and never waits. Where the
    output projection is shared out, each publishes its columns."""
    path = tmp_path / "profile.json"
    path.write_bytes(msgspec.json.encode(profile(*range(1, stages + 1), copy=0.5)))
    monkeypatch.setenv("EMULATED_PROFILE", str(path))
    link = LinkEndpoint(kind="shm", buffer_tokens=16, depth=3, device="cpu")
    pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(stages - 1)]
    heads = [
        socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for _ in range((stages - 1) * shared)
    ]
    bounds = (*range(stages), 7) if shared else ()
    shape = LogitsShape(vocab=7, dtype="bfloat16", bounds=bounds)
    channel = LogitsChannel("logits", shape, rows=8, entries=5, readers=["a"])
    reader = LogitsReader(channel.endpoint, "a")
    reports, loops, groups = [], [], []
    for stage in range(stages):
        place = StagePlace(stage=stage, stages=stages, tp_rank=0, tp_size=1)
        worker = EmulatedWorker.__new__(EmulatedWorker)
        worker.place, worker.device, config = place, torch.device("cpu"), vllm_config()
        worker.vllm_config, worker.model_config = config, config.model_config
        worker.scheduler_config = config.scheduler_config
        groups.append(PipelineStandIn(place))
        monkeypatch.setattr(parallel_state, "_PP", groups[stage])
        worker.load_model()
        loop = StageLoop(
            SimpleNamespace(
                place=place,
                path="sipipe",
                measures=False,
                rows=64,
                speculates=False,
                cpus=(),
                parts=(1 / stages,) * stages if shared else (),
                vllm_config=VllmConfig(),
                config=SiPipeConfig(stall_timeout=30),
                watched=SimpleNamespace(inflight=3),
            ),
            SimpleNamespace(worker=worker, execute_model=worker.execute_model),
            [ends[1] for ends in pairs[stage - 1 : stage]]
            + [ends[0] for ends in pairs[stage:][:1]]
            + [ends[1] for ends in heads[stage:][:1]]
            + [ends[0] for ends in heads if stage == stages - 1],
            reports.append,
            open_recorder(None, Header(role="stage")),
            reports.append,
        )
        if shared:
            offer = loop._loaded.sharing.offer(None, None)
            loop.answer(TakeProjection(offers=[offer], bounds=bounds))
            assert loop.answer(TimeParts(sequences=4)).layers == (stage + 1) / 1e3
        links = [link] * (stages - 1)
        loop.open(links=links, finals=links, logits=channel.endpoint)
        loops.append(loop)
    output = SchedulerOutput.make_empty()
    output.scheduled_new_reqs = [unseen("a"), unseen("b")]
    cached = CachedRequestData.make_empty()
    cached.req_ids, cached.new_token_ids, cached.new_block_ids = ["b"], [[]], [None]
    steps = [({"a": 5, "b": 3}, 1), ({"b": 1}, 0), ({"b": 1}, 1)]
    came = []
    for loop in loops[1:]:
        watch(monkeypatch, loop.stage._links._receiver, came)
    for iteration, (scheduled, rows) in enumerate(steps):
        output = copy.copy(output)
        output.num_scheduled_tokens = scheduled
        output.total_num_scheduled_tokens = sum(scheduled.values())
        for loop, group in zip(loops, groups, strict=True):
            monkeypatch.setattr(parallel_state, "_PP", group)
            loop.run(iteration, iteration % 3, output, iteration if rows else -1, rows)
            loop.double_buffer._run_one()  # as the device thread
        output = copy.copy(output)
        output.scheduled_new_reqs, output.scheduled_cached_reqs = [], cached
        cached.num_computed_tokens = [3 + iteration]
    for iteration, (_, rows) in enumerate(steps):
        if rows:
            with reader.receive() as entry:
                assert (entry.iteration, entry.batch) == (iteration, rows)
                assert len(np.unique(entry.array)) > 1
    for loop in loops:
        loop.stage.drain()
    shapes = [[(tokens, WIDTH)] * 2 for tokens in (8, 1, 1) for _ in loops[1:]]
    assert [[tuple(hidden.shape) for hidden in each] for each in came] == shapes
    assert {hidden.dtype for each in came for hidden in each} <= {torch.bfloat16}
    assert [one.iteration for one in reports] == [1], (
        "the engine hears of the iteration that samples nothing"
    )
    for loop in loops:
        loop.close()
    reader.close()
    channel.close()

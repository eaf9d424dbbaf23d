"""Which graphs a stage captures, and what a replay does with its buffers; without a device."""

from contextlib import ExitStack
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from vllm.config import CUDAGraphMode  # noqa: E402
from vllm.distributed import parallel_state  # noqa: E402

from sipipe.errors import SiPipeError  # noqa: E402
from sipipe.messages.places import StagePlace  # noqa: E402
from sipipe.worker import graphs as stage_graphs  # noqa: E402
from sipipe.worker.graphs import StageGraphs, graph_sizes  # noqa: E402
from sipipe.worker.inputs.model_input import ModelInput  # noqa: E402
from sipipe.worker.world import PipelineStandIn  # noqa: E402

from .plain_bank import PlainBank  # noqa: E402


def stock(mode, *, device="cuda", sizes=(1, 2, 4, 8, 256), lora=None):
    compilation = SimpleNamespace(cudagraph_mode=mode, cudagraph_capture_sizes=list(sizes))
    return SimpleNamespace(
        device=torch.device(device),
        vllm_config=SimpleNamespace(compilation_config=compilation),
        lora_config=lora,
        max_num_reqs=64,
        model=SimpleNamespace(
            make_empty_intermediate_tensors=lambda batch_size, dtype, device: SimpleNamespace(
                tensors={"hidden": torch.zeros(batch_size, 3, dtype=dtype, device=device)}
            )
        ),
        model_config=SimpleNamespace(dtype=torch.float32),
    )


@pytest.mark.parametrize(
    "mode", [CUDAGraphMode.FULL, CUDAGraphMode.FULL_DECODE_ONLY, CUDAGraphMode.FULL_AND_PIECEWISE]
)
def test_vllms_own_capture_sizes_are_used_up_to_max_num_seqs(mode):
    assert graph_sizes(stock(mode)) == [1, 2, 4, 8]


@pytest.mark.parametrize("mode", [CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE, None])
def test_without_full_graphs_for_decode_nothing_is_captured(mode):
    assert graph_sizes(stock(mode)) == []


def test_nothing_is_captured_on_a_cpu_or_with_lora():
    assert graph_sizes(stock(CUDAGraphMode.FULL, device="cpu")) == []
    assert graph_sizes(stock(CUDAGraphMode.FULL, lora=object())) == []


class Attention:
    """Poses for a capture with inputs that nobody has prepared."""

    def pose(self, version, size):
        return ModelInput(iteration=-1, slot=0, version=version, num_tokens=size, graph_size=size)


@pytest.fixture
def middle_stage(monkeypatch):
    place = StagePlace(stage=1, stages=3, tp_rank=0, tp_size=1)
    monkeypatch.setattr(parallel_state, "_PP", PipelineStandIn(place))


class PooledBank(PlainBank):
    """Every replay leaves its result in the same memory, as graphs with one pool do."""

    def replay(self, version, size):
        result = super().replay(version, size)
        if not hasattr(self, "memory"):
            self.memory = torch.zeros(max(self.sizes), 3)
        out = self.memory[:size]
        out.copy_(result["hidden"])
        return {"hidden": out}


def test_a_replay_does_not_touch_what_the_one_before_has_sent(middle_stage):
    seen = []

    def call(inputs, rows, received):
        seen.append((inputs.version, rows, received["hidden"].data_ptr()))
        return {"hidden": received["hidden"] + 100 * inputs.version}

    graphs = StageGraphs(stock(None, device="cpu"), Attention(), call, PooledBank([2, 4], 2))
    captured = {(version, rows): at for version, rows, at in seen}
    assert set(captured) == {(0, 2), (0, 4), (1, 2), (1, 4)}
    sent = []
    for iteration in range(4):
        version = iteration % 2
        inputs = ModelInput(iteration=iteration, slot=0, version=version, graph_size=4)
        received = {"hidden": torch.full((3, 3), float(iteration))}
        sent.append(graphs.run(inputs, received))
        assert seen[-1] == (version, 4, captured[version, 4]), "reads where it was captured"
    for iteration, result in enumerate(sent):
        assert (result["hidden"][:3] == iteration + 100 * (iteration % 2)).all()


def test_a_failed_capture_says_how_to_do_without(middle_stage):
    def call(inputs, rows, received):
        raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(SiPipeError, match=r"2 batch sizes failed .*capturing\); --enforce-eager"):
        StageGraphs(stock(None, device="cpu"), Attention(), call, PlainBank([1, 2], 2))


def test_vllms_graph_capture_finds_what_it_asks_of_the_pipeline_group(middle_stage):
    """``graph_capture`` enters one context of each group; ours has no collective to prepare."""
    context = object()
    with ExitStack() as stack:
        entered = stack.enter_context(parallel_state.get_pp_group().graph_capture(context))
    assert entered is context


def test_what_captures_is_entered_on_a_cpu_without_one():
    with stage_graphs._capturing(torch.device("cpu")):
        pass

"""The output projection shared out: whose rows, and what is refused."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm", reason="the module belongs to sipipe.worker")

from vllm.config import VllmConfig, set_current_vllm_config  # noqa: E402
from vllm.model_executor.layers.logits_processor import LogitsProcessor  # noqa: E402
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm  # noqa: E402
from vllm.model_executor.layers.vocab_parallel_embedding import (  # noqa: E402
    UnquantizedEmbeddingMethod,
)

from sipipe.worker.device import HostDevice  # noqa: E402
from sipipe.worker.projection.logits import StageLogits  # noqa: E402
from sipipe.worker.projection.rows import OfferedRows, ProjectionShard, time_parts  # noqa: E402

VOCAB, HIDDEN = 1000, 32


@pytest.fixture(autouse=True)
def _config():
    with set_current_vllm_config(VllmConfig()), torch.inference_mode():
        yield


class Head(torch.nn.Module):
    """What vLLM's ``ParallelLMHead`` has, of one rank."""

    def __init__(self, dtype):
        super().__init__()
        # As padded as vLLM's.
        weight = torch.randn(1024, HIDDEN, dtype=dtype)
        self.weight = torch.nn.Parameter(weight, requires_grad=False)
        self.quant_method, self.tp_size = UnquantizedEmbeddingMethod(), 1
        self.shard_indices = SimpleNamespace(num_added_elements=0)
        dispatch_cpu_unquantized_gemm(self, remove_weight=False)


class Model(torch.nn.Module):
    def __init__(self, dtype=torch.float32, bias=None, after=lambda x: x, before=None, **options):
        super().__init__()
        self.lm_head = Head(dtype)
        self.processor = LogitsProcessor(VOCAB, **options)
        self.bias, self.after, self.before = bias, after, before or (lambda x: x)

    def compute_logits(self, hidden):
        return self.after(self.processor(self.lm_head, self.before(hidden), self.bias))


def gather_by(model, gather):
    """Have ``gather`` make whole rows of the ranks' columns, in the place of a collective."""
    # vLLM's seam, on which `StageLogits` stands as well: its class must stay vLLM's own.
    model.processor._gather_logits = gather  # noqa: SLF001


def stage_logits(model):
    config = SimpleNamespace(get_vocab_size=lambda: VOCAB)
    return StageLogits(SimpleNamespace(model=model, model_config=config, lora_config=None))


def shards(model, bounds, dtype):
    offered = OfferedRows(stage_logits(model), torch.randn(3, HIDDEN, dtype=dtype))
    assert offered.reason == ""
    made = [
        ProjectionShard([offered.offer], start, stop, dtype)
        for start, stop in itertools.pairwise(bounds)
    ]
    assert "sipipe-projection" in Path("/proc/self/maps").read_text()
    offered.close()
    assert "sipipe-projection" not in Path("/proc/self/maps").read_text()
    return made


@pytest.mark.parametrize("options", [{}, {"scale": 0.25}, {"soft_cap": 3.0, "scale": 2.0}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_are_the_whole_bit_for_bit(dtype, options):
    model = Model(dtype, **options)
    hidden = torch.randn(5, HIDDEN, dtype=dtype) * 3
    whole = model.compute_logits(hidden)
    made = shards(model, (0, 192, 192, 704, VOCAB), dtype)
    parts = [shard.multiply(hidden) for shard in made]
    assert [part.shape[1] for part in parts] == [192, 0, 512, 296]
    assert torch.equal(torch.cat(parts, 1), whole)
    # Rows of other iterations change nothing but, by the kernel's blocks, the last bits.
    rows = torch.cat([torch.randn(30, HIDDEN, dtype=dtype), hidden])
    joined = torch.cat([shard.multiply(rows) for shard in made], 1)[30:]
    torch.testing.assert_close(joined, whole)
    assert torch.equal(joined.argmax(1), whole.argmax(1))
    # The last stage has let go of its packed matrix, and scores prompts by the loaded one, which
    # adds up in another order.
    scored = model.compute_logits(hidden)
    torch.testing.assert_close(
        scored, whole, rtol=2e-5 if dtype == torch.float32 else 0.016, atol=1e-4
    )


def test_a_product_lies_where_it_should():
    model = Model()
    (shard,) = shards(model, (0, VOCAB), torch.float32)
    hidden, into = torch.randn(4, HIDDEN), torch.empty(4, VOCAB)
    assert shard.multiply(hidden, into).data_ptr() == into.data_ptr()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"bias": torch.randn(1024)}, "bias"),
        ({"after": torch.tanh}, "more to its logits"),
        ({"before": lambda x: x / 2}, "more to its logits"),
        (
            {"after": lambda x: x.index_fill_(1, torch.tensor([7]), -torch.inf)},
            "more to its logits",
        ),
        ({"before": lambda x: x.mul_(2)}, "more to its logits"),
        ({"quantized": True}, "quantized"),
        ({"added": 3}, "added vocabulary"),
        ({"gathered": True}, "tensor-parallel ranks"),
        ({"twice": True}, "a way of its own"),
        ({"own": True}, "a way of its own"),
    ],
)
def test_what_is_more_than_a_product_stays_on_the_last_stage(change, reason):
    quantized, added = change.pop("quantized", False), change.pop("added", 0)
    twice, own = change.pop("twice", False), change.pop("own", False)
    gathered = change.pop("gathered", False)
    model = Model(**change)
    if quantized:
        model.lm_head.quant_method = type("Other", (UnquantizedEmbeddingMethod,), {})()
    model.lm_head.shard_indices.num_added_elements = added
    if twice:
        once = model.compute_logits
        model.compute_logits = lambda hidden: once(hidden) if once(hidden) is not None else None
    if own:
        model.processor = type("Own", (LogitsProcessor,), {})(VOCAB)
    head = stage_logits(model)
    if gathered:  # as of a model that projects by its embedding itself
        model.lm_head.tp_size = 2
        gather_by(model, lambda logits: logits)
    assert reason in OfferedRows(head, torch.randn(3, HIDDEN)).reason


@pytest.mark.parametrize(
    ("change", "whole"),
    [
        ({"scale": 2.0}, False),
        ({"after": lambda x: x.mul_(2)}, True),
        ({"after": lambda x: x[:, :10].add(1)}, True),
    ],
)
def test_a_model_that_edits_its_logits_gets_whole_rows(change, whole):
    model = Model(**change)
    model.lm_head.tp_size, model.lm_head.tp_rank = 2, 1
    model.lm_head.num_embeddings_per_partition = 512
    model.lm_head.shard_indices = SimpleNamespace(num_added_elements=0)
    gather_by(model, lambda logits: logits)
    head, hidden = stage_logits(model), torch.randn(3, HIDDEN)
    assert head.columns == (512, VOCAB)
    kept = hidden.clone()
    logits = head.compute_first(hidden)
    assert torch.equal(hidden, kept)
    assert torch.equal(logits, head.compute(hidden))
    assert (head.shard, head.columns) == ((None, (0, VOCAB)) if whole else (512, (512, VOCAB)))


def test_a_head_that_stays_is_left_as_it_was():
    model = Model()
    offered = OfferedRows(stage_logits(model), torch.randn(3, HIDDEN))
    packed = model.lm_head.cpu_linear
    offered.close(taken=False)
    assert model.lm_head.cpu_linear is packed


def runner(ran):
    """What is timed; ``ran``: its passes."""
    return SimpleNamespace(
        _dummy_run=lambda rows, **how: ran.append((rows, how)),
        model_config=SimpleNamespace(get_hidden_size=lambda: HIDDEN, dtype=torch.float32),
        vllm_config=VllmConfig(),
        device=torch.device("cpu"),
    )


def test_stages_say_how_long_their_parts_take():
    ran = []
    assert time_parts(runner(ran), None, 7, HostDevice()).projection == 0
    assert all(seen == (7, {"uniform_decode": True}) for seen in ran)
    measured = time_parts(runner(ran), stage_logits(Model()), 7, HostDevice())
    assert measured.projection > 0
    assert measured.layers > 0


def test_a_busy_neighbour_decides_no_part(monkeypatch):
    """Parts stay for the engine's life: they are settled by work, not by the clock."""
    clock, work = itertools.count(step=10**9), itertools.count(step=2_000_000)
    monkeypatch.setattr("time.monotonic_ns", clock.__next__)
    monkeypatch.setattr("time.thread_time_ns", work.__next__)
    measured = time_parts(runner([]), stage_logits(Model()), 7, HostDevice())
    assert measured.layers == measured.projection == pytest.approx(0.002)

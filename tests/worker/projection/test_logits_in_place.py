"""Where the projection puts its result."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm", reason="the module belongs to sipipe.vllm")

from tests.worker.projection.test_rows import gather_by  # noqa: E402
from vllm import _custom_ops as ops  # noqa: E402
from vllm.config import VllmConfig, set_current_vllm_config  # noqa: E402
from vllm.model_executor.layers.logits_processor import LogitsProcessor  # noqa: E402

from sipipe import cpu_features  # noqa: E402
from sipipe.worker.projection.logits import StageLogits  # noqa: E402

HIDDEN, VOCAB = 64, 320


class Model(torch.nn.Module):
    """A model whose projection is given."""

    def __init__(self, project: Any) -> None:
        super().__init__()
        self.compute_logits = project


def stage_logits(project: Any) -> StageLogits:
    config = SimpleNamespace(get_vocab_size=lambda: VOCAB)
    return StageLogits(SimpleNamespace(model=Model(project), model_config=config))


# vLLM asks itself in this way
@pytest.mark.skipif(not ops._supports_onednn, reason="no oneDNN in this vLLM")  # noqa: SLF001
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 5, 32])
def test_vllm_s_projection_lands_where_it_should(dtype, rows):
    if dtype == torch.bfloat16 and cpu_features.slow():
        pytest.skip("oneDNN has no bfloat16 here, and vLLM multiplies by torch")
    weight = torch.randn(VOCAB, HIDDEN, dtype=dtype)
    handler = ops.create_onednn_mm(weight.t(), 32)
    logits = stage_logits(lambda hidden: ops.onednn_mm(handler, hidden, None))
    hidden = torch.randn(rows, HIDDEN, dtype=dtype)
    into = torch.full((rows, VOCAB), torch.nan, dtype=dtype)
    found = logits.compute(hidden, into)
    assert found.data_ptr() == into.data_ptr()
    assert torch.equal(found, logits.compute(hidden))


def test_a_result_that_lies_elsewhere_is_whole():
    def capped(hidden):
        product = torch.empty((len(hidden), VOCAB), dtype=hidden.dtype)
        torch.mm(hidden, weight.t(), out=product)
        return torch.tanh(product / 30.0) * 30.0

    weight = torch.randn(VOCAB, HIDDEN)
    logits = stage_logits(capped)
    hidden, into = torch.randn(3, HIDDEN), torch.empty(3, VOCAB)
    found = logits.compute(hidden, into)
    assert found.data_ptr() != into.data_ptr()
    assert torch.equal(found, capped(hidden))


@pytest.mark.parametrize("into", [torch.empty(VOCAB, 3).T, torch.empty(3, VOCAB + 1)])
def test_memory_that_does_not_fit_is_left_alone(into):
    logits = stage_logits(lambda hidden: torch.empty((len(hidden), VOCAB), dtype=hidden.dtype))
    assert logits.compute(torch.randn(3, HIDDEN), into).data_ptr() != into.data_ptr()


def test_only_one_result_lies_there():
    places = []

    def two(hidden):
        places.extend(torch.empty((len(hidden), VOCAB), dtype=hidden.dtype) for _ in range(2))
        return places[0]

    into = torch.empty(3, VOCAB)
    stage_logits(two).compute(torch.randn(3, HIDDEN), into)
    assert [place.data_ptr() == into.data_ptr() for place in places] == [True, False]


def test_ranks_gather_whole_rows_of_their_columns():
    """Of equal parts, so that the last one is padded again."""
    whole, parts = torch.randn(3, VOCAB), []

    def gather(columns):
        parts.append(columns)
        return torch.cat(parts, 1)

    for rank in range(2):
        logits = rank_logits(rank, gather)
        start, stop = logits.columns
        found = logits.gather_rows(whole[:, start:stop])
    assert [part.shape for part in parts] == [(3, 192)] * 2
    assert torch.equal(found, whole)
    left = rank_logits(1, lambda _: None)
    assert left.gather_rows(whole[:, 192:]) is None, "as vLLM leaves a rank"


def rank_logits(rank: int, gather: Any) -> StageLogits:
    """Logits of one of two ranks, whose columns are padded to 192 each."""
    model = Model(None)
    with set_current_vllm_config(VllmConfig()):
        model.processor = LogitsProcessor(VOCAB)
    model.lm_head = SimpleNamespace(
        tp_size=2,
        tp_rank=rank,
        num_embeddings_per_partition=192,
        shard_indices=SimpleNamespace(num_added_elements=0),
    )
    gather_by(model, gather)
    config = SimpleNamespace(get_vocab_size=lambda: VOCAB)
    return StageLogits(SimpleNamespace(model=model, model_config=config, lora_config=None))

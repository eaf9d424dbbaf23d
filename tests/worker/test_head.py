"""What a head of vLLM's is handed, and what it is spared; the speculator is a stand-in."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.config import VllmConfig
from vllm.config.load import LoadConfig
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader
from vllm.model_executor.models.utils import PPMissingLayer
from vllm.v1.attention.backends.utils import PAD_SLOT_ID

from sipipe.errors import UnsupportedError
from sipipe.worker.hooks import head as module
from sipipe.worker.hooks.head import BlockTablesOfBatch, Head, HeadBatch

ROWS, TOKENS, K = 4, 16, 3
VOCABULARY = 4


class Speculator:
    """Proposes as vLLM's does: the first draft is drawn in any case."""

    num_speculative_steps = K
    max_model_len = 64
    vocab_size = VOCABULARY
    vllm_config = VllmConfig()
    kv_cache_config = None

    def __init__(self):
        self.input_buffers = SimpleNamespace(
            query_start_loc=torch.zeros(ROWS + 1, dtype=torch.int32),
            seq_lens=torch.zeros(ROWS, dtype=torch.int32),
            positions=torch.zeros(TOKENS, dtype=torch.int64),
        )
        self.draft_tokens = torch.zeros(ROWS, K, dtype=torch.int64)
        self.drawn = 0
        self.read = []

    def _build_attn_metadata(self, *_args, **_kwargs):
        return {}

    def sample_draft(self, hidden, *_):
        self.drawn += 1
        return torch.full((len(hidden),), 7)

    def propose(
        self,
        batch,
        _metadata,
        _slots,
        hidden,
        _taps,
        _drawn,
        _rejected,
        following,
        *_,
        num_speculative_tokens,
    ):
        count = batch.num_reqs
        self.read = [*batch.input_ids.tolist(), *following[:count].tolist()]
        self.draft_tokens[:count, 0] = self.sample_draft(hidden[:count])
        if not num_speculative_tokens:
            self.draft_tokens[:count].fill_(-1)
        return self.draft_tokens[:count]


@pytest.mark.parametrize("steps", [0, K])
def test_a_head_that_only_reads_multiplies_by_no_projection(monkeypatch, steps):
    monkeypatch.setattr(module, "build_slot_mappings_by_layer", lambda *_: {})
    speculator = Speculator()
    runner = SimpleNamespace(
        max_num_reqs=ROWS,
        max_num_tokens=TOKENS,
        device=torch.device("cpu"),
        block_tables=SimpleNamespace(block_sizes=[4]),
    )
    lengths = np.array([2, 3], np.int32)
    sequences = torch.tensor([2, 3], dtype=torch.int32)
    batch = HeadBatch(
        num_reqs=2,
        num_tokens=5,
        num_tokens_after_padding=5,
        num_scheduled_tokens=lengths,
        query_start_loc_np=np.array([0, 2, 5], np.int32),
        query_start_loc=torch.tensor([0, 2, 5], dtype=torch.int32),
        seq_lens=sequences,
        seq_lens_cpu_upper_bound=sequences,
        idx_mapping=torch.arange(2),
        input_ids=torch.arange(5, dtype=torch.int32),
        positions=torch.tensor([0, 1, 0, 1, 2]),
        tables=[torch.zeros(2, 4, dtype=torch.int32)],
        slots=torch.zeros(1, 5, dtype=torch.int64),
    )
    none = torch.zeros(2, dtype=torch.int32)
    drafts = Head(speculator, runner).run(
        batch,
        torch.zeros(5, 8),
        None,
        drawn=none,
        rejected=none,
        following=torch.tensor([VOCABULARY + 8, 1]),
        steps=steps,
    )
    assert speculator.read == [0, 1, 2, 3, 3, 3, 1], "an image's number may be none of its tokens"
    assert drafts.shape == (2, steps)
    assert speculator.drawn == bool(steps)
    assert speculator.sample_draft(torch.zeros(1, 8)).tolist() == [7], "it is its own again"


@pytest.mark.parametrize(
    ("loader", "refused"),
    [(DummyModelLoader(LoadConfig(load_format="dummy")), False), (SimpleNamespace(), True)],
)
def test_an_embedding_that_a_format_cannot_give_is_refused_by_name(monkeypatch, loader, refused):
    """The last stage has none of its own to share; with made-up weights any will do."""
    monkeypatch.setattr(module, "get_model_loader", lambda _: loader)
    runner = SimpleNamespace(
        model=None,
        vllm_config=SimpleNamespace(load_config=SimpleNamespace(load_format="sharded_state")),
    )
    draft = SimpleNamespace(has_own_embed_tokens=False)
    draft_inner = SimpleNamespace(embed_tokens=object())
    target_inner = SimpleNamespace(embed_tokens=PPMissingLayer())

    def lend():
        module.lend_embedding(runner, pytest.fail, draft, draft_inner, target_inner)

    if refused:
        with pytest.raises(UnsupportedError, match="--load-format sharded_state: SimpleNamespace"):
            lend()
    else:
        lend()


SIZE = 4
WIDTH = 5


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(0, 3)), min_size=1, max_size=4),
    st.integers(0, 4),
    st.integers(0, 3),
)
def test_no_token_has_a_slot_where_its_request_may_not_write(requests, more, padding):
    """Behind its last block, a table may have another request's of before."""
    lengths = [length for length, _ in requests]
    starts = np.concatenate(([0], np.cumsum([1 + beyond for _, beyond in requests])))
    tables = torch.arange(100, 100 + len(requests) * WIDTH, dtype=torch.int32).reshape(-1, WIDTH)
    count, tokens = len(requests), int(starts[-1]) + padding
    held = BlockTablesOfBatch([SIZE], 40, torch.device("cpu"))
    batch = SimpleNamespace(
        num_tokens=1,
        tables=[tables],
        slots=torch.zeros(1, 1, dtype=torch.int64),
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
    )
    held.hold(batch, more)
    at = [length - 1 + place for length, beyond in requests for place in range(beyond + 1)]
    positions = torch.tensor([*at, *[0] * padding])
    for out in (None, torch.zeros(1, 40, dtype=torch.int64)):
        (found,) = held.compute_slot_mappings(
            torch.arange(count), torch.from_numpy(starts).int(), positions, tokens, out=out
        ).tolist()
        for row in range(count):
            for token in range(starts[row], starts[row + 1]):
                block = int(tables[row, min(at[token] // SIZE, WIDTH - 1)])
                slot = block * SIZE + at[token] % SIZE
                allowed = at[token] < lengths[row] + more
                assert found[token] == (slot if allowed else PAD_SLOT_ID)
        assert found[starts[-1] :] == [PAD_SLOT_ID] * padding

"""The kernels of vLLM's second runner on a CPU beside slow, obvious twins, in vLLM's own calls."""

import inspect
import math
from importlib import import_module
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytest.importorskip("vllm", reason="the kernels are vLLM's")

from tests.worker.kernel_twins import TWINS  # noqa: E402
from vllm.v1.worker import mamba_utils, utils  # noqa: E402
from vllm.v1.worker.gpu import block_table, buffer_utils, input_batch  # noqa: E402
from vllm.v1.worker.gpu.mm import rope  # noqa: E402
from vllm.v1.worker.gpu.model_states import mamba_hybrid  # noqa: E402
from vllm.v1.worker.gpu.sample import logprob, prompt_logprob  # noqa: E402

from sipipe.worker.cpu_kernels import launch  # noqa: E402

ROWS, LONGEST, TOKENS, BLOCK = 12, 64, 160, 4
CPU = torch.device("cpu")


class Twin:
    """A slow one, as a kernel."""

    def __init__(self, function):
        self._function = function

    def __getitem__(self, grid):
        return lambda *args, **kwargs: self._function(grid, *args, **kwargs)


@pytest.fixture(scope="module", autouse=True)
def installed():
    """Ours, in vLLM's modules, until the last test, as a CPU worker has them."""
    from vllm.v1.worker.cpu import buffer_utils as on_host

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(buffer_utils, "UvaBuffer", on_host.UvaBuffer)
        patch.setattr(buffer_utils, "is_uva_available", lambda: True)
        for name in [*launch.ARRAYS, *launch.TENSORS]:
            module, kernel = place(name)
            patch.setattr(module, kernel, getattr(module, kernel))  # to be undone
        patch.setattr(launch.triton, "next_power_of_2", None, raising=False)
        launch.install()
        yield


def place(name):
    below, _, kernel = name.rpartition(".")
    return import_module(f"vllm.v1.worker.{below}"), kernel


def both(run):
    """What ``run`` gives with ours, after comparing it with what it gives with the slow ones."""
    ours = run()
    with pytest.MonkeyPatch.context() as patch:
        for name, twin in TWINS.items():
            patch.setattr(*place(name), Twin(twin))
        theirs = run()
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other)
    return ours


ELSEWHERE = {
    # Of addresses alone: tests/engine/test_device_sampling.py has stock's tokens.
    "gpu.model_states.prompt_embeds._apply_prompt_embeds_kernel",
    # test_prepare.py compares these with SiPipe's own preparation, whose twin is in test_kernels.py.
    "gpu.input_batch._prepare_pos_seq_lens_kernel",
    "gpu.input_batch._combine_sampled_and_draft_tokens_kernel",
}


def test_every_kernel_has_a_twin():
    assert {*TWINS, *ELSEWHERE} == {*launch.ARRAYS, *launch.TENSORS}


def test_a_kernel_of_ours_that_asks_for_what_vllm_does_not_give_is_named():
    def theirs(a_ptr, size):
        pass

    def ours(a_ptr, other):
        pass

    with pytest.raises(TypeError, match="theirs has no other"):
        launch.Launch(theirs, ours, launch.array)


def test_arguments_are_handed_on_by_name():
    """Others of vLLM's are left out, wherever they are."""
    calls = []

    def theirs(new, b_ptr, a_ptr, size):
        pass

    def ours(grid, a_ptr, size, later=None):
        calls.append((grid, a_ptr, size, later))

    launch.Launch(theirs, ours, launch.array)[(2, 3)](0, 1, torch.tensor([7]), size=4, num_warps=1)
    assert calls == [((2, 3), np.array([7]), 4, None)]


requests = st.lists(
    st.tuples(st.integers(0, 30), st.integers(1, 12), st.integers(0, 40)), min_size=1, max_size=ROWS
)
"""Of each: computed tokens, scheduled tokens, tokens of its prompt."""


class Batch:
    """Requests in rows of vLLM's states, in another order, with all that kernels read of them."""

    def __init__(self, found, seed):
        random = np.random.default_rng(seed)
        self.count = len(found)
        computed, scheduled, prefill = np.array(found, np.int32).T.copy()
        rows = random.permutation(ROWS)[: self.count]
        self.index = torch.from_numpy(rows)
        self.tokens = int(scheduled.sum())
        starts = np.full(ROWS + 1, self.tokens, np.int32)
        starts[: self.count + 1] = [0, *np.cumsum(scheduled)]
        self.starts = torch.from_numpy(starts)[: self.count + 1]
        self.computed, self.prefill = (torch.zeros(ROWS, dtype=torch.int32) for _ in range(2))
        self.computed[self.index] = torch.from_numpy(computed)
        self.prefill[self.index] = torch.from_numpy(prefill)
        self.known = torch.from_numpy(random.integers(0, 999, (ROWS, LONGEST), np.int32))
        self.random = random


batches = st.builds(Batch, requests, st.integers(0, 99))


@settings(max_examples=40, deadline=None)
@given(batch=batches)
def test_tokens_of_prompts(batch):
    def prepare():
        ids = torch.full((TOKENS,), -7, dtype=torch.int32)
        following = torch.full((1, ROWS), -7, dtype=torch.int32)
        input_batch.prepare_prefill_inputs(
            ids, following, batch.index, batch.starts, batch.known, batch.prefill, batch.computed
        )
        targets = prompt_logprob.get_prompt_logprobs_token_ids(
            batch.tokens, batch.starts, batch.index, batch.computed, batch.known
        )
        return ids, following, targets

    ids, *_ = both(prepare)
    assert (ids[batch.tokens :] == -7).all(), "wrote past its part"


@settings(max_examples=40, deadline=None)
@given(batch=batches, before=st.booleans())
def test_drawn_tokens_are_taken_over(batch, before):
    drawn = torch.from_numpy(batch.random.integers(0, 999, (batch.count, 1)))
    counts = torch.from_numpy(batch.random.integers(0, 2, batch.count, np.int32))
    masked = batch.index.clone()
    masked[0] = -1

    def update():
        states = [batch.computed.clone(), torch.zeros(ROWS, 1, dtype=torch.int64)]
        known, total = batch.known.clone(), batch.prefill.clone()
        input_batch.post_update(
            masked,
            *states,
            None,
            drawn,
            counts,
            torch.zeros_like(counts),
            None if before else batch.starts,
            known,
            total,
        )
        input_batch.post_update_num_computed_tokens(batch.index, states[0], batch.starts)
        accepted = torch.full((ROWS,), -7, dtype=torch.int32)
        # The kernels by their names in vLLM, which `both` replaces.
        scatter = mamba_hybrid._scatter_num_accepted_kernel  # noqa: SLF001
        scatter[(batch.count,)](masked, counts, accepted)
        fill = mamba_hybrid._fill_num_accepted_kernel  # noqa: SLF001
        fill[(1,)](batch.index[:1], accepted, 3)
        return *states, known, total, accepted

    both(update)


@settings(max_examples=40, deadline=None)
@given(
    batch=batches, widths=st.lists(st.integers(16, 20), min_size=1, max_size=2), seen=st.booleans()
)
def test_block_tables_and_slots(batch, widths, seen):
    """Of one group of KV cache and of two, one without slots; padded with rows of nobody."""
    groups, padded = len(widths), min(batch.count + 2, ROWS)
    enabled = [True, False][:groups]
    new = {}
    if "sliding_window_reach" in inspect.signature(block_table.BlockTables).parameters:
        new["sliding_window_reach"] = [6, 0][:groups]  # vLLM 0.33
    blocks = [batch.random.integers(1, 999, (ROWS, 16)).tolist() for _ in widths]

    def gather():
        tables = block_table.BlockTables(
            [BLOCK] * groups, ROWS, TOKENS, widths, CPU, slot_mapping_enabled=enabled, **new
        )
        for row in range(ROWS):
            first = tuple(of[row][:5] for of in blocks)
            tables.append_block_ids(row, first, overwrite=True)
            tables.append_block_ids(row, tuple(of[row][5:] for of in blocks), overwrite=False)
        tables.apply_staged_writes()
        for table in tables.input_block_tables:
            table.fill_(-7)
        some = {"num_computed_tokens": batch.computed} if new and seen else {}
        found = tables.gather_block_tables(batch.index, padded, **some)
        positions = torch.zeros(TOKENS, dtype=torch.int64)
        input_batch.prepare_pos_seq_lens(
            batch.index,
            batch.starts,
            batch.computed,
            positions,
            torch.zeros(ROWS, dtype=torch.int32),
        )
        slots = tables.compute_slot_mappings(batch.index, batch.starts, positions, TOKENS)
        masked, ended = batch.index.clone(), positions.clone()
        masked[0], ended[: batch.starts[1]] = -1, 999_999  # of another batch
        fewer = tables.compute_slot_mappings(masked, batch.starts, ended, TOKENS, slots.clone())
        none = tables.compute_slot_mappings(masked[:0], batch.starts * 0, ended, TOKENS, slots * 1)
        return *found, slots, fewer, none, *tables.input_block_tables

    found = both(gather)
    assert (found[0][batch.count :] == 0).all()


@settings(max_examples=20, deadline=None)
@given(batch=batches)
def test_positions_in_three_dimensions(batch):
    known = batch.random.integers(0, 99, (3, LONGEST)).astype(np.int32)
    model = SimpleNamespace(get_mrope_input_positions=lambda *_: (torch.from_numpy(known), 5))

    def prepare():
        states = rope.RopeState(3, ROWS, TOKENS, LONGEST, CPU)
        for row in batch.index.tolist():
            states.init_prefill_positions(row, model, [], [])
        states.apply_staged_writes()
        states.prepare_positions(batch.index, batch.starts, batch.prefill, batch.computed)
        return [states.positions]

    both(prepare)


@settings(max_examples=40, deadline=None)
@given(batch=batches, seed=st.integers(0, 99))
def test_recurrent_states_come_along_to_another_block(batch, seed):
    """Of a convolution in both of its layouts, and others, whose pages are wider than a state."""
    random = torch.Generator().manual_seed(seed)
    tables = torch.stack([torch.randperm(40, generator=random) for _ in range(ROWS)]).int()
    pages = torch.randn(3, 40, 64, generator=random)
    masked = batch.index.clone()
    masked[0] = -1

    def numbers(*values):
        return torch.tensor(values, dtype=torch.int32)

    def migrate():
        memory = pages.clone()
        states = SimpleNamespace(
            is_initialized=True,
            num_states=3,
            block_table_ptrs=torch.tensor([tables.data_ptr()]),
            block_table_stride_req=40,
            state_base_addrs=torch.tensor([page.data_ptr() for page in memory]),
            state_block_strides=torch.tensor([256, 256, 256]),
            state_elem_sizes=numbers(4, 4, 2),
            state_inner_sizes=torch.tensor([7, 1, 25]),
            state_conv_widths=numbers(3, 3, 0),
            state_group_indices=numbers(0, 0, 0),
            state_dim_row_count=numbers(0, 5, 0),
            state_dim_row_stride=torch.tensor([0, 16, 0]),
            block_size=BLOCK,
            num_accepted_tokens_out=torch.ones(ROWS, dtype=torch.int32),
        )
        column = (batch.computed + BLOCK - 1) // BLOCK - 1
        accepted, before, bias = (torch.ones(ROWS, dtype=torch.int32) for _ in range(3))
        mamba_hybrid.preprocess_mamba_align_fused_kernel[(1,)](
            batch.index,
            column,
            batch.computed,
            batch.starts,
            accepted,
            before,
            bias,
            batch.count,
            BLOCK_SIZE=256,
            MAMBA_BLOCK_SIZE=BLOCK,
        )
        context = mamba_utils.MambaSpecDecodeGPUContext
        context.run_fused_precopy(states, batch.count, column, before, bias, masked)
        context.run_fused_postprocess_align(
            states, batch.count, accepted, column, batch.computed, masked
        )
        return memory, column, accepted, before, bias

    both(migrate)


class Zeroer(utils.KVBlockZeroer):
    """vLLM's, with the tables of two tensors in place of those of a model's layers."""

    def __init__(self, memory):
        self.device = CPU
        self._meta = (
            torch.tensor([tensor.data_ptr() for tensor in memory], dtype=torch.uint64),
            torch.tensor([8, 16]),
            torch.tensor([8, 5]),
            1,
            8,
            2,
        )


def test_blocks_are_zeroed():
    def zero():
        memory = [torch.ones(6, 8, dtype=torch.int32) for _ in range(2)]
        Zeroer(memory).zero_block_ids([0, 2])
        return memory

    both(zero)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_log_probabilities_and_ranks_of_a_prompts_tokens(dtype):
    torch.manual_seed(0)
    logits, chosen = torch.randn(5, 40).to(dtype), torch.arange(5)

    def score():
        found = logprob.compute_topk_scores(logits, 3, chosen)
        return found.logprobs, found.selected_token_ranks

    both(score)


def test_what_stands_for_an_image_is_as_unlikely_as_can_be():
    """Its number may be none of the vocabulary's, where vLLM's kernel reads behind the row."""
    found = logprob.compute_topk_scores(torch.zeros(2, 40), 1, torch.tensor([3, 40]))
    assert found.logprobs[:, 0].tolist() == [pytest.approx(-math.log(40)), -math.inf]
    assert found.selected_token_ranks.tolist() == [40, 40]

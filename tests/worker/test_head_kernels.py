"""The kernels of vLLM's speculators on a CPU beside slow, obvious twins, in vLLM's own calls."""

import copy
from importlib import import_module
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytest.importorskip("vllm", reason="the kernels are vLLM's")

from vllm.v1.worker.gpu.spec_decode.standalone_ar import speculator as standalone  # noqa: E402
from vllm.v1.worker.gpu.spec_decode.target_dependent_ar import speculator  # noqa: E402

from sipipe.worker.cpu_kernels import drafting  # noqa: E402
from sipipe.worker.cpu_kernels.launch import Launch  # noqa: E402

ROWS = 9
STEPS = 3
LONGEST = 40


@pytest.fixture(scope="module", autouse=True)
def installed():
    """Ours, in vLLM's modules, until the last test."""
    with pytest.MonkeyPatch.context() as patch:
        for (module, name), function in drafting.KERNELS.items():
            place = import_module(module)
            kernel = getattr(place, name)
            if not isinstance(kernel, Launch):
                patch.setattr(place, name, Launch(kernel, function, lambda tensor: tensor))
        yield


def some(rng, *shape, most=900, dtype=torch.int64):
    return torch.from_numpy(rng.integers(0, most, shape)).to(dtype)


def buffers(rng, tokens):
    """A head's own input buffers, with what was in them before."""
    return SimpleNamespace(
        input_ids=some(rng, tokens, dtype=torch.int32),
        positions=some(rng, tokens, most=LONGEST),
        query_start_loc=some(rng, ROWS + 1, dtype=torch.int32),
        seq_lens=some(rng, ROWS, dtype=torch.int32),
    )


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 7), st.integers(0, 6), st.booleans()), min_size=1, max_size=ROWS
    ),
    st.integers(0, 999),
)
def test_a_head_reads_each_token_with_the_next_one(requests, seed):
    rng = np.random.default_rng(seed)
    lengths = [length for length, _, _ in requests]
    rejected = [min(wrong, length - 1) for length, wrong, _ in requests]
    sampled = [int(drawn) for _, _, drawn in requests]
    count, total = len(lengths), sum(lengths)
    starts = np.concatenate(([0], np.cumsum(lengths)))
    rows = torch.from_numpy(rng.permutation(ROWS)[:count])
    batch = SimpleNamespace(
        num_reqs=count,
        input_ids=some(rng, total, dtype=torch.int32),
        positions=some(rng, total, most=LONGEST),
        idx_mapping=rows,
        query_start_loc=torch.from_numpy(starts).int(),
        seq_lens=some(rng, count, dtype=torch.int32),
    )
    own = buffers(rng, total + 5)
    before = copy.deepcopy(own)
    last_indices = some(rng, ROWS)
    step = torch.tensor(2)
    drawn, of_prompt = some(rng, ROWS), some(rng, ROWS, dtype=torch.int32)
    speculator.prepare_prefill_inputs(
        last_indices,
        step,
        own,
        batch,
        torch.tensor(sampled, dtype=torch.int32),
        torch.tensor(rejected, dtype=torch.int32),
        drawn,
        of_prompt,
        ROWS,
    )
    assert step == 0
    for request in range(count):
        first, stop = starts[request], starts[request + 1] - rejected[request]
        following = (drawn if sampled[request] else of_prompt)[rows[request]]
        expected = [*batch.input_ids[first + 1 : stop].tolist(), int(following)]
        assert own.input_ids[first:stop].tolist() == expected
        assert own.positions[first:stop].tolist() == batch.positions[first:stop].tolist()
        assert last_indices[request] == stop - 1
        # What is behind a rejected draft is nobody's, and stays what it was.
        behind = slice(stop, starts[request + 1])
        assert own.input_ids[behind].tolist() == before.input_ids[behind].tolist()
    assert own.query_start_loc.tolist() == [*starts, *[total] * (ROWS - count)]
    assert own.seq_lens.tolist() == [*batch.seq_lens.tolist(), *[0] * (ROWS - count)]
    assert last_indices[count:].tolist() == [0] * (ROWS - count)


@settings(deadline=None)
@given(st.integers(1, ROWS), st.booleans(), st.integers(0, 999))
def test_the_first_step_begins_behind_what_was_right(count, advance, seed):
    rng = np.random.default_rng(seed)
    own = buffers(rng, ROWS)
    before = copy.deepcopy(own)
    drafts = some(rng, ROWS, STEPS)
    lengths = some(rng, count, most=LONGEST, dtype=torch.int32) + STEPS
    rejected = some(rng, count, most=STEPS, dtype=torch.int32)
    keys = some(rng, ROWS)
    keys_before = keys.clone()
    speculator.prepare_decode_inputs(
        drafts[:count, 0],
        lengths,
        rejected,
        own,
        keys,
        LONGEST,
        ROWS,
        advance_draft_positions=advance,
    )
    assert own.query_start_loc.tolist() == [min(place, count) for place in range(ROWS + 1)]
    for request in range(count):
        assert own.input_ids[request] == drafts[request, 0]
        assert keys[request] == keys_before[request] + 1
        length = int(lengths[request] - rejected[request])
        position = int(before.positions[request])
        if advance:
            length, position = min(length + 1, LONGEST), min(position + 1, LONGEST - 1)
        assert (own.seq_lens[request], own.positions[request]) == (length, position)
    assert own.seq_lens[count:].tolist() == [0] * (ROWS - count)
    assert keys[count:].tolist() == keys_before[count:].tolist()


@settings(deadline=None)
@given(st.integers(1, ROWS), st.integers(0, STEPS - 1), st.booleans(), st.integers(0, 999))
def test_a_step_hands_its_draft_on_unless_it_is_the_last(count, step, advance, seed):
    rng = np.random.default_rng(seed)
    own = buffers(rng, ROWS)
    before = copy.deepcopy(own)
    tokens = some(rng, count)
    hidden = torch.from_numpy(rng.standard_normal((count, 4)))
    out = some(rng, ROWS, STEPS)
    out_before = out.clone()
    following = torch.zeros(ROWS, 4, dtype=hidden.dtype)
    keys = some(rng, ROWS)
    keys_before = keys.clone()
    speculator.update_draft_inputs(
        tokens,
        torch.tensor(step),
        hidden,
        out,
        following,
        own,
        keys,
        count,
        LONGEST,
        STEPS,
        advance_draft_positions=advance,
    )
    expected = out_before.clone()
    goes_on = step < STEPS - 1
    for request in range(count):
        expected[request, step] = tokens[request]
        position, length = int(before.positions[request]), int(before.seq_lens[request])
        if goes_on and advance:
            position, length = min(position + 1, LONGEST - 1), min(length + 1, LONGEST)
        assert (own.positions[request], own.seq_lens[request]) == (position, length)
        handed = tokens[request] if goes_on else before.input_ids[request]
        assert own.input_ids[request] == handed
        assert keys[request] == keys_before[request] + goes_on
    assert torch.equal(out, expected)
    assert torch.equal(following[:count], hidden if goes_on else torch.zeros_like(hidden))


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 7), st.integers(0, 6)), min_size=1, max_size=ROWS),
    st.integers(0, 999),
)
def test_a_draft_model_reads_each_token_and_the_next_one_behind_them(requests, seed):
    rng = np.random.default_rng(seed)
    lengths = [length for length, _ in requests]
    rejected = [min(wrong, length - 1) for length, wrong in requests]
    count, total = len(lengths), sum(lengths)
    starts = np.concatenate(([0], np.cumsum(lengths)))
    firsts = rng.integers(0, LONGEST, count)
    rows = torch.from_numpy(rng.permutation(ROWS)[:count])
    positions = np.concatenate(
        [np.arange(first, first + length) for first, length in zip(firsts, lengths, strict=True)]
    )
    batch = SimpleNamespace(
        num_reqs=count,
        num_tokens=total,
        input_ids=some(rng, total, dtype=torch.int32),
        positions=torch.from_numpy(positions),
        idx_mapping=rows,
        query_start_loc=torch.from_numpy(starts).int(),
        query_start_loc_np=starts,
        seq_lens=some(rng, count, most=LONGEST + 1, dtype=torch.int32),
    )
    written = buffers(rng, total + ROWS)
    tokens = some(rng, total + ROWS, dtype=torch.int32)
    places = some(rng, total + ROWS)
    last_indices = some(rng, ROWS)
    drawn = some(rng, ROWS)
    made = standalone.prepare_prefill_inputs(
        written,
        batch,
        drawn,
        torch.tensor(rejected),
        tokens,
        places,
        last_indices,
        ROWS,
        LONGEST,
    )
    assert made == total + count
    for request in range(count):
        first, stop = starts[request] + request, starts[request + 1] + request + 1
        right = lengths[request] - rejected[request]
        of_target = batch.input_ids[starts[request] : starts[request] + right].tolist()
        behind = [0] * rejected[request]
        expected = [*of_target, int(drawn[rows[request]]), *behind]
        assert tokens[first:stop].tolist() == expected
        counted = firsts[request] + np.arange(stop - first)
        assert places[first:stop].tolist() == np.minimum(counted, LONGEST - 1).tolist()
        assert last_indices[request] == first + right
    longer = starts + np.arange(count + 1)
    assert written.query_start_loc.tolist() == [*longer, *[made] * (ROWS - count)]
    lengths_now = (batch.seq_lens + 1).clamp(max=LONGEST).tolist()
    assert written.seq_lens.tolist() == [*lengths_now, *[0] * (ROWS - count)]
    assert last_indices[count:].tolist() == [0] * (ROWS - count)

"""What a stage keeps for its draft head, and what it hands the head; the head is a stand-in."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytest.importorskip("vllm", reason="hidden states are vLLM's")

from sipipe.messages.drafts import LEFT_OUT, DraftRequest  # noqa: E402
from sipipe.messages.step import int32_bytes, int32_view  # noqa: E402
from sipipe.worker.device import HostDevice  # noqa: E402
from sipipe.worker.drafter import NOTHING_KEPT, Drafter  # noqa: E402

BLOCK = 4
WIDTH = 30
SLOTS = 3
STEPS = 2


class Head:
    """Notes its batches; proposes the token that each row is told, and the next number."""

    steps = STEPS

    def __init__(self, error=None):
        self.ran = []
        self.error = error

    def run(self, batch, hidden, taps, *, drawn, rejected, following, steps):
        if self.error is not None:
            raise self.error
        told = {"drawn": drawn.tolist(), "rejected": rejected.tolist()}
        self.ran.append(
            SimpleNamespace(
                batch=batch, hidden=hidden, following=following.tolist(), steps=steps, **told
            )
        )
        return following[:, None] * 10 + torch.arange(steps)


class Buffer:
    def __init__(self, values, dtype=np.int32):
        self.np = np.array(values, dtype)


def prepared(requests, iteration=0):
    """An iteration of ``requests``, (computed, tokens, drafts, length of the prompt) each, in batch
    order; positions are those of each request, token ids number the tokens of the pass."""
    order = np.random.default_rng(iteration).permutation(len(requests))
    lengths = [tokens for _, tokens, _, _ in requests]
    starts = np.concatenate(([0], np.cumsum(lengths)))
    first_logits = np.concatenate(([0], np.cumsum([1 + drafts for _, _, drafts, _ in requests])))
    positions = np.concatenate([np.arange(first, first + n) for first, n, _, _ in requests])
    source = SimpleNamespace(
        starts=Buffer(starts),
        num_scheduled_tokens=Buffer(lengths),
        num_drafts=Buffer([drafts for _, _, drafts, _ in requests]),
        num_computed_tokens=Buffer([computed for computed, _, _, _ in requests]),
        prefill_lens=Buffer([prompt for _, _, _, prompt in requests]),
        first_logits=Buffer(first_logits),
        positions=Buffer(positions, np.int64),
    )
    samples = [computed + tokens >= prompt for computed, tokens, _, prompt in requests]
    drawn = [int(place) for place in order if samples[place]]
    rows = [row for place in drawn for row in range(first_logits[place], first_logits[place + 1])]
    total = int(starts[-1])
    inputs = SimpleNamespace(
        iteration=iteration,
        buffer_set=0,
        num_reqs=len(requests),
        num_tokens=total,
        num_logits=int(first_logits[-1]),
        logits_rows=np.array(rows, np.int64),
        following=np.array([0 if done else 7000 + i for i, done in enumerate(samples)], np.int64),
        output=SimpleNamespace(num_spec_tokens_to_schedule=2),
    )
    tables = torch.arange(len(requests) * WIDTH, dtype=torch.int32).reshape(-1, WIDTH)
    blocks = [
        tables[row, position // BLOCK]
        for row, position in zip(np.repeat(range(len(requests)), lengths), positions, strict=True)
    ]
    slots = torch.tensor(
        [int(block) * BLOCK + int(at) % BLOCK for block, at in zip(blocks, positions, strict=True)]
    )
    state = SimpleNamespace(
        input_batch=SimpleNamespace(
            input_ids=torch.arange(total, dtype=torch.int32), positions=torch.from_numpy(positions)
        ),
        hidden_states=torch.arange(total, dtype=torch.float32)[:, None],
        aux_hidden_states=None,
    )
    return inputs, source, state, (tables, slots[None]), drawn


def stage(source, state, tables, head, compare=lambda _: None, device=None):
    runner = SimpleNamespace(
        device=torch.device("cpu"),
        model=SimpleNamespace(),
        execute_model_state=state,
        prepare_attn=lambda _: ((tables[0],), tables[1]),
        block_tables=SimpleNamespace(block_sizes=[BLOCK]),
    )
    answers = []
    made = Drafter(
        head,
        runner,
        [source],
        stage_device=device or HostDevice(),
        slots=SLOTS,
        answer=answers.append,
        compare=compare,
    )
    return made, answers


REQUEST = st.one_of(
    # One that decodes, with drafts; one amid or at the end of its prompt.
    st.tuples(st.integers(4, 40), st.integers(0, 3)).map(lambda it: (it[0], 1 + it[1], it[1], 4)),
    st.tuples(st.integers(0, 30), st.integers(1, 9), st.integers(0, 9)).map(
        lambda it: (it[0], it[1], 0, it[0] + it[1] + it[2])
    ),
)


@settings(deadline=None)
@given(st.lists(REQUEST, min_size=1, max_size=7), st.data())
def test_the_head_runs_on_every_token_once_beside_the_one_that_follows(requests, data):
    requests = sorted(requests, key=lambda request: request[1])
    inputs, source, state, tables, drawn = prepared(requests)
    head = Head()
    made, answers = stage(source, state, tables, head)
    made.keep(inputs)
    starts = source.starts.np
    counts = [data.draw(st.integers(1, 1 + requests[place][2])) for place in drawn]
    expected = {}
    for place, (_, tokens, drafts, _) in enumerate(requests):
        ids = list(range(starts[place], starts[place] + tokens))
        if place not in drawn:
            expected[place] = [*ids[1:], 7000 + place]
            continue
        right = counts[drawn.index(place)]
        expected[place] = [*ids[1 : tokens - drafts - 1 + right], 100 + place]
    if drawn:
        last = [100 + place for place in drawn]
        made.propose(
            DraftRequest(
                number=1,
                iteration=0,
                steps=STEPS,
                drawn=int32_bytes(counts),
                last=int32_bytes(last),
            )
        )
        (answer,) = answers
        assert int32_view(answer.drafts).reshape(-1, STEPS).tolist() == [
            [10 * token, 10 * token + 1] for token in last
        ], "in the order of the scheduling output"
    seen = {place: [] for place in expected}
    for ran in head.ran:
        batch = ran.batch
        assert (np.diff(batch.num_scheduled_tokens) >= 0).all(), "the shorter first"
        for row in range(batch.num_reqs):
            first, stop = batch.query_start_loc_np[row : row + 2]
            stop -= ran.rejected[row]
            ids = batch.input_ids[first:stop].tolist()
            assert ran.hidden[first:stop, 0].tolist() == ids
            place = int(np.searchsorted(starts, ids[0], side="right")) - 1
            seen[place] += [*ids[1:], ran.following[row]]
            positions = batch.positions[first : batch.query_start_loc_np[row + 1]]
            assert batch.seq_lens[row] == positions[-1] + 1
            blocks = batch.tables[0][row, positions // BLOCK]
            slots = blocks * BLOCK + positions % BLOCK
            assert (
                batch.slots[0, first : batch.query_start_loc_np[row + 1]].tolist() == slots.tolist()
            )
            assert batch.tables[0].shape[1] * BLOCK >= min(
                batch.seq_lens.max() + STEPS, WIDTH * BLOCK
            )
    assert seen == expected


def ask(drafter, iteration, tokens, number=1):
    """Ask for drafts behind ``tokens``, of which each is the only one that was drawn of its request."""
    drafter.propose(
        DraftRequest(
            number=number,
            iteration=iteration,
            steps=STEPS,
            drawn=int32_bytes([1] * len(tokens)),
            last=int32_bytes(tokens),
        )
    )


def test_hidden_states_of_prompts_are_not_kept():
    inputs, source, state, tables, drawn = prepared(
        [(9, 3, 2, 4), (0, 90, 0, 90), (0, 100, 0, 110)]
    )
    head = Head()
    made, _ = stage(source, state, tables, head)
    made.keep(inputs)
    head.ran.clear()  # over the prompts
    ask(made, 0, [5] * len(drawn))
    [proposed] = head.ran
    assert len(proposed.hidden) == 1 + 3
    memory = proposed.hidden.untyped_storage()
    assert memory.nbytes() == proposed.hidden.nbytes, "no view of the whole pass"


def test_who_is_not_there_any_more_is_written_nowhere():
    inputs, source, state, tables, drawn = prepared([(9, 2, 1, 4), (12, 2, 1, 4)])
    head = Head()
    made, _ = stage(source, state, tables, head)
    made.keep(inputs)
    counts = [LEFT_OUT if place == 1 else 1 for place in drawn]
    made.propose(
        DraftRequest(
            number=1, iteration=0, steps=2, drawn=int32_bytes(counts), last=int32_bytes([5, 5])
        )
    )
    batch = head.ran[0].batch
    assert batch.tables[0][1].unique().tolist() == [0]
    assert batch.slots[0].tolist()[2:] == [0, 0]
    assert 0 not in batch.slots[0].tolist()[:2]


def test_what_nobody_asks_for_is_let_go():
    inputs, source, state, tables, _ = prepared([(9, 1, 0, 4)])
    made, answers = stage(source, state, tables, Head())
    for iteration in range(10):
        inputs.iteration = iteration
        made.keep(inputs)
    for iteration in range(10):
        ask(made, iteration, [5])
    kept = [answer.iteration for answer in answers if answer.drafts]
    assert kept == [*range(10)][-SLOTS:]


def test_prompts_are_read_where_no_drafts_are_asked_for_and_nothing_is_kept():
    """The head knows the prompts of those for whom drafts become worth it."""
    inputs, source, state, tables, drawn = prepared([(9, 1, 0, 4), (0, 5, 0, 9)])
    inputs.output.num_spec_tokens_to_schedule = 0
    head = Head()
    made, answers = stage(source, state, tables, head)
    made.keep(inputs)
    assert [len(ran.hidden) for ran in head.ran] == [5]
    ask(made, 0, [5] * len(drawn))
    assert [answer.drafts for answer in answers] == [b""]


def test_a_head_that_fails_is_answered_for():
    inputs, source, state, tables, _ = prepared([(9, 1, 0, 4), (0, 5, 0, 9)])
    made, answers = stage(source, state, tables, Head(RuntimeError("out of memory")))
    made.keep(inputs)
    for number in (1, 2):  # the second of an iteration that is not kept
        made.propose(
            DraftRequest(
                number=number, iteration=0, steps=2, drawn=int32_bytes([1]), last=int32_bytes([5])
            )
        )
    assert [answer.drafts for answer in answers] == [b"", b""]
    assert made.done == 2


class BusyDevice(HostDevice):
    """A device that is free when earlier iterations have ended, in nanoseconds of its own clock."""

    def __init__(self):
        self.free = 20_000_000

    def mark(self):
        return self.free


def test_a_pass_takes_the_devices_time_and_not_that_of_iterations_before_it():
    inputs, source, state, tables, _ = prepared([DECODES])
    device = BusyDevice()

    class Timed(Head):
        def run(self, *args, **kwargs):
            device.free += 3_000_000
            return super().run(*args, **kwargs)

    made, answers = stage(source, state, tables, Timed(), device=device)
    made.keep(inputs)
    made.propose(
        DraftRequest(number=1, iteration=0, steps=2, drawn=int32_bytes([1]), last=int32_bytes([5]))
    )
    assert answers[0].seconds == pytest.approx(3e-3)


PROMPT = (0, 5, 0, 9)
DECODES = (9, 1, 0, 4)


@pytest.mark.parametrize("requests", [[DECODES], [PROMPT], [DECODES, PROMPT]])
@pytest.mark.parametrize("error", [None, RuntimeError("out of memory")])
def test_ranks_compare_each_pass_of_the_head_and_nothing_else(requests, error):
    """A rank that has left a pass out would take part in others' sums of that pass with its next ones."""
    inputs, source, state, tables, drawn = prepared(requests)
    compared = []
    made, _ = stage(source, state, tables, Head(error), compared.append)
    made.keep(inputs)
    assert compared == [error] * (PROMPT in requests)
    compared.clear()
    ask(made, 0, [5] * len(drawn))
    kept = DECODES in requests and (error is None or PROMPT not in requests)
    assert compared == [error if kept else NOTHING_KEPT]


def test_ranks_whose_passes_differ_end():
    class OthersRanError(Exception):
        pass

    def compare(error):
        if error is not None:
            raise OthersRanError

    inputs, source, state, tables, _ = prepared([DECODES])
    made, answers = stage(source, state, tables, Head(RuntimeError("out of memory")), compare)
    made.keep(inputs)
    with pytest.raises(OthersRanError):
        ask(made, 0, [5])
    assert not answers

"""Drafts: found as a slow twin finds them, and verified with the draws of single steps."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.sampler.support import int32, memory_kept, proposed

from sipipe.best_effort import BestEffort
from sipipe.messages.params import SequenceParams
from sipipe.messages.start_records import NGramSettings
from sipipe.messages.step import Added, Step, int32_bytes
from sipipe.sampler.drafts import NGrams
from sipipe.sampler.kernels.ngrams import LOOKS
from sipipe.sampler.kernels.rows import NOT_DRAWN
from sipipe.sampler.main import Sampler
from sipipe.sampler.state import SequenceColumns

MOST, LONGEST, SHORTEST, VOCAB = 5, 4, 2, 60
LIKELY = 1e-9


def drafter():
    return NGrams(
        NGramSettings(
            num_speculative_tokens=MOST, prompt_lookup_max=LONGEST, prompt_lookup_min=SHORTEST
        ),
        VOCAB,
    )


def slow(tokens, indexed):
    """What came behind the last of the longest n-grams like the end of ``tokens`` that ends within
    the first ``indexed``."""
    for length in range(min(LONGEST, len(tokens) - 1), SHORTEST - 1, -1):
        end = tokens[len(tokens) - length :]
        for at in range(min(indexed, len(tokens)) - 1, length - 1, -1):
            if tokens[at - length : at] == end:
                found = list(tokens)
                for i in range(MOST):
                    found.append(found[at + i])
                return found[len(tokens) :]
    return []


small = st.lists(st.integers(0, 6), max_size=LOOKS)


@settings(max_examples=150, deadline=None)
@given(prompts=st.lists(small, min_size=1, max_size=4), data=st.data())
def test_proposals_are_those_of_a_slow_twin(prompts, data):
    drafts, sequences = drafter(), dict(enumerate(map(list, prompts)))
    for handle, tokens in sequences.items():
        drafts.join(handle, int32(tokens), int32([]))
    for _ in range(6):
        drawn = {
            h: data.draw(st.lists(st.integers(0, 6), min_size=1, max_size=3)) for h in sequences
        }
        handles = [handle for handle, tokens in drawn.items() for _ in tokens]
        tokens = [token for each in drawn.values() for token in each]
        found = proposed(drafts, handles, tokens, LIKELY)
        for handle, sequence in sequences.items():
            if len(sequence) + len(drawn[handle]) <= LOOKS:
                assert found.get(handle, []) == slow(sequence + drawn[handle], len(sequence))
            sequence += drawn[handle]
        drafts.append(handles, tokens)


def test_histories_grow_move_and_leave_their_place():
    drafts, phrase = drafter(), list(range(30))
    for handle in range(40):
        drafts.join(handle, int32(phrase * (handle % 9)), int32(phrase))
    for turn in range(400):
        drafts.append(list(range(40)), [turn % 30] * 40)
    assert proposed(drafts, [17], [10], LIKELY) == {17: [11, 12, 13, 14, 15]}
    for handle in range(40):
        drafts.leave(handle)
        drafts.leave(handle)

    def come_again():
        for handle in range(40):
            drafts.join(handle, int32(phrase * 9), int32([]))

    assert memory_kept(come_again) < 10_000, "places are taken again"


def test_what_was_wrong_is_not_proposed_for_long_and_what_was_right_is():
    drafts = drafter()
    drafts.join(1, int32([1, 2, 3] * 30), int32([]))
    offered = offers(drafts, [9, 1, 2, 8, 1, 2, 7, 1, 2, 6, 1, 2, 5, 1, 2, 4, 1, 2], worth=0.3)
    assert offered[2] >= 2
    assert offered[-1] <= 1
    assert offers(drafts, [1, 2, 3] * 20, worth=0.3)[-1] == MOST
    assert proposed(drafts, [1], [1], worth=1.0) == {}, "nothing is worth its row"


def offers(drafts, tokens, worth=0.55):
    """How many drafts are offered behind each of a sequence's next tokens."""
    found = []
    for token in tokens:
        found.append(len(proposed(drafts, [1], [token], worth).get(1, [])))
        drafts.append([1], [token])
    return found


def test_a_draft_ends_before_what_stands_for_an_image():
    drafts = drafter()
    drafts.join(1, int32([1, 2, 3, 4, VOCAB, 5, 6, 1]), int32([2]))
    assert proposed(drafts, [1], [3]) == {1: [4]}
    drafts.append([1], [3])
    assert proposed(drafts, [1], [4]) == {}


def test_a_copy_goes_on_where_chance_hits_do_not():
    drafts, text = drafter(), list(range(20, 40))
    drafts.join(1, int32([9, 8, *text, 3, 3, *text]), int32([]))
    chances = offers(drafts, [50, 20, 21, 51, 22, 23, 52, 24, 25, 53, 26, 27, 54])
    assert chances[2] >= 1, "nothing is known"
    assert chances[-2] == 0, "chance hits are not worth their rows any more"
    copied = offers(drafts, text[10:])
    assert copied[1] == 0
    assert max(copied[2:4]) >= 1, "what was right goes on"


def test_a_new_sequence_has_what_came_of_others():
    drafts = drafter()
    for handle in range(2, 12):
        drafts.join(handle, int32([1, 2, 3] * 10), int32([]))
    for other in range(20, 30):
        for token in (1, 2, other):
            handles = int32(range(2, 12))
            drafts.propose(handles, handles, int32([token] * 10), 0.3)
            drafts.append(handles.tolist(), [token] * 10)
    drafts.join(1, int32([1, 2, 3] * 10), int32([]))
    assert offers(drafts, [50, 1, 2], worth=0.3) == [0, 0, 0]


class Failing(NGrams):
    """Proposes drafts, but lacks the memory for sequence 1; and fails at all with sequence 2."""

    def join(self, handle, prompt, output):
        if handle == 1:
            raise MemoryError
        super().join(handle, prompt, output)

    def leave(self, handle):
        if handle == 2:
            raise ValueError("no such sequence")
        super().leave(handle)


def test_what_fails_in_a_drafter_costs_drafts_alone():
    """Whatever it raises: no request of a sampler fails, and other sequences have their drafts."""
    settings = NGramSettings(
        num_speculative_tokens=MOST, prompt_lookup_max=LONGEST, prompt_lookup_min=SHORTEST
    )
    sampler = Sampler.__new__(Sampler)
    sampler._index = 0  # noqa: SLF001
    sampler._columns = SequenceColumns(VOCAB)  # noqa: SLF001
    sampler._drafter = Failing(settings, VOCAB)  # noqa: SLF001
    sampler._drafting = BestEffort("proposing drafts", bounded=False)  # noqa: SLF001
    sampler._broken = {}  # noqa: SLF001
    prompt = int32_bytes([1, 2, 3] * 4)
    added = [Added(handle, 0, SequenceParams(seed=1), prompt) for handle in (0, 1, 2)]
    sampler._apply(Step(0, added=added))  # noqa: SLF001
    assert not sampler._broken  # noqa: SLF001
    appended, tokens = int32_bytes([0, 1, 2]), int32_bytes([1, 1, 1])
    sampler._apply(Step(1, appended=appended, tokens=tokens))  # noqa: SLF001
    drafts = proposed(sampler._drafter, [0, 1, 2], [2, 2, 2])  # noqa: SLF001
    assert drafts == {0: [3, 1, 2, 3, 1], 2: [3, 1, 2, 3, 1]}
    sampler._apply(Step(2, removed=int32_bytes([1, 2])))  # noqa: SLF001
    assert 0 in sampler._columns  # noqa: SLF001
    assert 2 not in sampler._columns  # noqa: SLF001


PARAMETERS = {
    "greedy": {"temperature": 0.0},
    "drawn": {},
    "top-p": {"temperature": 0.7, "top_p": 0.8},
    "top-k": {"top_k": 5, "logprobs": 3},
    "min-p": {"min_p": 0.1},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.3},
    "penalties, greedy": {"temperature": 0.0, "repetition_penalty": 1.5, "logprobs": 2},
    "bad words": {"bad_words_token_ids": [[3], [4, 5], [1, 2, 3]]},
    "min tokens": {"min_tokens": 4, "all_stop_token_ids": list(range(20))},
    "thinking": {"thinking_token_budget": 2},
    "bias": {"logit_bias": {1: 3.0, 2: -4.0}},
    "allowed": {"allowed_token_ids": list(range(12))},
}


@settings(max_examples=60, deadline=None)
@given(
    names=st.lists(st.sampled_from(sorted(PARAMETERS)), min_size=1, max_size=4),
    seed=st.integers(0, 10**6),
    masked=st.booleans(),
)
def test_drafts_are_verified_with_the_draws_of_single_steps(names, seed, masked):
    rng = np.random.default_rng(seed)

    def columns():
        made = SequenceColumns(VOCAB, reasoning_start_token_ids=[7], reasoning_end_token_ids=[8, 9])
        for handle, name in enumerate(names):
            params = SequenceParams(seed=seed + handle, **PARAMETERS[name])
            made.join(handle, params, prompt[handle], outputs[handle])
        return made

    prompt = [[*rng.integers(0, VOCAB, 6).tolist(), 7] for _ in names]
    outputs = [rng.integers(0, VOCAB, rng.integers(0, 4)).tolist() for _ in names]
    counts = rng.integers(1, MOST + 2, len(names))
    logits = (2 * rng.standard_normal((counts.sum(), VOCAB))).astype(np.float32)
    mask = None
    if masked:
        bits = rng.random((counts.sum(), 64)) < 0.7
        bits[:, 0] = True
        mask = np.packbits(bits, axis=1, bitorder="little").view(np.int32)
    single, expected, follows = columns(), [], []
    first = 0
    for handle, count in enumerate(counts):
        wrong, before = False, -1
        for row in range(first, first + count):
            drawn = None
            if not wrong:
                where = {} if mask is None else {"bitmask": mask, "bitmask_rows": [row]}
                result = single.sample([handle], logits, [row], **where)
                drawn = int(result.token_ids[0]), result.logprobs.get(0)
            expected.append(drawn)
            draft = drawn[0] if drawn and rng.random() < 0.7 else int(rng.integers(0, VOCAB))
            wrong = wrong or drawn is None or draft != drawn[0]
            follows.append(before)
            before = draft
            if not wrong and row + 1 < first + count:
                single.append(handle, draft)
        first += count
    handles = np.repeat(np.arange(len(names)), counts)
    together, untouched = columns(), columns()
    where = {} if mask is None else {"bitmask": mask, "bitmask_rows": np.arange(len(handles))}
    result = together.prepare(handles, np.arange(len(handles)), follows=int32(follows), **where)(
        logits
    )
    for row, drawn in enumerate(expected):
        if drawn is None:
            assert result.token_ids[row] == NOT_DRAWN
            assert row not in result.logprobs
            continue
        assert result.token_ids[row] == drawn[0]
        if drawn[1] is not None:
            assert result.logprobs[row].token_ids.tolist() == drawn[1].token_ids.tolist()
            assert result.logprobs[row].logprobs.tolist() == drawn[1].logprobs.tolist()
    after = [each.sample(range(len(names)), logits[: len(names)]) for each in (together, untouched)]
    assert after[0].token_ids.tolist() == after[1].token_ids.tolist(), "the state is what it was"
    for handle in range(len(names)):
        for token in rng.integers(0, VOCAB, 3).tolist():
            together.append(handle, token)
            untouched.append(handle, token)
    after = [each.sample(range(len(names)), logits[: len(names)]) for each in (together, untouched)]
    assert after[0].token_ids.tolist() == after[1].token_ids.tolist()


@pytest.mark.parametrize("limit", [0, 1, 5, 1000])
def test_rows_of_a_sequence_stay_in_one_part(limit):
    columns = SequenceColumns(VOCAB)
    for handle in range(3):
        columns.join(handle, SequenceParams(logprobs=2, seed=1))
    handles = int32([0, 0, 0, 2, 1, 1])
    parts = columns.shares(handles, limit)
    assert np.concatenate(parts).tolist() == list(range(6))
    whole = [set(handles[part].tolist()) for part in parts]
    assert not any(one & other for i, one in enumerate(whole) for other in whole[:i])


@pytest.mark.parametrize("rows", [1, 3, 8])
def test_a_part_is_bounded_also_where_a_sequence_s_drafts_fill_it(rows):
    columns, limit = SequenceColumns(VOCAB), 5 * VOCAB
    for handle in range(40):
        columns.join(handle, SequenceParams(logprobs=-1, seed=1))
    parts = columns.shares(np.repeat(np.arange(40, dtype=np.int32), rows), limit)
    assert np.concatenate(parts).tolist() == list(range(40 * rows))
    assert max(map(len, parts)) * (1 + VOCAB) <= limit + rows * (1 + VOCAB)

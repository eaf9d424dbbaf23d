"""Drafts by suffix trees: what the library is told and asked, and what is made of its answers.

Where Arctic Inference is installed it is taken; else a slow stand-in with the same interface.
"""

import importlib.util
import sys
from types import ModuleType, SimpleNamespace

import pytest
from tests.sampler.support import int32, proposed

from sipipe.messages.start_records import SuffixSettings
from sipipe.sampler.drafts import drafter

MOST = 6


class SlowCache:
    """As ``arctic_inference.suffix_decoding.SuffixDecodingCache``, of which it has what is used."""

    def __init__(self, max_tree_depth, max_cached_requests):
        self.depth, self.kept = max_tree_depth, max_cached_requests
        self.active, self.responses = {}, {}

    def start_request(self, req_id, prompt_token_ids):
        if req_id in self.active:
            raise ValueError(f"Request '{req_id}' is already active")
        self.active[req_id], self.responses[req_id] = list(prompt_token_ids), []
        while len(self.responses) > self.kept:
            self.responses.pop(next(iter(self.responses)))

    def stop_request(self, req_id):
        del self.active[req_id]

    def add_active_response(self, req_id, token_ids):
        self.active[req_id] += token_ids
        if req_id in self.responses:
            self.responses[req_id] += token_ids

    def speculate(self, req_id, context, max_spec_tokens, *, max_spec_factor, min_token_prob):
        assert len(context) <= self.depth
        assert 0 <= min_token_prob <= 1
        found = SimpleNamespace(token_ids=[], probs=[], match_len=0)
        for text in (self.active[req_id], *self.responses.values()):
            for length in range(len(context), found.match_len, -1):
                end = context[-length:]
                starts = [
                    i for i in range(len(text) - length) if text[i : i + length] == end
                ]  # with something behind
                if starts:
                    most = min(max_spec_tokens, int(max_spec_factor * length))
                    tokens = text[starts[0] + length :][:most]
                    found = SimpleNamespace(
                        token_ids=tokens, probs=[1.0] * len(tokens), match_len=length
                    )
                    break
        return found


@pytest.fixture
def drafts(monkeypatch):
    if importlib.util.find_spec("arctic_inference") is None:
        module = ModuleType("arctic_inference.suffix_decoding")
        module.SuffixDecodingCache = SlowCache
        monkeypatch.setitem(sys.modules, "arctic_inference", ModuleType("arctic_inference"))
        monkeypatch.setitem(sys.modules, "arctic_inference.suffix_decoding", module)
    return drafter(
        SuffixSettings(
            num_speculative_tokens=MOST,
            suffix_decoding_max_tree_depth=8,
            suffix_decoding_max_cached_requests=10,
            suffix_decoding_max_spec_factor=3.0,
            suffix_decoding_min_token_prob=0.1,
        ),
        100,
    )


def test_what_came_behind_the_same_tokens_is_proposed(drafts):
    drafts.join(1, int32([1, 2, 3, 4, 5, 6, 7, 8, 9, 1]), int32([2]))
    drafts.join(2, int32([30, 31]), int32([]))
    assert proposed(drafts, [1, 2], [3, 32]) == {1: [4, 5, 6, 7, 8, 9]}
    drafts.append([1, 2], [3, 32])
    assert proposed(drafts, [1, 1, 1, 2], [4, 5, -1, -1]) == {1: [6, 7, 8, 9, 1, 2]}
    assert proposed(drafts, [1, 2], [-1, -1]) == {}


def test_what_came_for_others_is_proposed_too_and_stays_when_they_leave(drafts):
    drafts.join(1, int32([90]), int32([]))
    for token in (5, 6, 7, 8, 9):
        drafts.append([1], [token])
    drafts.leave(1)
    drafts.leave(1)
    drafts.join(2, int32([70, 71]), int32([]))
    drafts.append([2, 2], [5, 6])
    assert proposed(drafts, [2], [7])[2][:2] == [8, 9]


def test_a_draft_ends_before_what_stands_for_an_image(drafts):
    drafts.join(1, int32([1, 2, 3, 4, 100, 5, 6, 1]), int32([2]))
    assert proposed(drafts, [1], [3]) == {1: [4]}
    drafts.append([1], [3])
    assert proposed(drafts, [1], [4]) == {}


def test_no_more_is_kept_of_a_sequence_than_trees_are_deep(drafts, monkeypatch):
    """Else memory, and the time of a search, would grow with each token."""
    from arctic_inference.suffix_decoding import SuffixDecodingCache

    ends = []
    speculate = SuffixDecodingCache.speculate

    def note(cache, handle, end, *arguments, **options):
        ends.append(len(end))
        return speculate(cache, handle, end, *arguments, **options)

    monkeypatch.setattr(SuffixDecodingCache, "speculate", note)
    drafts.join(1, int32(range(1, 40)), int32(range(1, 20)))
    # The library may be told less than what is kept.
    sequence = drafts._all[1]  # noqa: SLF001
    assert len(sequence.end) == 8
    for token in range(1, 30):
        drafts.append([1, 1], [token, token + 1])
        assert len(sequence.end) == 8
        proposed(drafts, [1, 1], [token, token + 2])
    assert max(ends) == 8


def test_a_request_that_was_preempted_begins_anew(drafts):
    drafts.join(1, int32([1, 2, 3, 4, 1]), int32([2]))
    drafts.leave(1)
    drafts.join(1, int32([1, 2, 3, 4, 1]), int32([2]))
    assert proposed(drafts, [1], [3])[1][0] == 4


def test_what_is_always_wrong_is_not_proposed_for_long(drafts):
    drafts.join(1, int32([1, 2, 3, 4, 5] * 4), int32([]))
    offered = []
    for other in range(50, 62):
        for token in (1, 2, other):
            offered.append(len(proposed(drafts, [1], [token], worth=0.3).get(1, [])))
            drafts.append([1], [token])
    assert max(offered[:3]) >= 2
    assert max(offered[-6:]) <= 1
    assert proposed(drafts, [1], [1], worth=1.0) == {}

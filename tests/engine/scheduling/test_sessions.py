"""Sessions, aborts, pauses, resets and ids used again, at random moments, against a scheduler ahead.

The oracle: each token is a function of all tokens before it (:mod:`.whole_engine`), so that one which
reaches another request, comes twice or is lost shows. vLLM's scheduler and its assertions run as they
are, and so does what prepares a worker's inputs.
"""

import logging
from collections import defaultdict
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tests.engine.scheduling.test_scheduler import configs, model, preempt  # noqa: F401
from tests.engine.scheduling.whole_engine import (
    LENGTH,
    SEATS,
    WholeEngine,
    continued,
    until,
)
from vllm.lora.request import LoRARequest
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine import FinishReason
from vllm.v1.request import RequestStatus

from sipipe.engine.iteration.admission import REFUSED
from sipipe.engine.scheduling.ahead_speculation import AheadSpeculation
from sipipe.engine.scheduling.scheduler import AsyncPipelineScheduler, PipelineScheduler
from sipipe.engine.scheduling.speculation import HeadSpeculation

BLOCKS = 40
FEW = 1 + 2 * (LENGTH // 16)
"""Blocks for two whole sequences, and the null block."""
DRAFTS = {
    "method": "ngram",
    "num_speculative_tokens": 4,
    "prompt_lookup_max": 3,
    "prompt_lookup_min": 2,
}
SCHEDULERS = [PipelineScheduler, AsyncPipelineScheduler]
ENGINES = [(PipelineScheduler, 1), (PipelineScheduler, 2), (AsyncPipelineScheduler, 2)]
"""Schedulers, and stages; nothing is ahead of one microbatch."""


@pytest.fixture(params=ENGINES)
def engine(request, configs):  # noqa: F811
    scheduler, stages = request.param
    return WholeEngine(scheduler, configs(stages), blocks=BLOCKS)


@pytest.fixture(params=ENGINES)
def small(request, configs):  # noqa: F811
    """An engine whose cache is full with two sequences."""
    scheduler, stages = request.param
    return WholeEngine(scheduler, configs(stages, enable_prefix_caching=False), blocks=FEW)


def test_turns_of_a_session_end_with_their_tokens(engine):
    first = engine.turn("s", 10, 3)
    engine.run()
    assert engine.tokens["s"] == continued(first, 3)
    second = engine.turn("s", 5, 4)
    engine.run()
    assert engine.answers["s"] == [FinishReason.LENGTH] * 2
    history = [*first, *engine.tokens["s"][:2], *second]
    assert engine.tokens["s"][3:] == continued(history, 4)


@pytest.mark.parametrize("prompt", [LENGTH - 12, LENGTH - 11, LENGTH])
def test_a_turn_that_leaves_no_room_ends_with_length_and_the_session_goes_on(engine, prompt):
    """Its last drawn token is left out, as vLLM does: 10 + 2 tokens are computed."""
    engine.turn("s", 10, 3)
    engine.run()
    engine.turn("s", prompt, 3)
    engine.run()
    assert engine.answers["s"] == [FinishReason.LENGTH] * 2
    assert len(engine.tokens["s"]) == 3
    engine.turn("s", 5, 4)
    engine.run()
    assert len(engine.tokens["s"]) == 7
    engine.turn("s", 1, 1, last=True)
    engine.run()
    assert not engine.scheduler.requests
    assert engine.free_blocks() == BLOCKS - 1


def test_the_largest_turn_that_fits_gets_its_one_token(engine):
    engine.turn("s", 10, 3)
    engine.run()
    engine.turn("s", LENGTH - 13, 3)
    engine.run()
    assert engine.answers["s"] == [FinishReason.LENGTH] * 2
    assert len(engine.tokens["s"]) == 4


def test_turns_that_wait_are_answered_in_their_order(engine):
    engine.turn("s", 10, 3)
    engine.step()
    engine.turn("s", LENGTH, 3)
    engine.turn("s", 5, 2)
    engine.turn("s", LENGTH, 3)
    engine.turn("s", 1, 1, last=True)
    engine.run()
    assert engine.answers["s"] == [FinishReason.LENGTH] * 4
    assert len(engine.tokens["s"]) == 5


@pytest.mark.parametrize("steps", range(1, 8))
def test_an_id_that_is_used_again_gets_none_of_the_tokens_of_the_first(engine, steps):
    engine.turn("s", 10, 20)
    engine.steps(steps)
    engine.abort("s")
    drawn = len(engine.tokens["s"])
    prompt = engine.turn("s", 7, 4)
    engine.run()
    assert engine.tokens["s"][drawn:] == continued(prompt, 4)


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("length", range(1, 9))
def test_a_turn_that_stops_at_a_draft_goes_on_as_without_drafts(configs, scheduler, length):  # noqa: F811
    """The draft is computed, as a token that was drawn is not; the session goes on without either."""
    config = configs(2, speculative_config=DRAFTS)
    engine = WholeEngine(scheduler, config, blocks=BLOCKS, drafts=4)
    text = engine.turn("s", 10, 20, stops=[length % 7])
    engine.run()
    drawn = until(continued(text, 20), [length % 7])
    assert engine.tokens["s"] == drawn
    text += drawn[:-1]
    text += engine.turn("s", length, 4)
    engine.run()
    assert engine.tokens["s"][len(drawn) :] == continued(text, 4)


@pytest.mark.ci
@pytest.mark.parametrize("head", [False, True])
@pytest.mark.parametrize("every", range(1, 8))
def test_slots_that_cease_to_wait_for_drafts_wait_for_those_that_are_verified(configs, every, head):  # noqa: F811
    """How many are right decides where a sequence goes on, and nothing is scheduled before that."""
    config = configs(2, speculative_config=DRAFTS)
    engine = WholeEngine(AsyncPipelineScheduler, config, blocks=BLOCKS, drafts=4, head=head)
    texts = {f"r{number}": engine.add(f"r{number}", 3 + number, 24) for number in range(4)}
    for gain in [True, False] * 40:
        let_drafts_gain(engine, gain)
        engine.steps(every)
    engine.run()
    for name, request in texts.items():
        assert engine.tokens[name] == continued(request.prompt_token_ids, 24)


# -- sessions that are preempted, and blocks that they hold between their turns --------------------


@pytest.mark.parametrize("waits", ["nothing", "a turn", "the end"])
def test_a_turn_that_ends_while_its_session_is_preempted_ends_with_all_its_tokens(configs, waits):  # noqa: F811
    """The last token comes when the session has lost its blocks, and is back in the queue."""
    engine = WholeEngine(AsyncPipelineScheduler, configs(2), blocks=BLOCKS)
    scheduler = engine.scheduler
    first = engine.turn("s", 10, 2)
    session = scheduler.requests["s"]
    while session.num_output_tokens < 1 or not session.num_in_flight_tokens:
        engine.step()
    preempt(scheduler, session)
    second = []
    if waits == "a turn":
        second = engine.turn("s", 5, 3)
    if waits == "the end":
        engine.turn("s", 1, 1, last=True)
    engine.run()
    if waits != "the end":
        second = second or engine.turn("s", 5, 3)
        engine.run()
        drawn = continued(first, 2)
        history = [*first, drawn[0], *second]
        assert engine.tokens["s"] == [*drawn, *continued(history, 3)]
        engine.turn("s", 1, 1, last=True)
        engine.run()
    assert not scheduler.requests
    assert engine.free_blocks() == BLOCKS - 1


def test_sessions_that_each_hold_what_the_others_need_all_go_on(small):
    """All blocks are held, and each second turn needs more."""
    texts = {id: small.turn(id, prompt, 3) for id, prompt in (("a", 46), ("b", 46), ("c", 30))}
    small.run()
    assert small.free_blocks() == 0
    for id, text in texts.items():
        text += continued(text, 2)
        text += small.turn(id, 8, 3)
    small.run()
    for id, text in texts.items():
        assert small.answers[id] == [FinishReason.LENGTH] * 2
        assert small.tokens[id][3:] == continued(text, 3)


def test_a_request_does_not_wait_for_sessions_whose_clients_are_silent(small):
    for id in "ab":
        small.turn(id, 60, 3)
        small.run()
    assert small.free_blocks() == 0
    small.add("r", 40, 3)
    small.run()
    assert len(small.tokens["r"]) == 3
    assert small.scheduler.requests["a"].num_computed_tokens == 0, "silent for longest"
    assert small.scheduler.requests["b"].num_computed_tokens > 0


def test_nor_does_a_prompt_that_comes_while_another_request_decodes(small):
    """New prompts wait while the cache is nearly full, and something decodes; silent sessions hold none
    of what counts for that."""
    small.turn("s", 60, 3)
    small.run()
    small.add("d", 49, 14)
    while not small.tokens["d"]:
        small.step()
    assert small.free_blocks() == 0
    small.add("r", 10, 2)
    while len(small.tokens["r"]) < 2:
        small.step()
    assert len(small.tokens["d"]) < 14
    assert small.scheduler.requests["s"].num_computed_tokens == 0
    small.run()
    assert len(small.tokens["d"]) == 14


def test_more_sessions_than_seats_do_not_keep_others_from_theirs(engine):
    for index in range(SEATS + 3):
        engine.turn(f"s{index}", 5, 2)
        engine.run()
    engine.add("r", 5, 3)
    engine.run()
    assert len(engine.tokens["r"]) == 3
    for index in range(SEATS + 3):
        engine.turn(f"s{index}", 5, 2)
    engine.run()
    for index in range(SEATS + 3):
        assert engine.answers[f"s{index}"] == [FinishReason.LENGTH] * 2


@pytest.mark.parametrize("waits", [False, True])
def test_the_prefix_cache_is_reset_though_sessions_hold_blocks(engine, waits):
    text = engine.turn("s", 30, 3)
    engine.run()
    text += continued(text, 2)
    if waits:
        text += engine.turn("s", 5, 4)
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    assert engine.free_blocks() == BLOCKS - 1
    if not waits:
        text += engine.turn("s", 5, 4)
    engine.run()
    assert engine.tokens["s"][3:] == continued(text, 4)


def test_a_pause_that_waits_counts_what_runs_beside_sessions_without_blocks(engine):
    engine.turn("s", 30, 3)
    engine.run()
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    engine.add("r", 5, 20)
    engine.steps(3)
    engine.scheduler.set_pause_state(PauseState.PAUSED_NEW)
    assert engine.scheduler.get_num_unfinished_requests() == 1
    engine.run()
    assert len(engine.tokens["r"]) == 20


# -- what is refused, each alone ------------------------------------------------------------------


def adapter(number: int) -> LoRARequest:
    return LoRARequest(f"adapter{number}", number, f"/nowhere/{number}")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"grammar": "[a-z]+"}, "structured outputs"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"lora_request": adapter(1)}, "LoRA"),
        ({"prompt": 0}, "no tokens"),
    ],
)
@pytest.mark.parametrize("busy", [False, True])
def test_a_turn_that_cannot_be_served_ends_its_session_alone(engine, options, words, busy):
    options = dict(options)
    engine.add("r", 5, 20)
    engine.turn("s", 10, 30)
    engine.steps(4) if busy else engine.run()
    engine.turn("s", options.pop("prompt", 5), 4, **options)
    engine.run()
    assert engine.answers["s"][-1] == FinishReason.ERROR
    assert engine.errors["s"].startswith(REFUSED)
    assert words in engine.errors["s"]
    assert len(engine.tokens["r"]) == 20
    assert not engine.scheduler.requests
    assert engine.free_blocks() == BLOCKS - 1


@pytest.mark.parametrize("prompt", [0, 1024, 5000])
def test_a_prompt_that_no_worker_has_room_for_is_refused_at_the_engine(engine, prompt):
    """The front end's check is passed by with a ready ``EngineCoreRequest``."""
    engine.add("r", prompt, 5)
    engine.run()
    assert engine.errors["r"].startswith(REFUSED)
    assert not engine.scheduler.requests


def test_an_id_that_is_in_use_is_refused_and_the_first_one_goes_on(engine, caplog):
    engine.add("r", 5, 20)
    engine.turn("s", 5, 20)
    engine.steps(3)
    with caplog.at_level(logging.ERROR):
        engine.add_again("r", client=1)
        engine.add_again("s", client=1)
        engine.add_again("r", client=0)
    engine.run()
    assert len(engine.tokens["r"]) == 20
    assert len(engine.tokens["s"]) == 20
    assert engine.told[1] == ["r", "s"]
    assert "in use" in engine.errors["r"]


# -- everything at random moments -----------------------------------------------------------------


@dataclass
class Session:
    """What a session's client expects."""

    text: list[int] = field(default_factory=list)
    """All its tokens so far, but for the last one drawn of a turn."""
    turns: list[tuple[list[int], int, list[int]]] = field(default_factory=list)
    """Prompts, numbers of tokens and stop tokens that are asked for and not answered."""


class Clients(RuleBasedStateMachine):
    """Clients of one engine. Plain requests are ``r0``, ``r1``, …; sessions ``s0``, ``s1``, …"""

    scheduler = AsyncPipelineScheduler
    config = None
    blocks = BLOCKS
    drafts = 0
    head = False
    adapters = 0

    def __init__(self) -> None:
        super().__init__()
        self.engine = WholeEngine(
            self.scheduler, self.config, blocks=self.blocks, drafts=self.drafts, head=self.head
        )
        self.plain: dict[str, list[int]] = {}
        """Tokens that each plain request is to get."""
        self.aborted: set[str] = set()
        self.sessions: dict[str, Session] = {}
        self.seen: defaultdict[str, int] = defaultdict(int)
        """Answers of each session that have been compared."""
        self.read: defaultdict[str, int] = defaultdict(int)
        """Tokens of each session that have been compared."""

    def lora(self, number: int) -> dict:
        return {"lora_request": adapter(1 + number % self.adapters)} if self.adapters else {}

    @rule(prompt=st.integers(1, 40), output=st.integers(1, 12))
    def add(self, prompt, output):
        id = f"r{len(self.plain)}"
        request = self.engine.add(id, prompt, output, **self.lora(len(self.plain)))
        self.plain[id] = continued(request.prompt_token_ids, min(output, LENGTH - prompt))

    @rule(number=st.integers(0, 6), prompt=st.integers(1, 30), output=st.integers(1, 8))
    def turn(self, number, prompt, output):
        id = f"s{number}"
        if id not in self.sessions:
            self.sessions[id] = Session()
            self.seen[id] = len(self.engine.answers[id])
            self.read[id] = len(self.engine.tokens.get(id, ()))
        stops = [3] if number % 2 else []
        tokens = self.engine.turn(id, prompt, output, stops=stops, **self.lora(number))
        self.sessions[id].turns.append((tokens, output, stops))

    @precondition(lambda self: self.sessions)
    @rule(data=st.data())
    def end(self, data):
        id = data.draw(st.sampled_from(sorted(self.sessions)))
        if not self.sessions[id].turns:
            self._end(id)

    @precondition(lambda self: self.engine.scheduler.requests)
    @rule(data=st.data())
    def abort(self, data):
        id = data.draw(st.sampled_from(sorted(self.engine.scheduler.requests)))
        self.aborted.add(id)
        self.sessions.pop(id, None)
        self.engine.abort(id)

    @rule()
    def pause_with_abort(self):
        self.aborted |= set(self.engine.scheduler.requests)
        self.sessions.clear()
        self.engine.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
        self.engine.scheduler.set_pause_state(PauseState.PAUSED_NEW)

    @rule(state=st.sampled_from([PauseState.PAUSED_NEW, PauseState.PAUSED_ALL]))
    def pause(self, state):
        self.engine.scheduler.set_pause_state(state)

    @rule()
    def resume(self):
        self.engine.scheduler.set_pause_state(PauseState.UNPAUSED)

    @rule()
    def reset_prefix_cache(self):
        assert self.engine.scheduler.reset_prefix_cache(reset_running_requests=True)

    @precondition(lambda self: self.drafts)
    @rule(gain=st.booleans())
    def have_drafts_gain(self, gain):
        let_drafts_gain(self.engine, gain)

    @rule(count=st.integers(1, 6))
    def step(self, count):
        self.engine.steps(count)

    @invariant()
    def counts_are_possible(self):
        scheduler = self.engine.scheduler
        assert scheduler.get_num_unfinished_requests() >= 0
        assert scheduler.num_waiting_for_streaming_input >= 0
        for request in scheduler.requests.values():
            assert request.num_output_placeholders >= 0
            assert 0 <= request.num_computed_tokens <= LENGTH

    @invariant()
    def turns_are_answered_in_their_order(self):
        for id, session in self.sessions.items():
            answers = self.engine.answers[id][self.seen[id] :]
            for _ in answers:
                self._compare(id, session)
            self.seen[id] += len(answers)

    def _compare(self, id: str, session: Session) -> None:
        """One answer of a session; tokens of the next turn may be there too."""
        prompt, output, stops = session.turns.pop(0)
        room = LENGTH - len(session.text) - len(prompt)
        if room < 1:
            return
        session.text += prompt
        expected = until(continued(session.text, min(output, room)), stops)
        first = self.read[id]
        self.read[id] += len(expected)
        assert self.engine.tokens[id][first : self.read[id]] == expected
        session.text += expected[:-1]

    def _end(self, id: str) -> None:
        del self.sessions[id]
        if id in self.engine.scheduler.requests:
            self.engine.turn(id, 1, 1, last=True)

    def teardown(self):
        """All that is left ends, each with its own tokens, and every block is free."""
        engine = self.engine
        engine.scheduler.set_pause_state(PauseState.UNPAUSED)
        engine.run(4000)
        self.turns_are_answered_in_their_order()
        for id, session in list(self.sessions.items()):
            assert not session.turns, f"turns of {id} are not answered"
            self._end(id)
        engine.run(4000)
        assert not engine.scheduler.requests
        assert engine.free_blocks() == self.blocks - 1
        for id, tokens in self.plain.items():
            if id not in self.aborted:
                assert engine.tokens[id] == tokens


def speculation_of(engine):
    return engine.scheduler._speculation  # noqa: SLF001


def let_drafts_gain(engine, gain):
    """Have drafts gain much or nothing, so that slots wait for them, or are scheduled ahead of them where
    the scheduler can, from now on."""
    speculation = speculation_of(engine)
    if isinstance(speculation, AheadSpeculation):
        speculation._gain = 1e3 if gain else -1e3  # noqa: SLF001
    elif isinstance(speculation, HeadSpeculation):
        speculation._chances = [float(gain)] * len(speculation._chances)  # noqa: SLF001


def random_clients(**attributes):
    case = type("Case", (Clients,), attributes).TestCase
    case.settings = settings(
        max_examples=60,
        stateful_step_count=40,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    case().runTest()


@pytest.mark.ci
@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("blocks", [BLOCKS, FEW])
def test_random_clients_leave_an_engine_whole(configs, scheduler, blocks):  # noqa: F811
    random_clients(scheduler=scheduler, config=configs(2), blocks=blocks)


@pytest.mark.ci
@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("blocks", [BLOCKS, FEW])
def test_random_clients_get_the_same_tokens_with_drafts(configs, scheduler, blocks):  # noqa: F811
    config = configs(2, speculative_config=DRAFTS)
    random_clients(scheduler=scheduler, config=config, blocks=blocks, drafts=4)


@pytest.mark.ci
@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("blocks", [BLOCKS, FEW])
def test_random_clients_get_the_same_tokens_with_a_head(configs, scheduler, blocks):  # noqa: F811
    config = configs(2, speculative_config=DRAFTS)
    random_clients(scheduler=scheduler, config=config, blocks=blocks, drafts=4, head=True)


@pytest.mark.ci
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_random_clients_with_more_adapters_than_a_batch_has_room_for(configs, scheduler):  # noqa: F811
    config = configs(2, enable_lora=True, max_loras=1, max_lora_rank=8)
    random_clients(scheduler=scheduler, config=config, blocks=FEW, adapters=3)

"""Sessions, aborts, pauses, resets and ids used again, at random moments, against a scheduler ahead.

The oracle: each token of a request is a function of its id, of the tokens before it, and of nothing
else, so that a token which reaches another request, comes twice or is lost shows. vLLM's scheduler
and its assertions run as they are.
"""

import random
from unittest.mock import Mock

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tests.engine.scheduling.test_scheduler import Engine, configs, model  # noqa: F401
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine import FinishReason
from vllm.v1.request import Request, RequestStatus

from sipipe.engine.iteration.iterations import Iterations
from sipipe.engine.iteration.observed_scheduler import observed
from sipipe.engine.scheduling.scheduler import AsyncPipelineScheduler, PipelineScheduler

LENGTH = 64
BLOCKS = 40


class SessionEngine(Engine):
    """An engine whose clients also hold sessions; ``answers`` are the ends of turns, by id."""

    def __init__(self, cls, config) -> None:
        super().__init__(observed(cls, Iterations(3, 999), Mock(), Mock()), config, blocks=BLOCKS)
        self.scheduler.max_model_len = LENGTH
        self.answers: dict[str, list[FinishReason]] = {}
        update = self.scheduler.update_from_output

        def update_and_note(*args):
            outputs = update(*args)
            for client in outputs.values():
                for output in client.outputs:
                    if output.finish_reason is not None:
                        self.answers.setdefault(output.request_id, []).append(output.finish_reason)
            return outputs

        self.scheduler.update_from_output = update_and_note

    def turn(self, id: str, prompt: int, output: int, *, last: bool = False) -> None:
        """The next turn of a session, or its end."""
        self.tokens.setdefault(id, [])
        self.scheduler.add_request(
            Request(
                request_id=id,
                prompt_token_ids=[random.Random(f"{id} {prompt}").randrange(1000)] * prompt,
                sampling_params=SamplingParams(max_tokens=output, ignore_eos=True),
                pooling_params=None,
                block_hasher=self.hasher,
                resumable=not last,
            )
        )

    def abort(self, ids) -> None:
        self.scheduler.finish_requests(ids, RequestStatus.FINISHED_ABORTED)

    def free_blocks(self) -> int:
        return self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()


@pytest.fixture(params=[PipelineScheduler, AsyncPipelineScheduler])
def engine(request, configs):  # noqa: F811
    return SessionEngine(request.param, configs(2))


def test_turns_of_a_session_end_with_their_tokens(engine):
    engine.turn("s", 10, 3)
    engine.run()
    engine.turn("s", 5, 4)
    engine.run()
    assert engine.answers["s"] == [FinishReason.LENGTH] * 2
    assert len(engine.tokens["s"]) == 7


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
    engine.turn("s", 7, 4)
    engine.run()
    name = Mock(request_id="s")
    assert engine.tokens["s"][drawn:] == [engine._token(name, 7 + i) for i in range(4)]


class Sessions(RuleBasedStateMachine):
    """Clients of one engine. Plain requests are ``r0``, ``r1``, …; sessions ``s0``, ``s1``, …"""

    scheduler = AsyncPipelineScheduler
    config = None

    def __init__(self) -> None:
        super().__init__()
        self.engine = SessionEngine(self.scheduler, self.config)
        self.plain: dict[str, int] = {}
        """Tokens that each plain request is to get."""
        self.prompts: dict[str, int] = {}
        self.aborted: set[str] = set()
        self.sessions: set[str] = set()

    @rule(prompt=st.integers(1, 40), output=st.integers(1, 12))
    def add(self, prompt, output):
        id = f"r{len(self.plain)}"
        self.plain[id] = min(output, LENGTH - prompt)
        self.prompts[id] = prompt
        self.engine.add(id, prompt, output)

    @rule(number=st.integers(0, 2), prompt=st.integers(1, 30), output=st.integers(1, 8))
    def turn(self, number, prompt, output):
        self.sessions.add(f"s{number}")
        self.engine.turn(f"s{number}", prompt, output)

    @precondition(lambda self: self.sessions)
    @rule(data=st.data())
    def end(self, data):
        id = data.draw(st.sampled_from(sorted(self.sessions)))
        self.sessions.discard(id)
        if id in self.engine.scheduler.requests:
            self.engine.turn(id, 1, 1, last=True)

    @precondition(lambda self: self.engine.scheduler.requests)
    @rule(data=st.data())
    def abort(self, data):
        id = data.draw(st.sampled_from(sorted(self.engine.scheduler.requests)))
        self.aborted.add(id)
        self.sessions.discard(id)
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
        """vLLM refuses it to its caller while a session holds blocks between two turns."""
        try:
            self.engine.scheduler.reset_prefix_cache(reset_running_requests=True)
        except RuntimeError:
            assert any(id.startswith("s") for id in self.engine.scheduler.requests)

    @rule(count=st.integers(1, 6))
    def step(self, count):
        self.engine.steps(count)

    @invariant()
    def counts_are_possible(self):
        for request in self.engine.scheduler.requests.values():
            assert request.num_output_placeholders >= 0
            assert 0 <= request.num_computed_tokens <= LENGTH

    def teardown(self):
        """All that is left ends, each plain request with its own tokens, and every block is free."""
        engine = self.engine
        engine.scheduler.set_pause_state(PauseState.UNPAUSED)
        for id in self.sessions:
            if id in engine.scheduler.requests:
                engine.turn(id, 1, 1, last=True)
        engine.run(4000)
        assert not engine.scheduler.requests
        assert engine.free_blocks() == BLOCKS - 1
        for id, count in self.plain.items():
            if id not in self.aborted:
                name = Mock(request_id=id)
                prompt = self.prompts[id]
                assert engine.tokens[id] == [engine._token(name, prompt + i) for i in range(count)]


@pytest.mark.parametrize("scheduler", [PipelineScheduler, AsyncPipelineScheduler])
def test_random_clients_leave_an_engine_whole(configs, scheduler):  # noqa: F811
    machine = type(scheduler.__name__, (Sessions,), {"scheduler": scheduler, "config": configs(2)})
    case = machine.TestCase
    case.settings = settings(
        max_examples=60,
        stateful_step_count=40,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    case().runTest()

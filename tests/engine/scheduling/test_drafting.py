"""How many drafts are scheduled, and how likely they have to be; no engine is started."""

from types import SimpleNamespace
from unittest.mock import patch

import pytest
from vllm.v1.request import RequestStatus

from sipipe.engine.iteration.work import Work
from sipipe.engine.scheduling import speculation as module
from sipipe.engine.scheduling.ahead_speculation import AheadSpeculation
from sipipe.engine.scheduling.speculation import (
    KV_RESERVE,
    LEAST_WORTH,
    LOSS,
    MARGIN,
    RATE,
    UNKNOWN_PRICE,
    WAITING,
    HeadSpeculation,
    NoSpeculation,
    Speculation,
)
from sipipe.engine.scheduling.speculations import speculation
from sipipe.engine.scheduling.times import Load
from sipipe.messages.step import Step


class Forced:
    """Stands for :class:`.ForcedTokens`: what is said to be forced, by request."""

    def __init__(self, tokens):
        self.tokens = tokens

    def of(self, request, most):
        if isinstance(tokens := self.tokens.get(request.request_id, []), Exception):
            raise tokens
        return tokens[:most]


class Scheduler:
    def __init__(self, *lengths, rows=64, seats=32, waiting=0, usage=0.5, flying=0, later=()):
        self.running = [self.request(str(i), length) for i, length in enumerate(lengths)]
        self.requests = {request.request_id: request for request in self.running}
        self.rows, self.max_num_running_reqs, self.waiting = rows, seats, [None] * waiting
        self.max_num_scheduled_tokens, self.num_spec_tokens = 1000, 8
        self.kv_free = lambda: 1 - usage
        self.tracker = SimpleNamespace(worth=0.1, is_last=lambda number, name: name not in later)
        self.words = {}
        live = SimpleNamespace(add=lambda word, by: self.words.update({word.name: by}))
        self.telemetry = SimpleNamespace(live=live)
        self.structured_output_manager = None
        self.told = {}
        self.iterations = SimpleNamespace(drafts=lambda: flying)
        self.waits_for_drafts = False

    def request(self, name, length):
        return SimpleNamespace(
            request_id=name,
            spec_token_ids=list(range(length)),
            max_tokens=100,
            num_output_tokens=10,
            output_token_ids=[7] * 10,
            num_output_placeholders=0,
            structured_output_request=None,
            use_structured_output=False,
            status=RequestStatus.RUNNING,
        )

    def get_request_counts(self):
        return len(self.running), len(self.waiting)

    def update_draft_token_ids(self, drafts):
        self.told = dict(zip(drafts.req_ids, drafts.draft_token_ids, strict=True))

    @property
    def lengths(self):
        return [len(request.spec_token_ids) for request in self.running]


def controller(price=None, formed=1):
    return SimpleNamespace(price=lambda _: price, formed=formed, slots=3, rows=1.0)


class Pace:
    """Stands for :class:`.DraftPace`: time does not go by here."""

    cost = None
    """What drafts lengthen a period by; None: not known."""
    trial = False

    def __init__(self, slots):
        pass

    def took(self, *args, **kwargs):
        pass

    def slowdown(self, sequences):
        return None if self.cost is None else 1.0 + self.cost

    def tries(self, sequences, tokens_a_pass):
        return self.trial


@pytest.fixture(autouse=True)
def pace(monkeypatch):
    """The class that all paces are of; what is set on it they say."""
    kind = type("Pace", (Pace,), {})
    monkeypatch.setattr(module, "DraftPace", kind)
    return kind


def fitted(*lengths, price=None, formed=1, **options):
    scheduler = Scheduler(*lengths, **options)
    Speculation(scheduler, controller(price, formed)).fit()
    return scheduler


def test_drafts_have_the_rows_of_requests_that_do_not_run():
    assert fitted(8, 2, 8, rows=64).lengths == [8, 2, 8]
    assert fitted(8, 2, 8, rows=17).lengths == [6, 2, 6]
    assert fitted(8, 2, 8, rows=64, seats=64, waiting=50).lengths == [4, 2, 4], "who may come"
    assert fitted(8, 2, 8, rows=64, flying=47).lengths == [6, 2, 6], "of those in flight"
    full = fitted(8, 2, 8, rows=32, seats=32, waiting=50)
    assert full.lengths == [0, 0, 0]
    assert full.tracker.worth == 1.0, "none is proposed either"


def test_none_are_scheduled_while_the_cache_runs_out_or_behind_the_last_token():
    assert fitted(8, 8, usage=1.01 - KV_RESERVE).lengths == [0, 0]
    scheduler = Scheduler(8, 8, 8)
    for request, left in zip(scheduler.running, (1, 2, 5), strict=True):
        request.max_tokens = request.num_output_tokens + left
    Speculation(scheduler, controller()).fit()
    assert scheduler.lengths == [0, 1, 4]


@pytest.mark.parametrize(
    ("running", "formed", "price", "worth"),
    [
        (1, 1, None, UNKNOWN_PRICE),
        (1, 1, 0.2, 0.2 * MARGIN),
        (8, 2, 0.05, 0.2 * MARGIN),
        (1, 1, 0.0, LEAST_WORTH),
        (30, 1, 0.04, 1.2 * MARGIN),
    ],
)
def test_a_draft_is_worth_its_share_of_the_pass(running, formed, price, worth):
    scheduler = fitted(*[0] * running, price=price, formed=formed)
    assert scheduler.tracker.worth == pytest.approx(worth)


def taken(
    scheduler, *, forced=None, drafts=None, offered=None, told=None, errors=None, broken=False
):
    drawn = {"0": 2, "1": 1}
    for failed in errors or {}:
        del drawn[failed]
    work = Work(step=Step(0, grammar=forced is not None), sampled=["0", "0", "0", "1"])
    iteration = SimpleNamespace(
        work=work,
        outcome=SimpleNamespace(drafts=drafts or {}, errors=errors or {}, drawn=drawn),
        number=0,
        output=SimpleNamespace(scheduled_spec_decode_tokens=offered or {"0": [5, 6]}),
    )
    with patch.object(module, "ForcedTokens", lambda _: Forced(forced or {})):
        speculative = Speculation(scheduler, told or controller())
    if broken:
        del iteration.outcome.drawn
    speculative.take(iteration)


def test_what_samplers_propose_is_the_schedulers_and_counted():
    scheduler = Scheduler(0, 0)
    taken(scheduler, drafts={"1": [4, 4]})
    assert scheduler.told == {"1": [4, 4]}
    assert scheduler.words == {"DRAFTS": 2, "ACCEPTED": 1, "DRAFTED": 1}


def test_a_request_that_fails_takes_no_draft_back():
    """What was accepted is a counter: Prometheus takes one that falls for a new start."""
    scheduler = Scheduler(0, 0)
    taken(scheduler, offered={"0": [5]}, errors={"0": "NaN", "1": "NaN"})
    assert scheduler.words["ACCEPTED"] >= 0


def test_text_without_a_choice_is_drafted_while_it_is_worth_its_rows():
    """A model may cut it into other tokens; in a full batch rows are dear."""
    scheduler = Scheduler(0, 0)
    scheduler.tracker.worth = 1.2
    taken(scheduler, forced={"1": [97, 98]})
    assert not scheduler.told
    scheduler.tracker.worth = 0.9
    taken(scheduler, forced={"1": [97, 98]})
    assert scheduler.told == {"1": [97, 98]}


def test_a_request_that_was_preempted_meanwhile_gets_no_drafts():
    """Scheduled once more, it would be drawn for twice before its token is in."""
    scheduler = Scheduler(0, 0, 0, later=("1",))
    scheduler.running[2].status = RequestStatus.PREEMPTED
    taken(scheduler, drafts={"0": [5], "1": [5], "2": [6], "gone": [7]})
    assert scheduler.told == {"0": [5]}


def test_text_without_a_choice_is_drafted_in_its_place():
    scheduler = Scheduler(0, 0)
    taken(scheduler, forced={"0": [97, 98]}, drafts={"0": [1], "1": [2]})
    assert scheduler.told == {"0": [97, 98], "1": [2]}


def test_what_fails_while_drafts_are_found_leaves_the_others():
    scheduler = Scheduler(0, 0)
    taken(
        scheduler,
        forced={"0": UnicodeDecodeError("utf-8", b"\xc3", 0, 1, "end")},
        drafts={"1": [2]},
    )
    assert scheduler.told == {"1": [2]}
    taken(scheduler, broken=True)
    assert scheduler.told == {"1": [2]}, "none this time"


def test_drafts_that_cannot_be_fitted_are_left_out():
    """What nobody has counted could have more rows than there is room for."""
    scheduler = Scheduler(8, 2)
    scheduler.kv_free = None
    Speculation(scheduler, controller()).fit()
    assert scheduler.lengths == [0, 0]
    assert scheduler.tracker.worth == 1.0


def test_a_target_for_the_time_per_token_holds_for_drafts():
    """A period is 1 ms and 1 ms a row of a microbatch."""

    def most(seconds, running=8):
        scheduler = Scheduler(*[8] * running, rows=200)
        told = controller(0.0, formed=2)
        told.within = lambda seconds, most: min(most, int(1e3 * seconds - 1))
        Speculation(scheduler, told, seconds).fit()
        return sum(scheduler.lengths), scheduler.tracker.worth

    assert most(0.0)[0] == 64
    assert most(9e-3) == (8, LEAST_WORTH), "8 rows, of which 4 are their tokens"
    assert most(5e-3) == (0, 1.0)
    assert most(1e-3) == (0, 1.0)


def test_the_controller_hears_of_rows():
    scheduler = Scheduler(0, 0)
    told = controller()
    for _ in range(200):
        taken(scheduler, told=told)
    assert told.rows == pytest.approx(2.0, rel=0.01)


class HeadDrafts:
    """Stands for :class:`.HeadDrafts`: drafts by iteration and request."""

    def __init__(self, **drafts):
        self.by_request = drafts
        self.pass_seconds = 0.0
        self.fails = False

    def take(self, iterations):
        told = self.by_request or self.fails
        return dict.fromkeys(iterations, self.by_request) if told else {}


def with_head(*lengths, price=None, period=1.0, drafts=None, **options):
    scheduler = Scheduler(*lengths, **options)
    scheduler.num_spec_tokens = 3
    scheduler.head_drafts = HeadDrafts(**(drafts or {}))
    told = controller(price)
    told.alone = lambda _: period
    return scheduler, HeadSpeculation(scheduler, told)


def verify(speculation, number, *, offers=3, asks=3, work=None, drafts=None, **right):
    """An iteration came back whose requests had drafts, three each, so many of which were right. With
    ``work`` others than samplers drew; ``drafts`` came with the tokens, if a head was asked for any."""
    offered = {name: list(range(1, 1 + offers)) for name in right if offers}
    names = [name for name in right for _ in range(1 + offers)]
    by_samplers = Work(step=Step(number), sampled=names)
    speculation.take(
        SimpleNamespace(
            number=number,
            output=SimpleNamespace(scheduled_spec_decode_tokens=offered),
            scheduled=SimpleNamespace(asks=asks, load=Load()),
            work=work or by_samplers,
            outcome=SimpleNamespace(
                errors={}, drafts=drafts or {}, drawn={name: 1 + right[name] for name in right}
            ),
        )
    )


def test_drafts_of_a_head_are_taken_at_the_next_turn():
    drafts = {"0": [5, 6, 7], "1": [8, 9, 1], "2": [2, 2, 2], "gone": [3, 3, 3]}
    scheduler, speculation = with_head(0, 2, 0, drafts=drafts, later={"2"})
    verify(speculation, 4, **{"0": 3})
    speculation.fit()
    assert scheduler.told == {"0": [5, 6, 7]}, "what a grammar forces stays, others are elsewhere"
    scheduler.told = {}
    speculation.fit()
    assert scheduler.told == {}, "once"


def test_drafts_that_came_with_the_tokens_are_counted_and_taken_as_others():
    """vLLM's own sampler has drawn, and the head proposed in the same pass."""
    scheduler, speculation = with_head(0, 0, price=0.05)
    work = Work(step=Step(4), on_device=["0", "1"])
    for number in range(100):
        verify(speculation, number, work=work, drafts={"0": [5, 6, 7]}, **{"0": 1, "1": 0})
    assert scheduler.told == {"0": [5, 6, 7]}
    assert scheduler.words == {"DRAFTS": 6, "ACCEPTED": 1, "DRAFTED": 2}
    speculation.fit()
    assert speculation.asks == 1, "as many as are worth it are made"


def test_a_head_makes_all_drafts_at_first_and_those_worth_a_usual_price_until_it_is_known():
    """With one request all passes may have as many rows, which tells no price of one."""
    scheduler, speculation = with_head(3, period=0.0)
    scheduler.head_drafts.pass_seconds = 1.0
    speculation.fit()
    assert speculation.asks == 3
    for number in range(200):
        verify(speculation, number, **{"0": 0})
    speculation.fit()
    assert speculation.asks == 0
    for number in range(200):
        verify(speculation, number, **{"0": 3})
        speculation.fit()
    assert speculation.asks == 3


def test_a_head_makes_as_many_drafts_as_are_worth_it():
    """One in two is right: the second is right in one of four passes, the third in one of eight."""
    tokens = 1 + 7 / 8  # of a request in a pass

    def steps(price, pass_seconds=0.0):
        scheduler, drafting = with_head(3, 3, price=price)
        scheduler.head_drafts.pass_seconds = pass_seconds
        for number in range(400):
            right = (1, 3, 1, 2)[number % 4]
            verify(drafting, number, **{"0": right, "1": 0})
        drafting.fit()
        return drafting.asks

    assert steps(0.0) == 3, LEAST_WORTH
    assert steps(0.2 / 2 / tokens / MARGIN) == 2
    assert steps(0.35 / 2 / tokens / MARGIN) == 1
    assert steps(0.6 / 2 / tokens / MARGIN) == 0
    assert steps(0.0, pass_seconds=0.22) == 1, "0.18 of the longer period"
    assert steps(0.0, pass_seconds=2.0) == 0


def test_the_first_draft_of_a_head_pays_for_the_waiting():
    """It is right in one of two passes."""

    def asks(price, ahead):
        scheduler, _ = with_head(3)
        scheduler.ahead = ahead
        told = controller(price / 1.5 / MARGIN)
        told.alone = lambda _: 1.0
        drafting = HeadSpeculation(scheduler, told)
        for number in range(400):
            verify(drafting, number, offers=1, **{"0": number % 2})
        drafting.fit()
        return drafting.asks

    assert asks(0.48, 0)
    assert asks(0.4, 1)
    assert not asks(0.48, 1), WAITING


@pytest.mark.parametrize("price", [0.05, 0.1, 0.2, 0.3])
def test_what_is_worth_nothing_is_tried_now_and_then_for_half_a_percent(price):
    scheduler, speculation = with_head(0, 0, price=price)
    tried = 0
    cost = 0.0
    for number in range(4000):
        speculation.fit()
        assert scheduler.waits_for_drafts == bool(speculation.asks)
        if speculation.asks:
            assert speculation.asks == 1 or number < 1000
            tried += 1
            cost += scheduler.tracker.worth * (number >= 1000)  # it has learnt by then
            verify(speculation, number, offers=speculation.asks, **{"0": 0, "1": 0})
    assert tried > 10
    assert cost / 3000 < 2 * LOSS


@pytest.mark.parametrize("in_the_pass", [False, True])
def test_a_head_whose_passes_fail_is_hardly_asked_any_more(in_the_pass):
    """Each time the slot's next microbatch waits for its answer, or is not scheduled ahead."""
    scheduler, speculation = with_head(0, 0, price=0.1)
    scheduler.head_drafts.fails = not in_the_pass
    work = Work(step=Step(0), on_device=["0", "1"]) if in_the_pass else None
    asked = []
    for number in range(1000):
        speculation.fit()
        asked.append(speculation.asks > 0)
        if asked[-1]:
            asks = speculation.asks
            verify(speculation, number, offers=0, asks=asks, work=work, **{"0": 0, "1": 0})
    assert all(asked[:10])
    assert sum(asked[500:]) < 50


def test_a_pass_that_asks_a_head_for_nothing_does_not_count_as_a_failed_one():
    _, speculation = with_head(0, 0, price=0.1)
    work = Work(step=Step(0), on_device=["0", "1"])
    for number in range(1000):
        verify(speculation, number, offers=0, asks=0, work=work, **{"0": 0, "1": 0})
    speculation.fit()
    assert speculation.asks > 0


def test_later_drafts_are_tried_again_too():
    """The first is right all the time, the second was not once, and is now."""
    _, speculation = with_head(0, 0, price=0.1)
    for number in range(40):
        verify(speculation, number, **{"0": 1, "1": 1})
    speculation.fit()
    assert speculation.asks == 1
    for number in range(40, 4000):
        speculation.fit()
        steps = speculation.asks
        verify(speculation, number, offers=steps, **dict.fromkeys("01", steps))
    assert speculation.asks == 3


def test_slots_wait_where_a_grammar_may_force_tokens_though_a_head_is_not_asked():
    scheduler, speculation = with_head(0, 0, price=0.6)
    for number in range(100):
        speculation.fit()
        verify(speculation, number, offers=speculation.asks, **{"0": 0, "1": 0})
    assert not scheduler.waits_for_drafts
    scheduler.running[1].use_structured_output = True
    speculation.fit()
    assert scheduler.waits_for_drafts
    assert not speculation.asks


def test_chances_are_those_of_each_draft_behind_right_ones():
    """The second is right in one of four passes, the third never."""
    tokens = 2.25  # of a request in a pass

    def steps(worth):
        _, drafting = with_head(3, 3, price=worth / 2 / tokens / MARGIN)
        for number in range(300):
            verify(drafting, number, **{"0": 1, "1": 2 if number % 2 else 1})
        drafting.fit()
        return drafting.asks

    assert steps(LEAST_WORTH) == 2
    assert steps(0.2) == 2
    assert steps(0.3) == 1
    assert steps(0.9) == 1


def ahead(*lengths, **options):
    """An engine that schedules ahead of the tokens, where a row costs 0.1 of a token's chance."""
    scheduler = Scheduler(*lengths, **options)
    speculation = AheadSpeculation(scheduler, controller(0.1 / MARGIN))
    speculation.fit()
    return scheduler, speculation


def came(scheduler, speculation, tokens, proposed=None):
    """An iteration without drafts came back: each request's token, and what is proposed behind it."""
    for name, token in tokens.items():
        scheduler.requests[name].output_token_ids.append(token)
        scheduler.requests[name].num_output_placeholders = int(not scheduler.waits_for_drafts)
    speculation.take(
        SimpleNamespace(
            number=1,
            output=SimpleNamespace(scheduled_spec_decode_tokens={}),
            work=Work(step=Step(1), sampled=list(tokens)),
            scheduled=SimpleNamespace(load=Load()),
            outcome=SimpleNamespace(
                errors={}, drafts=dict(proposed or {}), drawn=dict.fromkeys(tokens, 1)
            ),
        )
    )
    speculation.fit()


def test_slots_wait_for_drafts_until_they_gain_less_than_scheduling_ahead():
    scheduler, speculation = ahead(3)
    assert set(scheduler.dynamic_sd_lookup) == {0}, "vLLM counts none before they are there"
    assert scheduler.waits_for_drafts
    assert scheduler.lengths == [3]
    waited = 0
    while scheduler.waits_for_drafts:
        waited += 1
        came(scheduler, speculation, {"0": 5})
    assert waited < 3 / RATE
    scheduler.running[0].spec_token_ids = [1, 2]
    speculation.fit()
    assert scheduler.lengths == [0], "one that was not overtaken"


def test_overtaken_drafts_are_compared_with_the_tokens_that_came_in_their_place():
    """Each fourth token is 1, and 2, 3, 4 come behind it. One time all are foreseen, then one is."""
    scheduler, speculation = ahead(0)
    text = [1, 2, 3, 4] * 40
    for place in range(60):
        came(scheduler, speculation, {"0": text[place]})
    assert not scheduler.waits_for_drafts
    came(scheduler, speculation, {"0": text[60]}, {"0": text[61:64]})
    assert scheduler.told == {}, "they come too late"
    assert not scheduler.waits_for_drafts
    for place in range(61, 64):
        came(scheduler, speculation, {"0": text[place]})
    assert scheduler.waits_for_drafts, "three of three, and each row costs a tenth"
    scheduler, speculation = ahead(0)
    for place in range(160):
        wrong = [text[(place + 1) % 4], 9, 9, 9, 9, 9, 9, 9, 9, 9]
        came(scheduler, speculation, {"0": text[place]}, {"0": wrong})
    assert not scheduler.waits_for_drafts, "one of ten, which costs as much as it brings"


@pytest.mark.parametrize(("cost", "waits"), [(0.1, True), (0.95, True), (1.1, False), (2.0, False)])
def test_drafts_are_waited_for_where_they_gain_more_than_a_period_is_longer(pace, cost, waits):
    """A token of each pass, whatever rows cost; before the period is known, 0.03 and the rows."""
    scheduler, speculation = ahead(0, 0)
    for number in range(400):
        verify(speculation, number, offers=2, **{"0": 2, "1": 0})
        speculation.fit()
    assert scheduler.waits_for_drafts
    pace.cost = cost
    for number in range(100):
        verify(speculation, number, offers=2, **{"0": 2, "1": 0})
        speculation.fit()
    assert scheduler.waits_for_drafts == waits


@pytest.mark.parametrize(("cost", "asks"), [(None, 3), (0.1, 3), (2.4, 3), (2.7, 0)])
def test_a_head_is_asked_where_its_drafts_gain_more_than_a_period_is_longer(pace, cost, asks):
    """3.5 tokens a pass, whatever its drafts' rows and its own passes cost."""
    _, speculation = with_head(0, 0, price=0.01)
    pace.cost = cost
    for number in range(600):
        right = (3, 2)[number % 2]
        verify(speculation, number, **{"0": right, "1": right})
    speculation.fit()
    speculation.fit()
    speculation.fit()
    assert speculation.asks == asks


def test_drafts_are_left_out_while_periods_without_them_are_measured(pace):
    scheduler, speculation = ahead(0, 0)
    _, of_head = with_head(0, 0, price=0.01)
    for trial in (False, True, False):
        pace.trial = trial
        for each in (speculation, of_head):
            verify(each, 1, offers=2, **{"0": 2, "1": 0})
            each.fit()
        assert scheduler.waits_for_drafts != trial
        assert (of_head.asks > 0) != trial


def test_drafts_that_gain_are_waited_for_from_then_on():
    scheduler, speculation = ahead(0, 0)
    for number in range(400):
        verify(speculation, number, offers=2, **{"0": 2, "1": 0})
        speculation.fit()
        assert scheduler.waits_for_drafts, "0.8 tokens of each pass"
    for number in range(400):
        verify(speculation, number, offers=2, **{"0": 0, "1": 0})
        speculation.fit()
    assert not scheduler.waits_for_drafts


def test_requests_that_have_left_are_not_followed():
    scheduler, speculation = ahead(*[0] * 4, seats=2)
    speculation._gain = 0.0  # noqa: SLF001
    speculation.fit()
    for name in "0123":
        came(scheduler, speculation, {name: 1}, {name: [1, 1]})
        if name in "01":
            del scheduler.requests[name]
    assert set(speculation._overtaken) <= {"2", "3"}  # noqa: SLF001


def test_an_engine_has_the_drafts_that_its_scheduler_can_take():
    config = SimpleNamespace(additional_config={})

    def kind(**attributes):
        scheduler = Scheduler()
        vars(scheduler).update({"vllm_config": config, "head_drafts": None, **attributes})
        return type(speculation(scheduler, None))

    assert kind(rows=0) is NoSpeculation
    assert kind() is kind(ahead=0) is Speculation
    assert kind(ahead=1) is AheadSpeculation
    assert (
        kind(head_drafts=HeadDrafts()) is kind(head_drafts=HeadDrafts(), ahead=1) is HeadSpeculation
    )

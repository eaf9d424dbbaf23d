"""What is recorded around any scheduler, on one that schedules nothing."""

from collections import Counter
from types import SimpleNamespace

from sipipe.engine.iteration.iterations import Iterations
from sipipe.engine.iteration.observed_scheduler import ObservedScheduler, observed
from sipipe.engine.iteration.wrong_blocks import WrongBlocksScheduler
from sipipe.engine.scheduling.scheduler import PipelineScheduler
from sipipe.observe.live import Word


class Scheduler:
    requests: dict = {}  # noqa: RUF012

    def __init__(self):
        self.counts = (0, 0)

    def get_request_counts(self):
        return self.counts

    def schedule(self):
        return SimpleNamespace(total_num_scheduled_tokens=0)

    def update_from_output(self, *_):
        return {}


class Telemetry:
    def __init__(self):
        self.spans, self.words = [], {}
        self.live = SimpleNamespace(set=self.words.__setitem__)

    def idle(self, began, ended):
        self.spans.append((began, ended))


class Scheduling(Scheduler):
    """Schedules each of its requests as a new one, as a preempted one is too."""

    def __init__(self):
        super().__init__()
        self.requests = {}

    def schedule(self):
        new = [
            SimpleNamespace(req_id=name, sampling_params=request.sampling_params)
            for name, request in self.requests.items()
        ]
        return SimpleNamespace(total_num_scheduled_tokens=1, scheduled_new_reqs=new)


def test_a_first_token_is_timed_once_and_of_who_gets_tokens():
    telemetry, counted = Telemetry(), Counter()
    telemetry.live.add = lambda word, by=1: counted.update({word: by})
    telemetry.record = lambda *_: None
    scheduler = observed(Scheduling, Iterations(2, 8), telemetry, None)()

    def request(tokens, **sampling):
        params = SimpleNamespace() if sampling.get("draws", True) else None
        return SimpleNamespace(num_output_tokens=tokens, sampling_params=params, arrival_time=0.0)

    scheduler.requests = {
        "new": request(0),
        "resumed": request(3),
        "pooled": request(0, draws=False),
    }
    output = scheduler.schedule()
    index = {name: i for i, name in enumerate(scheduler.requests)}
    for tokens in ([[5], [6], []], [[7], [8], [9]]):
        drawn = SimpleNamespace(req_id_to_index=index, sampled_token_ids=tokens)
        scheduler.update_from_output(output, drawn)
        assert counted[Word.FIRST_TOKENS] == 1


def test_each_time_without_requests_is_told_once_it_is_over():
    telemetry = Telemetry()
    scheduler = observed(Scheduler, Iterations(2, 8), telemetry, None)()
    output = scheduler.schedule()
    assert not telemetry.spans
    for counts in ((0, 1), (1, 0), (2, 3)):
        scheduler.counts = counts
        scheduler.schedule()
    assert len(telemetry.spans) == 1
    scheduler.counts = (0, 0)
    scheduler.update_from_output(output, None)
    since = telemetry.words[Word.IDLE_FROM]
    scheduler.schedule()
    scheduler.counts = (1, 0)
    scheduler.schedule()
    first, second = telemetry.spans
    assert first[0] < first[1] <= second[0] == since < second[1]


def test_an_engine_with_the_configuration_of_one_before_has_its_own_class():
    own = {"iterations": 1, "telemetry": 2, "tracker": 3}
    first = observed(Scheduler, **own)
    again = observed(first, **own | {"tracker": 4})
    assert again.__mro__[1:] == first.__mro__[1:]
    assert (first.tracker, again.tracker) == (3, 4)


def test_the_mixins_cover_nothing_of_a_scheduler_unintended():
    """Their own names are none of our scheduler's, nor of vLLM's."""
    mixins = (ObservedScheduler, WrongBlocksScheduler)
    own = {name for mixin in mixins for name in vars(mixin) if not name.startswith("__")}
    assert own & set(dir(PipelineScheduler)) == {
        "add_request",
        "schedule",
        "update_from_output",
        # Blocks that a KV connector could not load (docs/upstream.md).
        "_connector_finished",
        "_handle_failed_recving",
        "_handle_invalid_blocks",
    }

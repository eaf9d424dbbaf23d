"""What is recorded around any scheduler, on one that schedules nothing."""

from types import SimpleNamespace

from sipipe.engine.iterations import Iterations
from sipipe.engine.scheduling.observed_scheduler import observed
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

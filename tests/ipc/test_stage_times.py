"""The lines of stage times: where they lie, and that a restarted process goes on with its own."""

from sipipe.ipc.stage_times import PhaseCounter, StageTimes, Taken


def test_each_process_has_a_line_of_its_own_that_outlives_it():
    made = StageTimes.create(stages=3, samplers=2)
    assert made.endpoint.size == StageTimes.required_bytes(stages=3, samplers=2)
    identity = bytes(made._memory.map[:16])
    for index, line in enumerate(
        [made.line("executor")]
        + [made.line("stage", i) for i in range(3)]
        + [made.line("sampler", i) for i in range(2)]
    ):
        PhaseCounter(line, (4, 5), last=5).phase(4, 0, 0, index, 9, 9)
        assert Taken.of(line) == Taken(0, 0, 0, index)
    for _ in range(2):  # a sampler and its successor
        theirs = StageTimes.attach(made.endpoint, stages=3)
        counter = PhaseCounter(theirs.line("sampler", 1), (4, 5), last=5)
        counter.phase(3, 0, 100, 200, 7, 8)  # a phase that does not count
        counter.phase(5, 0, 100, 110, 7, 8)
        theirs.close()
    assert Taken.of(made.line("sampler", 1)) - Taken(0, 0, 0, 5) == Taken(2, 14, 16, 20)
    assert Taken.of(made.line("sampler", 0)).batches == 0
    assert bytes(made._memory.map[:16]) == identity
    made.close()

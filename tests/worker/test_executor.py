"""Real threads, forced interleavings: order, bounds, errors, draining, shutdown."""

import threading

import pytest

from sipipe.errors import StallError
from sipipe.worker.communicator import StageStoppedError
from sipipe.worker.executor import StageExecutor
from sipipe.worker.inputs.safety import TokenSafetyError

from .fake_device import HAND_OVER, FakeStage


def executor(stage, **options):
    options.setdefault("depth", 4)
    options.setdefault("stall_timeout", HAND_OVER)
    return StageExecutor(stage, interrupt=stage.release_all, **options)


@pytest.mark.parametrize("versions", [1, 2, 3])
def test_iterations_run_in_order_each_on_its_own_inputs(versions):
    stage = FakeStage(versions=versions)
    with executor(stage, versions=versions, depth=5) as running:
        for iteration in range(300):
            running.submit(iteration, iteration % 3, 1)
        running.drain()
        seen = running.statistics()
    assert stage.sent == list(range(300))
    assert stage.intact()
    assert (seen.submitted, seen.prepared, seen.taken, seen.finished) == (300,) * 4
    assert seen.most_waiting <= 5


def test_the_next_inputs_are_prepared_while_the_device_runs():
    stage = FakeStage(gates=["forward"])
    with executor(stage) as running:
        for iteration in range(3):
            running.submit(iteration, 0, 1)
        stage.wait_for("forward")  # 1. the device is inside iteration 0
        while ("announce", 1) not in stage.log:  # 2. iteration 1 gets prepared meanwhile
            threading.Event().wait(0.001)
        # 3. iteration 2 does not: its version is being read
        assert ("prepare", 2) not in stage.log
        assert stage.sent == []
        stage.let("forward")  # 4. iteration 0 ends, 1 starts, 2 may be prepared
        stage.wait_for("forward")
        while ("announce", 2) not in stage.log:
            threading.Event().wait(0.001)
        stage.let("forward", 2)
        running.drain()
    assert stage.intact()


def test_with_one_version_nothing_is_prepared_while_the_device_runs():
    stage = FakeStage(versions=1, gates=["forward"])
    with executor(stage, versions=1) as running:
        running.submit(0, 0, 1)
        running.submit(1, 0, 1)
        stage.wait_for("forward")
        assert ("prepare", 1) not in stage.log
        stage.let("forward", 2)
        running.drain()
    order = [(name, i) for name, i in stage.log if name in ("prepare", "forward")]
    assert order == [("prepare", 0), ("forward", 0), ("prepare", 1), ("forward", 1)]


def test_the_device_never_reads_what_is_being_written():
    stage = FakeStage(gates=["prepare"])
    with executor(stage) as running:
        running.submit(0, 0, 1)
        stage.wait_for("prepare")
        # Half of version 0 is written; the device must not have started.
        assert not [entry for entry in stage.log if entry[0] in ("receive", "forward")]
        assert running.statistics().taken == 0
        stage.let("prepare")
        running.drain()
    assert stage.intact()


def test_a_planted_bug_version_always_zero_is_caught_at_its_first_overlap():
    stage = FakeStage(gates=["forward"], planted=0)
    failures = []
    running = executor(stage, on_error=lambda iteration, error: failures.append((iteration, error)))
    running.submit(0, 0, 1)
    stage.wait_for("forward")
    running.submit(1, 0, 1)
    with pytest.raises(TokenSafetyError, match="iteration 1 would overwrite version 0") as caught:
        running.drain()
    running.close()
    assert failures == [(1, caught.value)]
    assert 1 not in stage.sent


def test_the_planted_bug_really_corrupts_without_the_check():
    stage = FakeStage(gates=["forward"], planted=0, check=False)
    with executor(stage) as running:
        running.submit(0, 0, 1)
        stage.wait_for("forward")
        running.submit(1, 0, 1)
        while ("announce", 1) not in stage.log:
            threading.Event().wait(0.001)
        stage.let("forward", 2)
        running.drain()
    assert not stage.intact()


@pytest.mark.parametrize("where", ["prepare", "receive", "forward", "send"])
def test_an_error_reaches_the_caller_as_itself(where):
    error = RuntimeError(f"{where} broke")
    stage = FakeStage(fail={(where, 2): error})
    failures = []
    running = executor(stage, on_error=lambda iteration, what: failures.append((iteration, what)))
    with pytest.raises(RuntimeError) as caught:  # noqa: PT012 - which call raises is open
        for iteration in range(50):
            running.submit(iteration, 0, 1)
        running.drain()
    assert caught.value is error
    with pytest.raises(RuntimeError) as again:
        running.submit(99, 0, 1)
    assert again.value is error
    running.close()
    assert failures == [(2, error)]
    assert stage.sent == [0, 1]


def test_an_error_interrupts_a_receive_that_waits_for_another_process():
    stage = FakeStage(gates=["receive"], fail={("prepare", 1): ValueError("bad output")})
    running = executor(stage)
    running.submit(0, 0, 1)
    stage.wait_for("receive")
    running.submit(1, 0, 1)
    with pytest.raises(ValueError, match="bad output"):
        running.drain()
    running.close()


def test_nothing_queues_without_bound():
    stage = FakeStage(gates=["forward"])
    with executor(stage, depth=3, stall_timeout=0.05) as running:
        for iteration in range(3):
            running.submit(iteration, 0, 1)
        with pytest.raises(
            StallError, match=r"room for iteration 3: .*device executor runs iteration 0"
        ):
            running.submit(3, 0, 1)
        assert running.statistics().most_waiting == 3
        stage.release_all()
        running.drain(HAND_OVER)


def test_a_stalled_drain_names_the_wait_for_hidden_states():
    stage = FakeStage(gates=["receive"])
    with executor(stage) as running:
        running.submit(17, 0, 1)
        stage.wait_for("receive")
        with pytest.raises(StallError, match="waits for hidden states of iteration 17"):
            running.drain(timeout=0.01)
        stage.let("receive")
        running.drain()


def test_a_control_call_sees_a_drained_worker():
    stage = FakeStage()
    with executor(stage) as running:
        for round_ in range(20):
            for iteration in range(4):
                running.submit(round_ * 4 + iteration, 0, 1)
            running.drain()
            assert stage.sent == list(range(round_ * 4 + 4))
            assert running.statistics().finished == len(stage.sent)


@pytest.mark.parametrize("where", ["prepare", "receive", "forward", "send"])
def test_shutdown_in_the_middle_of_a_call_ends_both_threads(where):
    stage = FakeStage(gates=[where])
    running = executor(stage)
    for iteration in range(3):
        running.submit(iteration, 0, 1)
    stage.wait_for(where)
    running.close()
    names = {thread.name for thread in threading.enumerate()}
    assert not names & set(stage.threads.values())
    with pytest.raises(StageStoppedError):
        running.submit(9, 0, 1)
    with pytest.raises(StageStoppedError):
        running.drain()


def test_shutdown_of_an_idle_executor_and_twice():
    running = executor(FakeStage())
    running.close()
    running.close()


def test_the_device_can_be_the_callers_thread():
    stage = FakeStage()
    running = executor(stage, device_thread=False)

    def feed():
        for iteration in range(20):
            running.submit(iteration, 0, 1)
        running.drain()
        running.close()

    feeder = threading.Thread(target=feed)
    feeder.start()
    running.run_device()
    feeder.join(HAND_OVER)
    assert stage.sent == list(range(20))
    assert stage.threads["forward"] == threading.current_thread().name
    assert stage.threads["prepare"] != stage.threads["forward"]


def test_an_error_in_the_callers_device_is_raised_there():
    stage = FakeStage(fail={("forward", 0): RuntimeError("device lost")})
    running = executor(stage, device_thread=False)
    running.submit(0, 0, 1)
    with pytest.raises(RuntimeError, match="device lost"):
        running.run_device()
    running.close()

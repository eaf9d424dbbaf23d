"""Real threads, forced interleavings: order, bounds, errors, draining, shutdown."""

import threading

import pytest

from sipipe.errors import StallError
from sipipe.worker.double_buffer import DoubleBuffer, StageStoppedError

from .fake_device import HAND_OVER, FakeStage, TwoThreads


def until(holds):
    while not holds():
        threading.Event().wait(0.001)


@pytest.mark.parametrize("sets", [1, 2, 3])
def test_iterations_run_in_order_each_on_its_own_inputs(sets):
    stage = FakeStage(sets=sets)
    with TwoThreads(stage, sets=sets) as running:
        for iteration in range(300):
            running.submit(iteration, iteration % 3)
        running.drain()
    assert stage.sent == list(range(300))
    assert stage.intact()


def test_the_next_inputs_are_prepared_while_the_device_runs():
    stage = FakeStage(gates=["forward"])
    with TwoThreads(stage) as running:
        for iteration in range(3):
            running.submit(iteration)
        stage.wait_for("forward")  # 1. the device is inside iteration 0
        until(lambda: ("prepared", 1) in stage.log)  # 2. iteration 1 gets prepared meanwhile
        # 3. iteration 2 does not: its buffers are being read
        until(lambda: "free input buffers for iteration 2" in running.buffer.doing())
        assert ("prepare", 2) not in stage.log
        assert stage.sent == []
        stage.let("forward")  # 4. iteration 0 ends, 1 starts, 2 may be prepared
        stage.wait_for("forward")
        until(lambda: ("prepared", 2) in stage.log)
        stage.let("forward", 2)
        running.drain()
    assert stage.intact()


def test_the_device_never_reads_what_is_being_written():
    stage = FakeStage(gates=["prepare"])
    with TwoThreads(stage) as running:
        running.submit(0)
        stage.wait_for("prepare")
        # Half of set 0 is written; the device must not have started.
        until(lambda: "(device thread) waits for inputs" in running.buffer.doing())
        assert not [entry for entry in stage.log if entry[0] in ("receive", "forward")]
        stage.let("prepare")
        running.drain()
    assert stage.intact()


@pytest.mark.parametrize("where", ["prepare", "receive", "forward", "send"])
def test_an_error_ends_both_threads_as_itself(where):
    error = RuntimeError(f"{where} broke")
    stage = FakeStage(fail={(where, 2): error})
    running = TwoThreads(stage)
    for iteration in range(50):
        running.submit(iteration)
    with pytest.raises(RuntimeError) as caught:
        running.drain()
    assert caught.value is error
    assert running.submit(99).exception(HAND_OVER) is error
    running.close()
    assert running.raised == {"device": error}
    if where == "prepare":  # 0 has left its buffers for 2; 1 may not have had its turn
        assert stage.sent in ([0], [0, 1])
    else:
        assert stage.sent == [0, 1]


def test_the_first_of_two_errors_is_the_one_that_is_told():
    """1. the device is in a receive; 2. preparing fails, which interrupts the receive; 3. the
    interrupted receive fails as well."""
    first = ValueError("bad output")
    fail = {("prepare", 1): first, ("receive", 0): ConnectionError("interrupted")}
    stage = FakeStage(gates=["receive"], fail=fail)
    running = TwoThreads(stage)
    running.submit(0)
    stage.wait_for("receive")
    assert running.submit(1).exception(HAND_OVER) is first
    running.close()
    assert running.raised == {"device": first}


def test_an_error_from_outside_ends_both():
    stage = FakeStage(gates=["receive"])
    running = TwoThreads(stage)
    running.submit(0)
    stage.wait_for("receive")
    error = OSError("the channel broke")
    running.buffer.fail(error)
    with pytest.raises(OSError, match="the channel broke") as caught:
        running.drain()
    assert caught.value is error
    running.close()
    assert running.raised == {"device": error}


def test_a_wait_for_buffers_that_nobody_ends_has_a_bound():
    stage = FakeStage(gates=["forward"])
    running = TwoThreads(stage, stall_timeout=0.01)
    futures = [running.submit(iteration) for iteration in range(3)]
    with pytest.raises(
        StallError, match=r"waits for free input buffers for iteration 2.*runs itera"
    ):
        futures[2].result(HAND_OVER)
    running.close()
    assert isinstance(running.raised["device"], StallError)


def test_a_stalled_drain_names_what_both_threads_do():
    stage = FakeStage(gates=["receive"])
    with TwoThreads(stage) as running:
        running.submit(16)
        stage.let("receive")
        stage.wait_for("receive")
        running.drain()
        running.submit(17)
        stage.wait_for("receive")
        running.buffer._stall_timeout = 0.01
        with pytest.raises(
            StallError,
            match=r"\(preparing thread\) waits for a scheduling output, \(device thread\) runs "
            r"iteration 17 \(1 iterations prepared and not finished\)",
        ):
            running.drain()
        running.buffer._stall_timeout = HAND_OVER
        stage.let("receive")
        running.drain()


def test_a_control_call_runs_in_the_device_thread_between_iterations():
    stage = FakeStage()
    with TwoThreads(stage) as running:
        for round_ in range(20):
            for iteration in range(4):
                running.submit(round_ * 4 + iteration)
            found = running.run_alone(lambda: (threading.current_thread().name, len(stage.sent)))
            assert found.result(HAND_OVER) == ("test-device", round_ * 4 + 4)


def test_a_control_call_ends_with_the_threads():
    stage = FakeStage(gates=["receive"])
    running = TwoThreads(stage)
    running.submit(0)
    stage.wait_for("receive")
    called = running.run_alone(lambda: pytest.fail("an iteration is in the worker"))
    error = OSError("the channel broke")
    running.buffer.fail(error)
    assert called.exception(HAND_OVER) is error
    running.close()


def test_a_signal_in_a_control_call_ends_the_process():
    running = TwoThreads(FakeStage())

    def signalled():
        raise SystemExit(0)

    called = running.run_alone(signalled)
    assert isinstance(called.exception(HAND_OVER), SystemExit)
    running.close()
    assert isinstance(running.raised["device"], SystemExit)


@pytest.mark.parametrize("where", ["prepare", "receive", "forward", "send"])
def test_shutdown_in_the_middle_of_a_step_ends_both_threads(where):
    stage = FakeStage(gates=[where])
    running = TwoThreads(stage)
    for iteration in range(3):
        running.submit(iteration)
    stage.wait_for(where)
    running.close()
    assert running.raised == {}, "the device thread returns"
    names = {thread.name for thread in threading.enumerate()}
    assert not names & set(stage.threads.values())
    with pytest.raises(StageStoppedError):
        running.buffer.prepare(9, 0, None)
    with pytest.raises(StageStoppedError):
        running.buffer.drain()


def test_what_was_prepared_before_the_end_is_not_run():
    stage = FakeStage()
    buffer = DoubleBuffer(stage, sets=2, stall_timeout=1)
    buffer.prepare(0, 0, None)
    buffer.close()
    buffer.run()
    assert stage.log == [("prepare", 0), ("prepared", 0)]


def test_a_signal_in_the_device_thread_ends_the_process_also_after_the_end():
    """1. the threads are told to end; 2. SIGTERM arrives inside a step."""
    stage = FakeStage(gates=["send"], fail={("send", 0): SystemExit(0)})
    running = TwoThreads(stage)
    running.submit(0)
    stage.wait_for("send")
    running.close()
    assert isinstance(running.raised["device"], SystemExit)


def test_without_buffers_there_is_nothing_to_run():
    with pytest.raises(ValueError, match="1 or more sets"):
        DoubleBuffer(FakeStage(), sets=0, stall_timeout=1)

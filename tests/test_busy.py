"""What ``nvidia-smi`` may say of a GPU's utilization, while something is measured."""

import threading

from benchmarks import busy


def test_a_gpu_that_does_not_tell_is_left_out(monkeypatch):
    said, over = iter(["[N/A]", "[N/A]\n40\n60", None]), threading.Event()

    def output(*_):
        if (text := next(said, None)) is None:
            over.set()
        return text

    monkeypatch.setattr(busy, "EVERY", 0.001)
    monkeypatch.setattr(busy, "output", output)
    with busy.utilization() as looks:
        assert over.wait(60)
    assert [busy.get("gpu") for _, busy in looks[:3]] == [None, 50.0, None]

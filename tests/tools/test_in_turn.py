"""Engines that are measured together: one answers at a time."""

import os

import pytest
from benchmarks import in_turn

from sipipe.errors import SiPipeError


def test_engines_answer_in_turn_and_what_ends_one_ends_the_others(monkeypatch):
    said = []

    def answer(side, job, module, *, kept):
        assert module == "benchmarks.in_turn"
        assert job["turn"] == kept
        try:
            for _ in range(3):
                if not os.read(kept[0], 1):
                    raise SiPipeError("the engine that it takes turns with has ended")
                said.append(side)
                if job.get("fails"):
                    raise SiPipeError("out of luck")
                os.write(kept[1], b".")
            os.read(kept[0], 1)
        finally:
            for descriptor in kept:
                os.close(descriptor)
        return side.upper()

    monkeypatch.setattr(in_turn, "measured", answer)
    monkeypatch.setenv("PYTHONPATH", "")
    assert in_turn.measured_in_turn({"a": {}, "b": {}, "c": {}}) == {"a": "A", "b": "B", "c": "C"}
    assert said == ["a", "b", "c"] * 3
    said.clear()
    with pytest.raises(SiPipeError, match=r"out of luck|has ended"):
        in_turn.measured_in_turn({"a": {}, "b": {"fails": True}})
    assert said == ["a", "b"]

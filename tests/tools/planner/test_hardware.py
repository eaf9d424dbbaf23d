"""The data file: every number has a source, and what is assumed has a range."""

import json
import tomllib
from pathlib import Path

import pytest
from benchmarks.results import RESULTS

from sipipe.tools.planner import hardware


def test_every_number_has_a_source():
    def walk(prefix, entry):
        for key, value in entry.items():
            if isinstance(value, dict):
                yield from walk(f"{prefix}{key}.", value)
            elif not isinstance(value, str):
                yield prefix + key, value

    table = Path(hardware.__file__).with_name("hardware.toml").read_text("utf-8")
    found = dict(walk("", tomllib.loads(table)))
    assert len(found) > 100
    for name, entry in found.items():
        number, source, *ends = entry
        assert isinstance(number, int | float), name
        assert len(source) > 5, name
        if ends:  # what nobody has measured on the cluster in question
            assert min(ends) <= number <= max(ends), name
        if source.startswith("assumption"):
            assert len(ends) == 2, f"{name} is assumed and has no range"
            assert ends[0] != ends[1], name


@pytest.mark.parametrize("kind", ["greedy", "temperature", "top-p", "all"])
def test_the_cost_of_sampling_is_the_one_that_was_kept(kind):
    kept = json.loads((RESULTS / "sampling-avx512.json").read_text())
    assert "V 151,936, B 64" in kept["title"]
    (row,) = [row for row in kept["rows"] if row["strategy"] == kind]
    for field, column in (("core_ns", "float32"), ("vllm_core_ns", "stock")):
        cases = ("stated", "quickest", "slowest")
        found = [getattr(hardware.sampling(kind, hardware.Assumed(c)), field) for c in cases]
        measured = row[column] * 1e6 / 151_936
        wanted = f"hardware.toml, sampling.{kind}.{field}: {measured:.2g} by sampling-avx512.json"
        assert found[0] == pytest.approx(measured, rel=0.05), wanted
        assert found[1:] == pytest.approx([found[0] / 2, found[0] * 2]), wanted


def test_what_is_assumed_has_ends_and_can_be_given():
    assumed = hardware.assumptions()
    name = "engine.vllm-async.transfer_us"
    value, quickest, slowest, source = assumed[name]
    assert quickest < value < slowest
    assert source.startswith("assumption")

    def transfer(case, **given):
        return hardware.engine("vllm-async", hardware.Assumed(case, given)).transfer_us

    assert [transfer(c) for c in ("quickest", "stated", "slowest")] == [quickest, value, slowest]
    assert {transfer(c, **{name: 7.0}) for c in ("quickest", "stated", "slowest")} == {7.0}
    ends = [hardware.engine(key, hardware.Assumed("slowest")).uneven for key in ("vllm", "sipipe")]
    assert ends[0] == ends[1] == assumed["loop.uneven"][2]

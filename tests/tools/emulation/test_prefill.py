"""`python -m benchmarks.prefill` without engines: what it makes of their times."""

from xml.etree import ElementTree

import pytest
from benchmarks import prefill
from benchmarks.emulation.cluster import emulation
from benchmarks.pictures import PICTURES


def test_figures_are_in_the_devices_time():
    loads = [{"load": [2, 1000, 4], "ttft": [[0.5, 1.0], [0.7, 2.0]], "between": [0.01, 0.03]}]
    row = prefill.figures({"loads": loads}, 0, 4.0)
    assert row["ttft"] == pytest.approx(4 * 1.05)
    assert row["prompt tokens/s"] == round((2000 / 4 + 2000 / 8) / 2)
    assert row["time per token p50 / p99"] == "10.0 / 10.0"


def test_no_pipeline_is_quicker_than_its_stages_work():
    """Four times the devices, a quarter of the time; a prompt twice as long takes more than twice it."""
    few, many = (emulation(f"deepseek-v3-{n}xh200", p, jitter=0.0) for n, p in ((16, 2), (32, 4)))
    times = [prefill.once(made.profile, 131_072) for made in (few, many)]
    assert times[0] == pytest.approx(2 * times[1], rel=0.1)
    assert prefill.once(many.profile, 262_144) > 2.2 * times[1]


def test_the_picture_has_a_line_for_each_engine():
    rows = [
        {"engine": name, "of": "a & b", "prompt": n, "ttft": n / 1e4, "prompt tokens/s": 1e4}
        for name in ("equal times", "stock")
        for n in (2048, 8000)
    ]
    picture = ElementTree.fromstring(PICTURES["lengths"]("<title>", rows))
    lines = [each for each in picture.iter() if each.tag.endswith("polyline")]
    assert len(lines) == 4
    assert all(len(line.get("points").split()) == 2 for line in lines)

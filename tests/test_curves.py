"""The picture of what is served over load."""

import re
from xml.etree import ElementTree

import pytest
from benchmarks import curves


@pytest.fixture
def results():
    return {
        name: {
            "rows": [
                {"engine": engine, panel.x: x, panel.y: f"{1000 * x:,} (1-2)"}
                for engine in curves.ENGINES
                for x in (1, 4, 16)
            ]
        }
        for name, panel in curves.PANELS.items()
    }


def test_each_panel_has_a_line_of_each_engine_and_values_in_place(results):
    picture = ElementTree.fromstring(curves.draw(results, "dark"))
    lines = [each for each in picture.iter() if each.tag.endswith("polyline")]
    assert len(lines) == 9
    for line in lines:
        points = [tuple(map(float, pair.split(","))) for pair in line.get("points").split()]
        xs, ys = zip(*points, strict=True)
        assert xs[1] - xs[0] == pytest.approx(xs[2] - xs[1]), "each value is as far from the next"
        base = curves.TOP + curves.HEIGHT
        assert base - ys[2] == pytest.approx(16 * (base - ys[0]), rel=0.05), "by size, from 0"
        assert ys[2] >= curves.TOP
    texts = [each.text for each in picture.iter() if each.tag.endswith("text")]
    assert {"SiPipe, 2 stages", "20,000", "16", "output tokens/s"} <= set(texts)


def test_a_result_that_is_not_kept_leaves_its_panel_out(results):
    del results["load-rates"]
    assert len(re.findall("<polyline", curves.draw(results, "light"))) == 6

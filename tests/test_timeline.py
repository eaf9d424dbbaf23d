"""README's picture: what of two traces is kept, and how it is drawn."""

import re
from xml.etree import ElementTree

import pytest
from benchmarks import timeline
from benchmarks.made_up_trace import Example, write_example
from benchmarks.results import ROOT, pictures

from sipipe.tools.report.reader import read_trace

LONGEST = 60_000
"""Characters of a picture."""


@pytest.fixture
def rows(tmp_path):
    found = []
    for engine in timeline.ENGINES:
        trace = str(tmp_path / engine)
        write_example(trace, Example(stages=2, iterations=200, stock=engine != "SiPipe"))
        began, end = read_trace(trace).window()
        result = {
            "tokens_per_second": {timeline.SAMPLING: [10.0, 30.0, 20.0]},
            "spans": {timeline.SAMPLING: [(0, 1), (0, 1), (began, end)]},
        }
        found.append({"engine": engine, **timeline.row(result, trace)})
    return found


def test_the_median_round_is_kept(rows):
    stock, ours = rows
    assert stock["tok/s"] == 20
    assert stock["lanes"].keys() == {"stage 0", "stage 1"}
    assert stock["lanes"]["stage 1"].keys() == {"forward", "output projection", "sampling"}
    assert ours["lanes"].keys() == {"stage 0", "stage 1", "CPU sampler"}
    assert ours["lanes"]["CPU sampler"].keys() == {"sampling"}
    assert all(0 < row[f"stage {stage} busy %"] <= 100 for row in rows for stage in (0, 1))
    for row in rows:
        assert row["lanes"]["stage 0"]["forward"][0][0] == 0
        for lane in row["lanes"].values():
            for times in lane.values():
                assert all(0 <= a <= b <= 1000 * timeline.WINDOW_MS for a, b in times)


def test_no_text_of_the_picture_lies_on_another(rows):
    picture = ElementTree.fromstring(timeline.draw(rows, "light"))
    space = "{http://www.w3.org/2000/svg}"
    boxes = []
    for text in picture.iter(f"{space}text"):
        x, y, size = (float(text.get(key, 13)) for key in ("x", "y", "font-size"))
        width = 0.62 * size * len("".join(text.itertext()))
        x -= {None: 0, "middle": width / 2, "end": width}[text.get("text-anchor")]
        boxes.append((x, y - size, x + width, y))
    for i, (left, top, right, low) in enumerate(boxes):
        assert 0 <= left < right <= timeline.WIDTH
        for other in boxes[:i]:
            apart = right <= other[0] or other[2] <= left or low <= other[1] or other[3] <= top
            assert apart, (boxes[i], other)


def test_the_pictures_of_the_tree_are_those_of_the_kept_results():
    kept = pictures()
    shown = re.findall(r'src(?:set)?="([^"]+)"', (ROOT / "README.md").read_text())
    assert sorted(kept) == sorted(shown)
    for name, picture in kept.items():
        assert (ROOT / name).read_text() == picture, "python -m benchmarks.results draws it anew"
        assert len(picture) <= LONGEST

"""README's picture: what of two traces is kept, and how it is drawn."""

import re

from benchmarks.results import ROOT, pictures

LONGEST = 60_000
"""Characters of a picture."""


def test_the_pictures_of_the_tree_are_those_of_the_kept_results():
    kept = pictures()
    found = re.compile(r'src(?:set)?="([^"]+)"').findall
    shown = found((ROOT / "README.md").read_text())
    shown += [f"docs/{name}" for name in found((ROOT / "docs/benchmarks.md").read_text())]
    assert sorted(kept) == sorted(shown)
    for name, picture in kept.items():
        assert (ROOT / name).read_text() == picture, "python -m benchmarks.results draws it anew"
        assert len(picture) <= LONGEST

"""Links of the pages lead somewhere, and messages that the troubleshooting page quotes are said."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    page
    for folder in (".", "docs", "tests", "tests/faults", "benchmarks/results")
    for page in (ROOT / folder).glob("*.md")
)


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of the headings."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    found: dict[str, int] = {}
    for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE):
        name = re.sub(r"[^\w\- ]", "", heading.lower().replace("`", "")).replace(" ", "-")
        found[name] = found.get(name, -1) + 1
    return {f"{name}-{i}" if i else name for name, last in found.items() for i in range(last + 1)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for link in re.findall(r'(?:\]\(|src="|srcset=")([^)\s"]+)', page.read_text()):
        if not re.match(r"[a-z]+:", link):
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            assert target.exists(), link
            assert not anchor or anchor in anchors(target), link


def test_tests_that_compatibility_names_exist():
    """`test_x.py` and `room/test_x.py` are below tests/engine, `tests/room` is below the root."""
    page = (ROOT / "docs/compatibility.md").read_text()
    names = re.findall(r"`((?:\w+/)*test_\w+\.py)`", page)
    assert len(names) > 30
    for name in names:
        engine = ROOT / "tests/engine"
        assert (ROOT / name).exists() or list(engine.rglob(name)), name


LISTS = {"README", "log"}
"""Pages of docs/ that lead to others by their whole text."""


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if page.parent.name == "docs" and page.stem not in LISTS],
    ids=str,
)
def test_a_page_ends_where_to_go_on(page):
    last = page.read_text().rstrip().splitlines()[-1]
    assert re.match(r"Where to go on: .*\]\(", last), f"no last line 'Where to go on: …': {last}"


def test_the_front_page_of_docs_lists_every_page():
    front = (ROOT / "docs/README.md").read_text()
    for page in (ROOT / "docs").glob("*.md"):
        assert page.stem == "README" or f"]({page.name})" in front, page.name


def said() -> list[str]:
    """Every text of the code; what is put in when it runs is left out."""
    texts = []
    for file in (ROOT / "src/sipipe").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(re.sub(r"%[.\d]*[sdg]", "…", node.value))
            elif isinstance(node, ast.JoinedStr):
                parts = [n.value if isinstance(n, ast.Constant) else "…" for n in node.values]
                texts.append("".join(map(str, parts)))
    return texts


def test_messages_of_the_troubleshooting_page_are_the_codes():
    texts = said()
    page = (ROOT / "docs/troubleshooting.md").read_text()
    quoted = re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE)
    assert len(quoted) > 30
    for message in quoted:
        parts = [part for part in message.split("…") if part]
        assert any(all(part in text for part in parts) for text in texts), message

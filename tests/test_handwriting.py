"""Rules of handwriting that a tool can check (CONTRIBUTING.md, "How we write").

Every room of src is held at zero; ``python -m tests.test_handwriting ROOM`` prints what breaks a rule.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "sipipe"

PRONOUNS = frozenset(
    [
        "told",
        "found",
        "one",
        "own",
        "given",
        "asked",
        "said",
        "kept",
        "whole",
        "here",
        "there",
        "beside",
        "behind",
        "alone",
        "each",
        "others",
        "rest",
        "such",
        "those",
        "these",
        "both",
    ]
)
"""No names for variables: nobody can look them up, and each meant ten things in this code."""

OBLIQUE = re.compile(r"(Of|What|Whether|How|Who|By|That|As|And|In|With)\b")
"""Beginnings of a docstring that is half a sentence. A noun or a verb comes first."""

PAIRS = (
    {"start", "stop"},
    {"start", "end"},
    {"low", "high"},
    {"left", "right"},
    {"rows", "columns"},
    {"reader", "writer"},
    {"sender", "receiver"},
    {"reading", "writing"},
    {"first", "last"},
    {"width", "height"},
    {"host", "port"},
)
"""Values that are one thing, and may be assigned in one statement."""


def findings(file: Path) -> Iterator[tuple[str, int]]:
    """Rules that ``file`` breaks, each with the line."""
    text = file.read_text()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Assign):
            yield from _assignment(node)
        elif isinstance(node, ast.Call):
            yield from _call(node)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module):
            yield from _docstrings(node)


def _assignment(node: ast.Assign) -> Iterator[tuple[str, int]]:
    for target in node.targets:
        if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
            names = {ast.unparse(name).removeprefix("self.").strip("_") for name in target.elts}
            values = {ast.unparse(value) for value in node.value.elts}
            swap = {ast.unparse(name) for name in target.elts} == values
            if not swap and names not in PAIRS:
                yield "several values in one assignment", node.lineno
        for name in ast.walk(target):
            if isinstance(name, ast.Name) and name.id.strip("_") in PRONOUNS:
                yield "a pronoun as a variable", node.lineno


def _call(node: ast.Call) -> Iterator[tuple[str, int]]:
    constructs = isinstance(node.func, ast.Name) and node.func.id[:1].isupper()
    stars = [argument for argument in node.args if isinstance(argument, ast.Starred)]
    double = [keyword for keyword in node.keywords if keyword.arg is None]
    if constructs and (stars or double):
        yield "* or ** into a constructor", node.lineno


def _docstrings(
    node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef,
) -> Iterator[tuple[str, int]]:
    """The docstring of ``node`` and those behind its fields."""
    for before, statement in zip([None, *node.body], node.body, strict=False):
        if not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)):
            continue
        words = statement.value.value
        documents = before is None or isinstance(before, ast.Assign | ast.AnnAssign)
        if isinstance(words, str) and documents and OBLIQUE.match(words):
            yield "a docstring that begins obliquely", statement.lineno


def room(file: Path) -> str:
    """The room of ``file``: up to two folders below src/sipipe, or the file itself at the top."""
    parts = file.relative_to(SOURCE).parts
    return "/".join(parts[: min(2, len(parts) - 1)]) or parts[0]


ROOMS = sorted({room(file) for file in SOURCE.rglob("*.py")})


def places(name: str) -> dict[str, list[str]]:
    """Places of the room ``name`` that break a rule, by rule."""
    broken: dict[str, list[str]] = {}
    for file in sorted(SOURCE.rglob("*.py")):
        if room(file) == name:
            for rule, line in findings(file):
                broken.setdefault(rule, []).append(f"{file.relative_to(ROOT)}:{line}")
    return broken


HELPERS = (
    "engine/engine_run.py",
    "engine/engines.py",
    "engine/fork_server.py",
    "engine/forked_children.py",
    "engine/forks.py",
    "engine/goldens.py",
    "engine/lives.py",
    "engine/servers.py",
    "engine/session_clients.py",
    "engine/shelf.py",
    "hosts.py",
)
"""Files below tests/ that many tests rely on, which are held at zero, too."""

OPEN_SETS = frozenset({"* or ** into a constructor"})
"""Rules that helpers may break: they hand on options of vLLM's, which are an open set."""


@pytest.mark.parametrize("name", HELPERS)
def test_a_helper_is_written_by_the_rules(name):
    broken = list(findings(ROOT / "tests" / name))
    assert not [(rule, line) for rule, line in broken if rule not in OPEN_SETS]


@pytest.mark.parametrize("name", sorted(ROOMS))
def test_a_room_is_written_by_the_rules(name):
    assert not places(name)


@pytest.mark.parametrize(
    ("code", "rule"),
    [
        ("a, b = 1, 2", "several values in one assignment"),
        ("a, b = b, a", None),
        ("start, stop = 0, 9", None),
        ("a, b = pair", None),
        ("told = 1", "a pronoun as a variable"),
        ("x = Link(**settings)", "* or ** into a constructor"),
        ("x = Link(*parts)", "* or ** into a constructor"),
        ("x = link(*parts)", None),
        ('def rows():\n    """Of BIC-L."""', "a docstring that begins obliquely"),
        (
            'class Plan:\n    rows: int\n    """Whether it runs."""',
            "a docstring that begins obliquely",
        ),
        ('def rows():\n    """Rows that the logits channel has room for."""', None),
        ('def rows():\n    """Wholly by row."""', None),
    ],
)
def test_the_rules_find_what_they_are_for(tmp_path, code, rule):
    file = tmp_path / "code.py"
    file.write_text(code)
    assert [name for name, _ in findings(file)] == ([rule] if rule else [])


def main() -> None:
    """Print what breaks a rule, in the rooms that are named, or in all."""
    for name in sys.argv[1:] or ROOMS:
        for rule, where in sorted(places(name).items()):
            print(f"{name}: {rule}: {len(where)}", *where, sep="\n  ")


if __name__ == "__main__":
    main()

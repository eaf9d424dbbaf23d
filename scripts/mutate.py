"""Which small mistakes in a module do its tests notice? One mutant at a time, in a copy of the tree.

    python scripts/mutate.py --count 20 ring double-buffer scheduling requests

A mutant is one change of one expression: a comparison turned round, a constant off by one, `and`
for `or`, a sign, a call or an assignment left out. Which ones are tried is drawn by --seed. A
mutant is killed when the target's tests fail or hang; those that survive are printed.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SECONDS = 150

TARGETS: dict[str, tuple[list[str], list[str]]] = {
    "ring": (["src/sipipe/ipc/ring"], ["tests/ipc", "--ignore=tests/ipc/link"]),
    "double-buffer": (
        ["src/sipipe/worker/double_buffer.py"],
        ["tests/worker/test_turns.py", "tests/worker/test_stage.py"],
    ),
    "scheduling": (
        ["src/sipipe/engine/scheduling/policy.py"],
        ["tests/engine/scheduling/test_policy.py", "tests/engine/scheduling/test_scheduler.py"],
    ),
    "requests": (
        ["src/sipipe/engine/iteration/requests.py", "src/sipipe/engine/iteration/iterations.py"],
        ["tests/engine/iteration/test_requests.py", "tests/engine/iteration/test_iterations.py"],
    ),
    "results": (
        ["src/sipipe/engine/iteration/resolve.py"],
        [
            "tests/engine/iteration/test_iterations.py",
            # An engine each: the threads are tested nowhere else.
            "tests/engine/test_parity.py::test_stages_equal_stock",
            "tests/engine/test_features.py::test_logprobs_of_chosen_tokens_equal_stock",
        ],
    ),
    "inputs": (["src/sipipe/worker/inputs/prepare.py"], ["tests/worker/test_prepare.py"]),
    "costs": (["src/sipipe/tools/planner/costs.py"], ["tests/tools/planner"]),
    "slots": (
        ["src/sipipe/engine/scheduling/scheduler.py"],
        ["tests/engine/scheduling/test_scheduler.py"],
    ),
}
"""Modules, and the tests that are to notice."""

COMPARISONS = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}


def mutants(tree: ast.Module) -> Iterator[tuple[int, str, ast.Module]]:
    """Line, what was done, and the changed module, for every change there is."""
    for index, node in enumerate(ast.walk(tree)):
        for what, change in _changes(node):
            changed = copy.deepcopy(tree)
            for place, twin in enumerate(ast.walk(changed)):
                if place == index:
                    change(twin)
                    break
            yield getattr(node, "lineno", 0), what, changed


def _changes(node: ast.AST) -> list[tuple[str, object]]:
    found: list[tuple[str, object]] = []
    if isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARISONS:
        other = COMPARISONS[type(node.ops[0])]
        found.append(
            (
                f"{type(node.ops[0]).__name__} -> {other.__name__}",
                lambda n: n.ops.__setitem__(0, other()),
            )
        )
    if isinstance(node, ast.BoolOp):
        other = ast.Or if isinstance(node.op, ast.And) else ast.And
        found.append((f"-> {other.__name__}", lambda n: setattr(n, "op", other())))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub):
        other = ast.Sub if isinstance(node.op, ast.Add) else ast.Add
        found.append((f"-> {other.__name__}", lambda n: setattr(n, "op", other())))
    if isinstance(node, ast.Constant) and type(node.value) is int:
        found.append(
            (f"{node.value} -> {node.value + 1}", lambda n: setattr(n, "value", n.value + 1))
        )
    if isinstance(node, ast.Constant) and type(node.value) is bool:
        found.append((f"not {node.value}", lambda n: setattr(n, "value", not n.value)))
    if isinstance(node, ast.If | ast.While):
        found.append(
            ("condition negated", lambda n: setattr(n, "test", ast.UnaryOp(ast.Not(), n.test)))
        )
    if isinstance(node, ast.FunctionDef | ast.If | ast.For | ast.While | ast.With):
        for place, statement in enumerate(node.body):
            if (
                isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call)
            ) or isinstance(statement, ast.AugAssign):
                text = f"left out: {ast.unparse(statement)[:60]}"
                found.append((text, lambda n, at=place: n.body.__setitem__(at, ast.Pass())))
    return found


def run(directory: Path, tests: list[str]) -> bool:
    """Whether the tests pass."""
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": str(directory / "src")},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        return process.wait(SECONDS) == 0
    except subprocess.TimeoutExpired:
        return False
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("targets", nargs="*", default=list(TARGETS), help=", ".join(TARGETS))
    parser.add_argument("--count", type=int, default=20, help="mutants of each target (20)")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="mutants-") as place:
        copied = Path(place)
        for part in ("src", "tests", "benchmarks", "docs", "scripts"):
            shutil.copytree(
                ROOT / part, copied / part, ignore=shutil.ignore_patterns("__pycache__")
            )
        shutil.copy(ROOT / "pyproject.toml", copied)
        for name in arguments.targets:
            _try(name, copied, arguments.count, random.Random(arguments.seed))
    return 0


def _try(name: str, directory: Path, count: int, rng: random.Random) -> None:
    places, tests = TARGETS[name]
    files = [
        f for p in places for f in ([ROOT / p] if p.endswith(".py") else (ROOT / p).glob("*.py"))
    ]
    drawn = [
        (file, line, what, changed)
        for file in sorted(files)
        for line, what, changed in mutants(ast.parse(file.read_text()))
    ]
    if not run(directory, tests):
        raise SystemExit(f"{name}: the tests fail without any change")
    rng.shuffle(drawn)
    survivors = []
    for file, line, what, changed in drawn[:count]:
        target = directory / file.relative_to(ROOT)
        whole = target.read_text()
        target.write_text(ast.unparse(ast.fix_missing_locations(changed)))
        if run(directory, tests):
            survivors.append(f"  {file.relative_to(ROOT)}:{line}: {what}")
        target.write_text(whole)
    tried = min(count, len(drawn))
    print(f"{name}: {tried} of {len(drawn)} mutants, {tried - len(survivors)} killed", flush=True)
    print("\n".join(survivors), flush=True)


if __name__ == "__main__":
    raise SystemExit(main())

"""The shape of the source: short files, no circle of imports, and a map that tells the truth."""

import ast
import re
import shutil
import statistics
import subprocess
from pathlib import Path

import pytest
from benchmarks.results import is_benchmark

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "sipipe"
FILES = sorted(SOURCE.rglob("*.py"))
MODULES = {
    ".".join(("sipipe", *file.relative_to(SOURCE).with_suffix("").parts)).removesuffix(
        ".__init__"
    ): file
    for file in FILES
}


def test_files_are_short():
    lines = {file: len(file.read_text().splitlines()) for file in FILES}
    assert not {str(file): count for file, count in lines.items() if count > 400}
    assert statistics.median(lines.values()) <= 170


def imports(file: Path) -> set[str]:
    """Modules of ours that ``file`` imports, wherever in it, but for type checkers."""
    found: set[str] = set()
    nodes: list[ast.AST] = [ast.parse(file.read_text())]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            nodes += node.orelse
            continue
        if isinstance(node, ast.ImportFrom) and node.module in MODULES:
            for name in node.names:
                whole = f"{node.module}.{name.name}"
                found.add(whole if whole in MODULES else node.module)
        elif isinstance(node, ast.Import):
            found |= {name.name for name in node.names if name.name in MODULES}
        nodes += ast.iter_child_nodes(node)
    return found


def test_no_file_imports_itself_through_others():
    arrows = {name: imports(file) for name, file in MODULES.items()}
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " -> ".join((*path[path.index(name) :], name))
        if name not in done:
            for target in arrows[name]:
                visit(target, (*path, name))
            done.add(name)

    for name in arrows:
        visit(name, ())


def test_names_on_the_map_exist():
    """`room/file.py`, `room/`, and `room/file.py:Name.method` in code spans."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    named = re.findall(r"`((?!tests/)[a-z_/]+(?:\.py|/))(?::([A-Za-z_.]+))?`", text)
    assert len(named) > 20
    for path, name in named:
        file = SOURCE / path
        assert file.exists(), path
        if name:
            defined = definitions(ast.parse(file.read_text()))
            assert name in defined, f"{path} has no {name}"


def test_the_map_counts_the_files_of_an_iteration():
    text = (ROOT / "docs" / "architecture.md").read_text()
    table, _, rest = text.partition("| step | process, thread | files |")[2].partition("These are ")
    files = set(re.findall(r"`([a-z_/]+\.py)`", table))
    assert rest.split()[0] == str(len(files))


def test_the_map_names_every_room():
    text = (ROOT / "docs" / "architecture.md").read_text()
    for area in ("engine", "worker", "ipc"):
        for room in (SOURCE / area).glob("*/__init__.py"):
            assert f"| `{area}/{room.parent.name}/` |" in text


PAGES = sorted([*(ROOT / "docs").glob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_modules_and_tests_that_a_page_names_exist(page):
    """`sipipe.room.module.Name`, `tests/room/test_x.py`, `benchmarks.x`. The log tells of the past."""
    if page.stem == "log":
        pytest.skip("a log of what was")
    text = page.read_text()
    for name in re.findall(r"`(sipipe(?:\.\w+)+)", text):
        module = name
        while module not in MODULES:
            module = module.rpartition(".")[0]
        rest = name.removeprefix(module).strip(".")
        file = MODULES[module]
        # What stands in no file is an attribute of a class, or a package.
        assert not rest or rest.split(".")[0] in file.read_text(), f"{name}: not in {file}"
    for path in re.findall(r"`((?:tests|benchmarks|scripts|src)/[\w/]+\.[\w.]+)", text):
        assert (ROOT / path).exists(), path
    for name in re.findall(r"python -m benchmarks\.([a-z_]+)", text):
        assert is_benchmark(name), name


@pytest.mark.skipif(shutil.which("make") is None, reason="no make here")
def test_what_make_bench_runs_has_a_quick_form():
    said = subprocess.run(["make", "-n", "bench"], cwd=ROOT, capture_output=True, text=True)
    (names,) = re.findall(r"for name in (.+?); do", said.stdout)
    assert len(names.split()) > 10
    for name in names.split():
        file = ROOT / "benchmarks" / f"{name}.py"
        text = (file if file.exists() else file.with_suffix("") / "__main__.py").read_text()
        assert "__main__" in text, name
        assert ('"--quick"' in text) == ("ArgumentParser(" in text), name


def definitions(tree: ast.Module) -> set[str]:
    found: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {
                f"{node.name}.{inner.name}"
                for inner in node.body
                if isinstance(inner, ast.FunctionDef)
            }
    return found


def test_every_while_of_a_kernel_says_what_bounds_it():
    for file in (*SOURCE.glob("sampler/kernels/*.py"), SOURCE / "worker/inputs/kernels.py"):
        text = file.read_text()
        kernels = [
            node
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.FunctionDef)
            and {"kernel", "entry"} & {ast.unparse(name) for name in node.decorator_list}
        ]
        for loop in (node for kernel in kernels for node in ast.walk(kernel)):
            if isinstance(loop, ast.While):
                above = text.splitlines()[loop.lineno - 2].strip()
                assert above.startswith("# bound: "), f"{file}:{loop.lineno}"

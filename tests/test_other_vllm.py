"""The seams (``test_seams.py``) against the source of another vLLM, which is read and never run.

    pip download --no-deps vllm==0.33.0 && unzip -q vllm-*.whl 'vllm/*.py' -d other
    SIPIPE_OTHER_VLLM=other pytest tests/test_other_vllm.py

What differs between the versions that docs/compatibility.md names is listed in ``MOVED``.
"""

import ast
import functools
import os
from pathlib import Path

import pytest

from tests import test_seams as seams

TREE = os.environ.get("SIPIPE_OTHER_VLLM")

pytestmark = pytest.mark.skipif(not TREE, reason="SIPIPE_OTHER_VLLM names no unpacked wheel")

MOVED = {
    "vllm.entrypoints.serve.utils.api_utils:cli_env_setup": (
        "vllm.entrypoints.common.startup:cli_env_setup"
    ),
    "vllm.entrypoints.launchers.cli_args:FrontendArgs": (
        "vllm.entrypoints.common.cli_args:FrontendArgs"
    ),
}
"""Where 0.33 has what 0.32 has elsewhere: what we import is tried in both places, of what vLLM
hands us the place is all the same."""


@functools.cache
def module(name: str) -> ast.Module | None:
    base = Path(TREE or ".", *name.split("."))
    for file in (base.with_suffix(".py"), base / "__init__.py"):
        if file.exists():
            return ast.parse(file.read_text())
    return None


@functools.cache
def definition(name: str, wanted: str):
    """What module ``name`` calls ``wanted``: a definition, an assignment, or through an import."""
    tree = module(name)
    if tree is None:
        return None
    for node in ast.walk(tree):
        if getattr(node, "name", None) == wanted and isinstance(
            node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        ):
            return node, name
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                whole = alias.name == "*"
                if node.module and (whole or (alias.asname or alias.name) == wanted):
                    inside = Path(TREE or ".", *name.split("."), "__init__.py").exists()
                    package = name.split(".")[: inside - node.level or None]
                    source = ".".join([*(package if node.level else []), node.module])
                    found = definition(source, wanted if whole else alias.name)
                    if found or not whole:
                        return found or (node, source)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(getattr(target, "id", None) == wanted for target in targets):
                return node, name
    if module(f"{name}.{wanted}") is not None:
        return tree, name
    text = ast.unparse(tree)  # lazy attributes are strings
    return (tree, name) if f"'{wanted}'" in text else None


def family(found):
    """A class and its bases, as far as they are vLLM's."""
    node, name = found
    if isinstance(node, ast.ClassDef):
        yield node
        for base in node.bases:
            above = definition(name, ast.unparse(base).split("[")[0].split(".")[-1])
            if above is not None:
                yield from family(above)


@pytest.mark.parametrize("place", seams.imported_names())
def test_what_we_import_is_there(place):
    for there in (place, MOVED.get(place, place)):
        name, _, wanted = there.partition(":")
        if definition(name, wanted) or module(f"{name}.{wanted}"):
            return
    pytest.fail(f"there is no {place}")


@pytest.mark.parametrize(("place", "parameters"), seams.METHODS.items(), ids=seams.METHODS)
def test_functions_have_the_parameters(place, parameters):
    name, _, path = place.partition(":")
    first, *rest = path.split(".")
    found = definition(name, first)
    assert found, place
    nodes = [found[0]]
    if rest:
        nodes = [
            node
            for one in family(found)
            for node in one.body
            if getattr(node, "name", None) == rest[0]
        ]
        assert nodes, place
    elif isinstance(nodes[0], ast.ClassDef):
        nodes = [n for c in family(found) for n in c.body if getattr(n, "name", "") == "__init__"]
    if parameters is None or not isinstance(nodes[0], ast.FunctionDef):
        return
    taken = nodes[0].args
    known = {a.arg for a in (*taken.posonlyargs, *taken.args, *taken.kwonlyargs)}
    missing = set(parameters.split()) - known
    assert not missing or taken.kwarg or taken.vararg, (place, known)


@pytest.mark.parametrize(("place", "names"), seams.ATTRIBUTES.items(), ids=seams.ATTRIBUTES)
def test_classes_have_the_attributes(place, names):
    name, _, wanted = place.partition(":")
    found = definition(name, wanted) if wanted else (module(name), name)
    if not found:
        name, _, wanted = MOVED[place].partition(":")
        found = definition(name, wanted)
    assert found, place
    text = "\n".join(map(ast.unparse, family(found))) if wanted else ast.unparse(found[0])
    missing = [n for n in names.split() if n not in text]
    assert not missing

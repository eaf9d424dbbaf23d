"""What vLLM's models send from stage to stage, against what a later stage of theirs reads.

``python scripts/stage_tensors.py`` prints a table of the installed vLLM's models that have stages
and something to look at; ``tests/stage_tensors.md`` keeps it with what was found for each row. Nothing
is imported of vLLM: the sources are parsed.

A class is looked at, with the functions inside it. ``sent``: keys of the ``IntermediateTensors`` that
its forward pass makes. ``room``: keys that it makes room for (``make_empty_intermediate_tensors``);
vLLM's runner hands a later stage these and no others. ``read``: keys that it takes out again. A read
under an ``if`` that asks for more than the place in the pipeline is *conditional*. ``arguments``: what
its ``forward`` is given beside the usual, and uses on every stage: nobody gives it to a later one.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import importlib.util
from collections.abc import Iterator
from pathlib import Path

USUAL = {"self", "input_ids", "positions", "intermediate_tensors", "inputs_embeds"}
PLACE = {"get_pp_group", "is_first_rank", "is_last_rank", "intermediate_tensors"}
"""Names by which an ``if`` asks for the place in the pipeline only."""


@dataclasses.dataclass(kw_only=True)
class StageTensors:
    """Keys of one class, where ``*`` stands for what is computed."""

    sent: set[str] = dataclasses.field(default_factory=set)
    room: set[str] = dataclasses.field(default_factory=set)
    read: set[str] = dataclasses.field(default_factory=set)
    conditional: set[str] = dataclasses.field(default_factory=set)
    arguments: set[str] = dataclasses.field(default_factory=set)

    def faults(self) -> list[str]:
        """What a later stage may miss, one sentence a kind."""
        kinds = {
            "sent, but has no room": self.sent - self.room if self.room else set(),
            "has room, but is not read": self.room - self.read if self.read else set(),
            "is read under a condition": self.conditional,
            "is an argument that later stages use": self.arguments - self.read
            if self.read
            else set(),
        }
        return [f"{kind}: {', '.join(sorted(keys))}" for kind, keys in kinds.items() if keys]


def keys_of(node: ast.expr) -> set[str]:
    """The strings that ``node`` has as keys or elements."""
    match node:
        case ast.Constant(value=str(key)):
            return {key}
        case ast.JoinedStr(values=values):
            parts = [str(v.value) if isinstance(v, ast.Constant) else "*" for v in values]
            return {"".join(parts)}
        case ast.Dict(keys=keys):
            return {key for each in keys if each is not None for key in keys_of(each)}
        case ast.List(elts=elements) | ast.Tuple(elts=elements):
            return {key for each in elements for key in keys_of(each)}
        case ast.DictComp(key=key):
            return keys_of(key)
        case ast.BinOp(left=left, right=right):
            return keys_of(left) | keys_of(right)
        case ast.Call(func=ast.Name(id="dict"), keywords=keywords):
            return {keyword.arg for keyword in keywords if keyword.arg}
    return set()


def names_in(node: ast.AST) -> set[str]:
    names = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
    return names | {each.attr for each in ast.walk(node) if isinstance(each, ast.Attribute)}


def is_intermediate(node: ast.expr) -> bool:
    """Whether ``node`` is what the previous stage sent."""
    if isinstance(node, ast.Attribute) and node.attr == "tensors":
        return is_intermediate(node.value)
    return isinstance(node, ast.Name) and node.id == "intermediate_tensors"


class _Function(ast.NodeVisitor):
    """Reads one function into ``found``."""

    def __init__(self, found: StageTensors, *, makes_room: bool) -> None:
        self.found = found
        self.made = found.room if makes_room else found.sent
        self.variables: dict[str, set[str]] = {}
        self.conditions = 0

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        inner = _Function(self.found, makes_room="make_empty" in node.name)
        for statement in node.body:
            inner.visit(statement)

    def visit_If(self, node: ast.If) -> None:
        asks = bool(names_in(node.test) - PLACE)
        for branch in (node.body, node.orelse):
            self.conditions += asks
            for statement in branch:
                self.visit(statement)
            self.conditions -= asks

    def _assign(self, target: ast.expr, value: ast.expr | None) -> None:
        if isinstance(target, ast.Name) and value is not None:
            self.variables.setdefault(target.id, set()).update(keys_of(value))
        if isinstance(target, ast.Subscript) and isinstance(target.value, ast.Name):
            self.variables.setdefault(target.value.id, set()).update(keys_of(target.slice))

    def visit_Assign(self, node: ast.Assign) -> None:
        for target in node.targets:
            self._assign(target, node.value)
        self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self._assign(node.target, node.value)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        name = next(iter(names_in(node.func)), "")
        if isinstance(node.func, ast.Attribute):
            name = node.func.attr
        arguments = [*node.args, *(keyword.value for keyword in node.keywords)]
        if name == "IntermediateTensors" and arguments:
            self.made |= self._value(arguments[0])
        elif name == "make_empty_intermediate_tensors_factory" and arguments:
            self.found.room |= self._value(arguments[0])
        elif (
            name in ("get", "pop")
            and isinstance(node.func, ast.Attribute)
            and is_intermediate(node.func.value)
            and node.args
        ):
            self._read(keys_of(node.args[0]))
        self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        if is_intermediate(node.value) and isinstance(node.ctx, ast.Load):
            self._read(keys_of(node.slice))
        self.generic_visit(node)

    def _value(self, node: ast.expr) -> set[str]:
        if isinstance(node, ast.Name):
            return self.variables.get(node.id, set())
        return keys_of(node)

    def _read(self, keys: set[str]) -> None:
        self.found.read |= keys
        if self.conditions:
            self.found.conditional |= keys


def arguments_of_every_stage(function: ast.FunctionDef) -> set[str]:
    """Arguments beside the usual that ``function`` reads outside the first stage's branch."""
    given = {each.arg for each in (*function.args.args, *function.args.kwonlyargs)} - USUAL
    used: set[str] = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and "is_first_rank" in names_in(node.test):
            for statement in node.orelse:
                visit(statement)
            return
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            used.add(node.id)
        for child in ast.iter_child_nodes(node):
            visit(child)

    for statement in function.body:
        visit(statement)
    return given & used


def read_class(node: ast.ClassDef) -> StageTensors:
    """What the methods of a class send, make room for, read and are given."""
    found = StageTensors()
    for method in node.body:
        if not isinstance(method, ast.FunctionDef):
            continue
        _Function(found, makes_room=False).visit(method)
        if method.name == "forward":
            found.arguments = arguments_of_every_stage(method)
    return found


def read_models(folder: Path) -> Iterator[tuple[str, StageTensors]]:
    """Each class of ``folder`` that sends, makes room for or reads tensors, as ``file:class``."""
    for file in sorted(folder.rglob("*.py")):
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.ClassDef):
                found = read_class(node)
                if found.sent or found.room or found.read:
                    yield f"{file.relative_to(folder)}:{node.name}", found


def models_folders() -> list[Path]:
    """The installed vLLM's models: one file each, and those with a package for each device."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        raise SystemExit("vLLM is not installed")
    package = Path(spec.origin).parent
    return [package / "model_executor" / "models", package / "models"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "folders", nargs="*", type=Path, help="models' sources (the installed vLLM's)"
    )
    folders = parser.parse_args().folders or models_folders()
    count = 0
    print("| model | what |\n| --- | --- |")
    for folder in folders:
        for name, found in read_models(folder):
            count += 1
            for fault in found.faults():
                print(f"| `{name}` | {fault} |")
    print(f"\n{count} classes looked at.")


if __name__ == "__main__":
    main()

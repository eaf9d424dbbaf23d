"""`make waits`: every wait of SiPipe's own code, into the table of tests/waits.md.

A wait says beside itself, in a comment above it or behind it, what bounds it and who ends it:
``# wait: BOUND; WHO WAKES IT``. A comment may go on in further lines. Of a lock, which is waited
for in many places, the line that makes it says for how long it is held. Nothing is said of a wait
whose bound is a number or a constant: the table shows that. ``tests/test_waits.py`` fails for a
wait that says nothing, and when the table is not what this writes.
"""

from __future__ import annotations

import ast
import functools
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
SOURCE, PAGE = ROOT / "src" / "sipipe", ROOT / "tests" / "waits.md"
BEGIN, END = "<!-- waits: written by `make waits` -->\n", "<!-- /waits -->"
BLOCKING = {
    *("wait", "wait_for", "join", "result", "get", "acquire", "communicate", "waitpid"),
    *("recv", "recv_bytes", "recv_into", "recv_fds", "recv_multipart", "accept", "readline"),
    *("recv_monitor_message", "wait_for_peer"),
    *("send", "sendall", "sendmsg", "send_fds", "send_bytes", "send_multipart"),
    *("poll", "select", "sleep", "sigwaitinfo", "sigtimedwait", "flock", "fcntl", "synchronize"),
    *("check_call", "check_output", "create_connection", "getaddrinfo", "urlopen", "term"),
    "barrier",
}
"""Functions and methods of these names wait, of whatever class: what is left out is below."""
BOUNDED = {
    "wait": "what it waits for",
    "join": "the thread's end",
    "acquire": "who holds it",
    "communicate": "the process's end",
    "run": "the process's end",
    "create_connection": "the other end",
}
"""Of these the bound is taken from a constant argument; and who wakes them."""
LOCKS = {"FileLock", "Lock", "RLock", "Condition", "Semaphore", "Barrier"}
MODULES = {
    "subprocess.run",
    "torch.distributed.broadcast",
    "select.select",
    "os.read",
    "os.write",
    "sys.stdin.read",
    "pickle.load",
    "ray.get",
    "recv_monitor_message",
}
NO_WAIT = re.compile(
    # Told not to wait.
    r"MSG_DONTWAIT|NOBLOCK|LOCK_NB|_SETLK,|eventfd_|\.poll\(0?\)$|\.poll\(\) is None"
    # Ends of our own channels, and devices: what waits is inside them.
    r"|^(stage|group|connection|self|self\._(connection|sender|tokens))\.send\(|^device\.wait\("
    r"|^self\._writer\."
    # Not waits at all.
    r"|^drafts\.join\("
    r"|^(builder|self\._builder|np|os\.path|os\.pathsep|shlex)\.|^['\"(b]|olumns\.join|^self\._times\.poll"
)


class Wait(NamedTuple):
    where: str
    """``room/file.py:Class.method``."""
    line: int
    call: str
    bound: str
    """Empty: nobody has said."""
    woken: str


def waits(path: Path, text: str | None = None) -> list[Wait]:
    """The waits of one file, in its order."""
    source = path.read_text() if text is None else text
    said, used = comments(source), set()
    tree, found = ast.parse(source), []
    constants = imported() | numbers(tree)
    for call, scope, statement in calls(tree):
        code = ast.unparse(call)
        if not is_wait(call, code):
            continue
        bound, woken, at = "", "", None
        for line in range(statement.lineno - 2, call.end_lineno or 0):
            if line + 1 in said:
                at = line + 1
        if at is not None:
            used.add(at)
            bound, _, woken = said[at].partition("; ")
        elif not code.startswith("time.sleep"):
            bound, woken = bound_of(call, constants)
        where = path.relative_to(SOURCE) if path.is_relative_to(SOURCE) else path
        found.append(Wait(f"{where}:{scope}", call.lineno, code, bound, woken))
    for line in said.keys() - used:
        raise SystemExit(
            f"{path}:{line}: a wait comment beside nothing that scripts/waits.py knows"
        )
    return found


def comments(source: str) -> dict[int, str]:
    """What ``# wait:`` comments say, by their last line."""
    found: dict[int, str] = {}
    begun = -1
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            line, text = token.start[0], token.string.lstrip("# ")
            alone = token.line.lstrip().startswith("#")
            if text.startswith("wait: "):
                begun, found[line] = line if alone else -1, text.removeprefix("wait: ")
            elif alone and begun == line - 1:
                begun, found[line] = line, f"{found.pop(begun)} {text}"
    return found


def calls(tree: ast.Module) -> Iterator[tuple[ast.Call, str, ast.stmt]]:
    """Every call, the names of what it is in, and the statement that it is a part of."""

    def walk(node: ast.AST, scope: str, statement: ast.stmt | None) -> Iterator[tuple]:  # type: ignore[type-arg]
        for child in ast.iter_child_nodes(node):
            inner, around = scope, statement
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                inner = f"{scope}.{child.name}".lstrip(".")
            if isinstance(child, ast.stmt):
                around = child
            if isinstance(child, ast.Call):
                yield child, inner, around
            yield from walk(child, inner, around)

    yield from sorted(walk(tree, "", None), key=lambda one: (one[0].lineno, one[0].col_offset))


def is_wait(call: ast.Call, code: str) -> bool:
    function = ast.unparse(call.func)
    name = function.rpartition(".")[2]
    if NO_WAIT.search(code) and name not in LOCKS:
        return False
    if name in LOCKS:
        return not call.args  # a condition on a lock that is made elsewhere
    if function in MODULES:
        return True
    if name == "get":  # of a queue; a dictionary's has a key
        return not call.args
    if name == "join" and function != name:  # of a thread: a string joins what is no constant
        return code.endswith(".join()") or "timeout" in code or bool(bound_of(call, {})[0])
    return name in BLOCKING and (
        function != name or name in ("wait", "sleep", "recv_monitor_message")
    )


@functools.cache
def imported() -> dict[str, str]:
    """Constants of any module."""
    found: dict[str, str] = {}
    for path in SOURCE.rglob("*.py"):
        found |= numbers(ast.parse(path.read_text()))
    return found


def numbers(tree: ast.Module) -> dict[str, str]:
    """The module's constants that are numbers, as text."""
    return {
        ast.unparse(target): f"{line.value.value:g}"
        for line in tree.body
        if isinstance(line, ast.Assign) and isinstance(line.value, ast.Constant)
        for target in line.targets
        if isinstance(line.value.value, int | float)
    }


def bound_of(call: ast.Call, constants: dict[str, str]) -> tuple[str, str]:
    """The bound of a call that takes one, if a constant says it, and who wakes it else."""
    woken = BOUNDED.get(ast.unparse(call.func).rpartition(".")[2], "")
    for value in (*call.args, *(word.value for word in call.keywords if word.arg == "timeout")):
        text = ast.unparse(value)
        if woken and isinstance(value, ast.Constant) and isinstance(value.value, int | float):
            return f"{value.value:g} s", woken
        if woken and re.fullmatch(r"_?[A-Z][A-Z_]+", text):
            return f"{constants[text]} s (`{text}`)" if text in constants else f"`{text}`", woken
    return "", ""


def everything() -> list[Wait]:
    return [wait for path in sorted(SOURCE.rglob("*.py")) for wait in waits(path)]


def table() -> str:
    rows: dict[tuple[str, str, str], dict[str, None]] = {}
    for wait in everything():
        call = re.sub(r"\s+", " ", wait.call)
        call = call if len(call) <= 60 else f"{call[:57]}..."
        rows.setdefault((call, wait.bound, wait.woken), {})[f"`{wait.where}`"] = None
    lines = ["| where | what | bound | who wakes it |", "| --- | --- | --- | --- |"]
    for (call, bound, woken), where in rows.items():
        lines.append(f"| {', '.join(where)} | `{call}` | {bound} | {woken} |")
    return "\n".join(lines) + "\n"


def written(page: str) -> str:
    """The page with the table as it is now."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    assert after, f"{PAGE} has no place for the table"
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))

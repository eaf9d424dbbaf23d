"""The table of hooks follows vLLM's source, names functions of ours, and is the page's."""

import ast
import importlib.util
import inspect
from itertools import groupby
from pathlib import Path

import pytest

import sipipe
from scripts import hooks as script
from sipipe.versions import SUPPORTED_VLLM, installed_vllm
from sipipe.worker.hooks.table import HOOKS, Hook

SOURCE = Path(sipipe.__file__).parent
MOVED = "self.kv_connector.post_forward"
"""Call whose place in vLLM's pass is another one since 0.33."""


def calls_of(caller: str) -> list[str]:
    """Functions that a method of vLLM calls, in the order of its source."""
    module, _, name = caller.partition(":")
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    scope, method = name.split(".")
    (definition,) = [
        node
        for owner in ast.parse(Path(spec.origin).read_text()).body
        if isinstance(owner, ast.ClassDef) and owner.name == scope
        for node in owner.body
        if isinstance(node, ast.FunctionDef) and node.name == method
    ]
    calls = [node for node in ast.walk(definition) if isinstance(node, ast.Call)]
    calls.sort(key=lambda call: (call.lineno, call.col_offset))
    return [ast.unparse(call.func) for call in calls]


def in_order(calls: list[str], named: list[str]) -> bool:
    """Say if ``calls`` has all of ``named``, one behind the other."""
    remaining = iter(calls)
    return all(name in remaining for name in named)


@pytest.mark.parametrize("caller", dict.fromkeys(hook.caller for hook in HOOKS))
def test_vllm_makes_the_calls_in_this_order(caller):
    pytest.importorskip("vllm", reason="vLLM is not installed: see make setup")
    # A call has several rows where different stages have different things there.
    named = [call for call, _ in groupby(hook.call for hook in HOOKS if hook.caller == caller)]
    if caller.endswith("GPUModelRunner.sample_tokens") and not is_first_supported():
        # Later releases ask the connector before they take in what was sampled.
        named.remove(MOVED)
        named.insert(named.index("self.postprocess_sampled"), MOVED)
    assert in_order(calls_of(caller), named), named


def is_first_supported() -> bool:
    installed = installed_vllm()
    assert installed is not None
    return installed.version.split("+")[0] == SUPPORTED_VLLM[0]


def test_a_connector_takes_what_vllms_takes():
    pytest.importorskip("vllm", reason="vLLM is not installed: see make setup")
    from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector

    from sipipe.worker.hooks.kv_connector import ReportingKVConnector

    for name in ("pre_forward", "post_forward"):
        _, *parameters = inspect.signature(getattr(ActiveKVConnector, name)).parameters
        inspect.signature(getattr(ReportingKVConnector, name)).bind(
            None, *(None for _ in parameters)
        )


def test_another_order_is_noticed():
    calls = ["self.prepare", "self.model", "self.prepare"]
    assert in_order(calls, ["self.prepare", "self.model"])
    assert not in_order(calls, ["self.model", "self.sample"])
    assert not in_order(calls, ["self.model", "self.model"])


def definitions(body):
    """Classes and functions of a body, also those that it has under a condition."""
    for node in body:
        if isinstance(node, ast.If):
            yield from definitions(node.body)
        elif isinstance(node, ast.ClassDef | ast.FunctionDef):
            yield node


@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: f"{hook.call}-{hook.where}")
def test_what_stands_there_exists(hook: Hook):
    file, _, name = hook.where.partition(":")
    body = ast.parse((SOURCE / file).read_text()).body
    for part in name.split("."):
        (node,) = [node for node in definitions(body) if node.name == part]
        body = node.body


def test_the_page_is_the_tables():
    assert script.PAGE.read_text() == script.page(), "run make hooks"

"""docs/upstream.md names everything that SiPipe replaces in vLLM and torch, and nothing else."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "sipipe"
PAGE = ROOT / "docs" / "upstream.md"

ROOMS = ("engine", "worker", "gpu_slices")
"""What has objects of vLLM."""
REPLACING = ("setattr", "patch.object", "extends")
"""Functions that replace the attribute that their second argument names."""
THEIRS = {
    "runner",
    "_runner",
    "model_runner",
    "model",
    "_model",
    "_module",
    "speculator",
    "group",
    "manager",
    "vllm_config",
}
"""What variables that hold objects of vLLM are called here."""

MEANT = {
    "options of the command line, before vLLM reads them": (
        "additional_config enforce_eager middleware async_scheduling distributed_executor_backend"
    ),
    "fields of the configuration that plugins are to set": (
        "worker_cls scheduler_cls assigned_physical_gpu_ids placement_group kv_cache_memory_bytes "
        "enable_jit_warmup use_tqdm_on_load"
    ),
    "fields of SiPipe's own class of the configuration": "replicas announced ahead",
    "a copy of vLLM's object, for one reader": (
        "parallel_config sampling_params speculative_config cache_config kv_events_config "
        "enable_prefix_caching num_gpu_blocks num_gpu_blocks_override max_logprobs logprobs_mode "
        "original_max_model_len pipeline_parallel_size rank _all_stop_token_ids draft_parallel_config"
    ),
    "a request's drafts, as vLLM's own loop sets them": "spec_token_ids",
    "a request of the engine's, before its scheduler sees it": (
        "max_tokens _bad_words_token_ids lora_request"
    ),
    "a scheduling output, before it is sent to the workers": (
        "new_token_ids earlier_aux_metadata kv_loads drafts_asked num_spec_tokens_to_schedule field "
        "_NUMBER"
    ),
    "a worker that stands for vLLM's": "max_model_len",
    "an output of ours": "kv_connector_output invalid_block_ids finished_recving failed_recving",
    "Python's, or of functions of ours": "_fd _inheriting writeable excepthook argv",
    "the pipeline group of ours": "receive send",
    "a mark of ours, where vLLM has no such attribute": "_sipipe_told_to_end",
    "options of a group that is being made": "name _timeout _devices",
}
"""What is set on objects of others and replaces nothing."""


def set_on_others(tree: ast.Module, defined: set[str]) -> set[str]:
    """Names of attributes that a module sets on what is not its own."""
    imported = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        and (node.module or "").split(".")[0] in ("vllm", "torch", "multiprocessing")
        for alias in node.names
    }
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            base = ast.unparse(node.value).split(".")
            if base != ["self"] and (
                base[0] in imported or base[-1] in THEIRS or node.attr not in defined
            ):
                found.add(node.attr)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in REPLACING:
            name = node.args[1]
            found.add(name.value if isinstance(name, ast.Constant) else ast.unparse(name))
    return found


def own_names(trees) -> set[str]:
    """Attributes of classes of ours."""
    found = set()
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.ClassDef):
            for part in node.body:
                targets = [getattr(part, "target", None), *getattr(part, "targets", ())]
                found |= {name.id for name in targets if isinstance(name, ast.Name)}
                found |= {part.name} if isinstance(part, ast.FunctionDef) else set()
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and ast.unparse(node.value) == "self"
        ):
            found.add(node.attr)
    return found


def replaced() -> set[tuple[str, str]]:
    """(file, name) of what the code replaces."""
    trees = {file: ast.parse(file.read_text()) for file in SOURCE.rglob("*.py")}
    defined = own_names(trees.values())
    meant = set(" ".join(MEANT.values()).split())
    found = set()
    for file, tree in trees.items():
        where = str(file.relative_to(SOURCE))
        if where.startswith(ROOMS):
            found |= {(where, name) for name in set_on_others(tree, defined) - meant}
    return found


def registered() -> set[tuple[str, str]]:
    """(file, name) of the page's rows."""
    register = PAGE.read_text().partition("# What SiPipe intercepts")[0]
    rows = re.findall(r"^\| (`.*?) \| (`.*?) \|", register, re.MULTILINE)
    return {
        (where, name.rpartition(".")[2])
        for names, files in rows
        for name in re.findall(r"`([^`]+)`", names)
        for where in re.findall(r"`([^`]+)`", files)
    }


def test_everything_that_is_replaced_has_a_row():
    assert replaced() - registered() == set()


def test_every_row_is_of_something_that_is_replaced():
    assert registered() - replaced() == set()


def test_what_replaces_is_found():
    source = (
        "from vllm.v1 import core\n"
        "core.schedule = ours\n"
        "runner.sample = ours\n"
        "with patch.object(worker, 'init', ours):\n"
        "    anything.of_theirs = 1\n"
        "self.field = anything.field = 1\n"
    )
    found = set_on_others(ast.parse(source), {"field", "sample"})
    assert found == {"schedule", "sample", "init", "of_theirs"}


def test_every_row_says_what_upstream_does():
    """The last column: an issue or pull request of vLLM's, or that none is known."""
    rows = re.findall(r"^\| `.*$", PAGE.read_text(), re.MULTILINE)
    assert len(rows) > 40
    for row in rows:
        upstream = row.rstrip(" |").rpartition(" | ")[2]
        assert re.search(r"#\d{5}|none known", upstream), row


def test_what_is_intercepted_has_a_row():
    """Modes that answer functions of torch, and filters on vLLM's loggers."""
    page = PAGE.read_text()
    for file in SOURCE.rglob("*.py"):
        text = file.read_text()
        where = f"`{file.relative_to(SOURCE)}`"
        for name in re.findall(r"^class (\w+)\(TorchFunctionMode\)", text, re.MULTILINE):
            assert re.search(rf"`{name}`.*{re.escape(where)}", page), name
        if "addFilter(" in text and "getLogger(" in text:
            assert re.search(rf"addFilter.*{re.escape(where)}", page), where


def test_private_names_of_the_page_are_used():
    page = PAGE.read_text()
    section = page[page.index("# What SiPipe intercepts") : page.index("# Proposals")]
    rows = re.findall(r"^\| `(_[a-z]\w*)` of .*? \| (.*?) \|", section, re.MULTILINE)
    assert len(rows) >= 3
    for name, files in rows:
        for where in re.findall(r"`([^`]+)`", files):
            assert name in (SOURCE / where).read_text(), (name, where)

"""`make hooks`: docs/hooks.md, from the table of ``sipipe.worker.hooks.table``."""

from __future__ import annotations

import importlib.util
from itertools import groupby
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "hooks.md"
TABLE = ROOT / "src" / "sipipe" / "worker" / "hooks" / "table.py"

BEGINNING = """\
# One pass of vLLM's runner, and what SiPipe puts there

Read this page to see where SiPipe touches vLLM's runner: before you change a stage, or move to another release of vLLM.

vLLM's second model runner runs every stage. This page follows it from loading to the end of one pass, in the order of vLLM's own calls. Each row says what SiPipe puts beside one call, why, and where. Calls without a row are vLLM's alone.

The page is written by `make hooks` from `worker/hooks/table.py`. A test compares the order with vLLM's source. It is 0.32's; 0.33 makes the KV connector's last call before `self.postprocess_sampled`. Paths are relative to `src/sipipe`.

Some rows hold for a part of the stages only:

| class | holds where |
| --- | --- |
| `SiPipePrepares` | SiPipe prepares a stage's inputs ([execution](execution.md)); it takes the runner's functions once the stage is warm |
| `VllmPrepares`, `TokenFeedback.get_prev_sampled_outputs` | vLLM prepares them, for the few models and options that need it |
| `NothingDrawn` | every stage but the last: nothing is drawn, and `sample_tokens` is vLLM's |
| `LastRows` | the last stage, where CPU samplers draw; it takes the runner's `sample_tokens` and `sample` once the stage is warm |
| `SomeDrawnHere`, `DeviceSampler` | the same, where the device draws the rows that ask for no more than a temperature |
| `WholeBatch` | the last stage, where vLLM's own sampler draws all rows |
| `TorchRows` | the same, on CPUs without Triton |
| `Pooled` | every stage of a pooling model |
"""
END = """
Where to go on: [execution](execution.md) explains the two threads and buffer sets, [upstream](upstream.md) lists every name that is replaced, with the change to vLLM that would make it unnecessary.
"""


def page() -> str:
    """Text of the page, from the table as it is now."""
    lines = [BEGINNING]
    for caller, hooks in groupby(table(), key=lambda hook: hook.caller):
        name = caller.partition(":")[2]
        lines.append(f"## `{name}`\n")
        lines.append("| vLLM calls | SiPipe puts there | why | where |")
        lines.append("| --- | --- | --- | --- |")
        for hook in hooks:
            lines.append(f"| `{hook.call}` | {hook.ours} | {hook.why} | `{hook.where}` |")
        lines.append("")
    return "\n".join(lines) + END


def table() -> tuple[Any, ...]:
    """Rows of the table, read from its file: the page can be written where vLLM is not installed."""
    spec = importlib.util.spec_from_file_location("hooks_table", TABLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    hooks: tuple[Any, ...] = module.HOOKS
    return hooks


if __name__ == "__main__":
    PAGE.write_text(page())

"""Names of layers, as vLLM hands them to its operators: strings or objects, by a variable that it reads
when it is imported.

As strings they can be handed by compiled code, so that torch's C++ wrapper can launch a whole pass
(:mod:`sipipe.worker.hooks.native_launch`). As objects, vLLM's default, only Python can hand them.
"""

from __future__ import annotations

VARIABLE = "VLLM_USE_LAYERNAME"
"""vLLM's variable: 0 gives strings. A user who sets it gets what it says."""


def variables(stages: int) -> dict[str, str]:
    """Variables with which a CPU worker of ``stages`` stages imports vLLM, unless the user has set them.

    With several stages there are none: launching by compiled code made no difference there (docs/log.md).
    """
    return {VARIABLE: "0"} if stages == 1 else {}

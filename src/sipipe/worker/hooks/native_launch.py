"""A compiled pass that is launched by compiled code, on CPUs.

A pass of SmolLM2 calls some 300 kernels and operators. torch's inductor writes these calls as a Python
function, which takes a sixth to a third of a worker's CPU time with few requests. Its C++ wrapper
compiles them instead.

Who runs here: the worker's main thread, while the stage is loaded and warmed up.
Rejected: vLLM's ``inductor_compile_config``. Its options are fixed when the model is made, and a model
    that cannot be compiled so would end the start. What a user gives there still comes first.
Rejected: the wrapper for all that this process compiles. vLLM compiles small functions at the request
    that needs them first, and one that cannot be compiled so would end the engine.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch._inductor import config as inductor
from vllm.logger import init_logger
from vllm.utils import torch_utils

from sipipe import layer_names
from sipipe.errors import one_line

logger = init_logger(f"vllm.{__name__}")

FROM_PYTHON: dict[str, Any] = {}
"""torch's options for a pass that Python launches: the user's."""
NATIVE: dict[str, Any] = {
    "cpp_wrapper": True,
    # Two files, of which that with the launching, one long function, is compiled as it stands. In one
    # file the compiler optimizes it for a minute.
    "cpp_wrapper_build_separate": True,
    "aot_inductor.compile_wrapper_opt_level": "O0",
}
"""torch's options for one that compiled code launches."""


def may_launch_natively(stages: int, *, compiles: bool) -> bool:
    """Say if torch is to compile the launching, too: vLLM's layer names are strings
    (:mod:`sipipe.layer_names`), and there is one stage.

    Args:
        stages: Stages of the pipeline.
        compiles: Whether the model is compiled. If it is, the log says how to have the launching, too.
    """
    if stages > 1 or not compiles:
        return False
    if not getattr(torch_utils, "_USE_LAYERNAME", True):
        return True
    if layer_names.VARIABLE not in os.environ:
        logger.info(
            "passes are launched from Python: %s=0 in the environment has compiled code launch them, "
            "which is quicker with few requests",
            layer_names.VARIABLE,
        )
    return False


def compiles_natively(warm_up: Callable[[], None]) -> bool:
    """Compile the model and its launching by ``warm_up``, a pass; False: this model's launching cannot
    be compiled. vLLM's own pass compiles then, and a later start, which loads that, does not try again."""
    try:
        with inductor.patch(NATIVE):
            warm_up()
    except Exception as error:
        logger.info("passes are launched from Python: %s", one_line(error))
        logger.debug("compiling the launching failed here", exc_info=error)
        torch._dynamo.reset()
        return False
    return True

"""SiPipe: pipeline-parallel vLLM with sampling and preparation on idle CPU cores.

``sipipe.Executor`` is what vLLM's ``--distributed-executor-backend sipipe.Executor`` names. It is
resolved on first use, so that ``import sipipe`` neither needs nor loads vLLM.
"""

from typing import TYPE_CHECKING, Any

from sipipe._version import __version__

if TYPE_CHECKING:
    from sipipe.engine.executor import Executor

__all__ = ["Executor", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "Executor":
        from sipipe.versions import require_vllm

        require_vllm()
        from sipipe.engine.executor import Executor
        from sipipe.engine.start.plugin import register

        register()  # no entry point does where SiPipe is on the path, but not installed
        return Executor
    raise AttributeError(f"module 'sipipe' has no attribute {name!r}")

"""Tells vLLM's own process for an engine from the user's, where nothing may be changed."""

import multiprocessing


def is_engine_process() -> bool:
    """Say if vLLM has started this process for an engine. In Python an engine may also run in the
    user's process (``VLLM_ENABLE_V1_MULTIPROCESSING=0``)."""
    process = multiprocessing.current_process()
    return multiprocessing.parent_process() is not None and process.name.startswith("EngineCore")

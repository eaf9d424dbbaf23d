"""vLLM's cache of compiled models, which its CPU build writes at every start and never reads.

vLLM finishes what it loads by a method of its own backend's functions. On CPUs torch's inductor is
the backend, whose functions need no finishing and lack the method, so each worker compiles anew.
"""

import functools
from typing import Any

import torch
from vllm.config import VllmConfig


def use_compiled(config: VllmConfig) -> None:
    """From now on this process loads what was compiled for this model, these processor features and as
    many threads. Call once its threads are set. Compiled code has both built in, and torch compares
    neither, so they become a part of the configuration, from which vLLM names the file."""
    built_for = [torch.backends.cpu.get_cpu_capability(), torch.get_num_threads()]
    config.additional_config = {**config.additional_config, "compiled_for": built_for}
    torch.compiler.load_compiled_function = _finished(torch.compiler.load_compiled_function)


def _finished(load: Any) -> Any:
    @functools.wraps(load)
    def loaded(*args: Any, **kwargs: Any) -> Any:
        found = load(*args, **kwargs)
        function = found._artifacts.compiled_fn
        if not hasattr(function, "finalize_loading"):
            function.finalize_loading = lambda _: None
        return found

    return loaded

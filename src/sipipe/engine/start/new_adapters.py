"""LoRA adapters that requests bring: loaded before the scheduler sees their first request.

vLLM's stages load an adapter in the pass that needs it first. One that cannot be loaded, such as a
``LoRARequest`` with a path to nothing, would end the stage there, and the engine for everybody. Here it
is loaded by a call, as the server's ``/v1/load_lora_adapter`` does it; what fails is the request's own.
An adapter that was loaded, and has lost its place to others (``--max-cpu-loras``), is loaded again in
the pass that needs it. So its files are looked for with each request. One that is to be loaded in place
is loaded by a call, and its request goes on without that word: vLLM's stages would load it in each pass.

Rejected: a call with each request of an adapter that has lost its place. With many adapters each would
be read twice. What is left: a request whose adapter's files are removed while it waits or runs.

Who runs here: the engine's thread.
"""

from __future__ import annotations

import os
from typing import Any

from msgspec.structs import replace
from vllm.v1.engine.core import EngineCore

from sipipe.engine.iteration.admission import RefusedRequest
from sipipe.extending import extends

CONFIG = "adapter_config.json"
"""The file that every adapter has, as PEFT writes it. Where it is not, the path is a name on a hub."""


def load_adapters_first() -> None:
    """Have an engine load a request's adapter before it takes the request. Safe to call again."""

    @extends(EngineCore, "add_request")
    def add_request(add: Any, self: Any, request: Any, request_wave: int = 0) -> None:
        adapter = request.lora_request
        reason = "" if adapter is None else _load(self, adapter)
        if reason:
            request = RefusedRequest(
                request.request_id, client_index=request.client_index, reason=reason
            )
        elif adapter is not None and adapter.load_inplace:
            request.lora_request = replace(adapter, load_inplace=False)
        add(self, request, request_wave)


def _load(engine: Any, adapter: Any) -> str:
    """Load an adapter, unless ``engine`` has loaded it before and its files are still there. Returns why
    that fails; empty: it has not failed."""
    if engine.vllm_config.lora_config is None:
        return "the request has a LoRA adapter, and the engine has none: give --enable-lora"
    if adapter.lora_int_id >= 2**31:  # stages keep it in 32 bits
        return (
            f'LoRA adapter "{adapter.lora_name}" has the id {adapter.lora_int_id}: give it a '
            "lora_int_id below 2147483648"
        )
    loaded = engine.__dict__.setdefault("_sipipe_loaded_adapters", {})
    path = adapter.lora_path
    is_here = os.path.exists(os.path.join(os.path.expanduser(path), CONFIG))
    if loaded.get(adapter.lora_int_id) == (path, is_here) and not adapter.load_inplace:
        return ""
    try:
        engine.add_lora(adapter)
    except Exception as error:  # whatever a worker has raised: as text, from its process
        return f'LoRA adapter "{adapter.lora_name}" cannot be loaded: {error}'
    loaded[adapter.lora_int_id] = (path, is_here)
    return ""

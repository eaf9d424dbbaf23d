"""LoRA adapters that requests bring: loaded before the scheduler sees their first request.

vLLM's stages load an adapter in the pass that needs it first. One that cannot be loaded, such as a
``LoRARequest`` with a path to nothing, would end the stage there, and the engine for everybody. Here it
is loaded by a call, as the server's ``/v1/load_lora_adapter`` does it; what fails is the request's own.
An adapter that was loaded, and has lost its place to others, is loaded again in a pass.

Who runs here: the engine's thread.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.engine.core import EngineCore

from sipipe.engine.iteration.admission import RefusedRequest
from sipipe.extending import extends


def load_adapters_first() -> None:
    """Have an engine load a request's adapter before it takes the request. Safe to call again."""

    @extends(EngineCore, "add_request")
    def add_request(add: Any, self: Any, request: Any, request_wave: int = 0) -> None:
        reason = "" if request.lora_request is None else _load(self, request.lora_request)
        if reason:
            request = RefusedRequest(
                request.request_id, client_index=request.client_index, reason=reason
            )
        add(self, request, request_wave)


def _load(engine: Any, adapter: Any) -> str:
    """Load an adapter, unless ``engine`` has loaded it before. Returns why that fails; empty: it has
    not failed."""
    if engine.vllm_config.lora_config is None:
        return "the request has a LoRA adapter, and the engine has none: give --enable-lora"
    loaded = engine.__dict__.setdefault("_sipipe_loaded_adapters", set())
    if adapter.lora_int_id in loaded:
        return ""
    try:
        engine.add_lora(adapter)
    except Exception as error:  # whatever a worker has raised: as text, from its process
        return f'LoRA adapter "{adapter.lora_name}" cannot be loaded: {error}'
    loaded.add(adapter.lora_int_id)
    return ""

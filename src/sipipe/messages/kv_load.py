"""Blocks of the KV cache that a connector is to load, as the engine tells the workers."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class KVLoad:
    """One request's blocks that come from elsewhere."""

    request_id: str
    block_ids: tuple[int, ...]
    """The blocks' numbers in the KV cache. Of several groups, empty where the request waits: vLLM is told
    its name then; else all that it has behind what was cached."""
    waits: bool
    """True where the request waits until all workers say that its blocks have come."""
    reason: str = ""
    """Why the engine's side of the connector asks no worker for them; empty: it does."""

"""From a command or vLLM to an engine: before it, and beside it."""

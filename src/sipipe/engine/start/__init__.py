"""The way from a command, or from vLLM, to an engine: what happens before it, and beside it."""

"""Parts of SiPipe that stand in vLLM's place in a stage worker; ``table.py`` has them in vLLM's order."""

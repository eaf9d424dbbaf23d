"""Decisions on how one engine is set up, taken once: the model, the machine, the hosts, the memory."""

"""Channels between processes: shared memory, locks, rings, the gather, links between stages."""

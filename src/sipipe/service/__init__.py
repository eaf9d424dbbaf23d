"""Sampler processes: their protocol, their loop, the pool that keeps them alive.

Imports neither vLLM nor torch; a sampler process imports this package, :mod:`sipipe.sampling`
and :mod:`sipipe.channels` only.
"""

"""Kernels of vLLM's second runner as CPUs run them."""

"""What stands in for the Triton kernels of vLLM's second runner on CPUs."""

"""What stands in vLLM's place in a stage worker, in the order of vLLM's own calls."""

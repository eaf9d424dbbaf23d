"""What runs in a sampler's process; needs neither torch nor vLLM."""

"""Code of a sampler process; it needs neither torch nor vLLM."""

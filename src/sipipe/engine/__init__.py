"""What runs in vLLM's EngineCore process: executor, scheduling, the processes it starts."""

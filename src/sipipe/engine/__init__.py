"""The executor and the scheduler, in vLLM's EngineCore process, and the processes they start."""

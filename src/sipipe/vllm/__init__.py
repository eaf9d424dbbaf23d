"""All that depends on a vLLM version: executor, workers, stage runner, scheduler, plugin entry."""

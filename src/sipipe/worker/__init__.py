"""The process of a stage worker: its main thread, the two threads of its stage, and vLLM's runner."""

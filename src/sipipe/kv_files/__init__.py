"""KV caches of prompts in files that servers share; vLLM is told ``sipipe.kv_files.connector``."""

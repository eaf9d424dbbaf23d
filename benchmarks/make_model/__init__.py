"""Random but deterministic checkpoints in Hugging Face format."""

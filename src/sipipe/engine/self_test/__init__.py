"""Self-test of model families that nobody has verified: stages against one stage."""

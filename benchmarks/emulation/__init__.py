"""Pipelines whose devices only take time."""

"""The hosts of an engine: this one and others."""

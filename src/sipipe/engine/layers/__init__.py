"""Which decoder layers each stage gets."""

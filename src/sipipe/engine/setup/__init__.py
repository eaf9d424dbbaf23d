"""What is decided once, before anything starts."""

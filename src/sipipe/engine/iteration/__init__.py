"""The life of one iteration, from the scheduler and back."""

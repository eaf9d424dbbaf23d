"""The scheduling policy on a simulated engine."""

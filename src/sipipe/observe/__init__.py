"""What every process records while it runs: traces, live figures, metrics."""

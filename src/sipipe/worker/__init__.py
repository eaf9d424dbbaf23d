"""What runs in a stage worker's process: main, loop, runner."""

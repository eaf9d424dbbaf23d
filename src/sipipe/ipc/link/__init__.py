"""Hidden states from a stage to the next."""

"""Computation of logits: all on the last stage, or shared out over all stages."""

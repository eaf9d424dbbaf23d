"""Compiled code: one row from logits to token, and all rows of a microbatch."""

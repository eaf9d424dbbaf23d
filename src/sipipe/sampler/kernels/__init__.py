"""Compiled code: one row from logits to token, and all rows of a microbatch.

Compiled kernels are cached by a hash of every file of this package (see `_jit`), so what changes
without them lives outside.
"""

"""What of the channels' tests can run: links between stages carry tensors of torch, which comes with vLLM."""

from importlib.util import find_spec

TENSORS = ["link", "test_connection.py"]
"""Tests that import torch, or what is beside those of links."""

collect_ignore = [] if find_spec("torch") else TENSORS

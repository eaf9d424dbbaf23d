"""From a scheduling output to the tensors that a model and its attention read."""

"""Which requests form a microbatch, and how many microbatches are in flight."""

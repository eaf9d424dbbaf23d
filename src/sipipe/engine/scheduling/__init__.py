"""Choice of the requests that form a microbatch, and of how many microbatches are in flight."""

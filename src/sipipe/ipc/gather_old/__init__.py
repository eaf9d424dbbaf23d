"""Several senders, one receiver: sampled tokens (BIC-O)."""

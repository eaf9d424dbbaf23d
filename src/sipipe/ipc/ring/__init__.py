"""One writer, several readers: scheduling outputs (BIC-I) and logits (BIC-L)."""

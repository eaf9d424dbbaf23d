"""Which pipeline and tensor degree for a model and a cluster."""

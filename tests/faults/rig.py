"""Runs engines with faults, one line of JSON each; forked from what has imported vLLM.

The rig is alone in a mount namespace with a small /dev/shm of its own, where it may make one, so
that whatever is left behind there is an engine's of this suite.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import pickle
import select
import signal
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import psutil

_libc = ctypes.CDLL(None, use_errno=True)
NEW_MOUNTS = 0x20000
PRIVATE = 0x44000  # MS_REC | MS_PRIVATE


def own_mount_namespace():
    """Whether this process has mounts of its own now."""
    return not (_libc.unshare(NEW_MOUNTS) or _libc.mount(b"none", b"/", None, PRIVATE, None))


def prepare(scratch):
    """Import all that engines and their children need; what an engine is configured with."""
    os.environ.update(
        VLLM_CPU_OMP_THREADS_BIND="nobind",
        VLLM_LOGGING_LEVEL="WARNING",
        VLLM_CPU_KVCACHE_SPACE="1",
        VLLM_USE_V2_MODEL_RUNNER="1",
        HF_HUB_OFFLINE="1",
        SIPIPE_SECRET="of these engines",
        OMP_NUM_THREADS="1",
    )
    import torch
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform

    torch.set_num_threads(1)
    from tests.faults import plan, stand_in
    from tests.worker import arithmetic

    model = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "torch_dtype": "float32"}
    model |= {"hidden_size": arithmetic.HIDDEN, "vocab_size": arithmetic.VOCAB}
    model |= {"num_hidden_layers": 2, "num_attention_heads": 1, "intermediate_size": 128}
    model |= {"max_position_embeddings": 256}
    (scratch / "config.json").write_text(json.dumps(model))
    configured = EngineArgs(
        model=str(scratch),
        load_format="dummy",
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="float32",
        max_model_len=128,
        max_num_seqs=32,
        max_num_batched_tokens=64,
        block_size=16,
        num_gpu_blocks_override=64,
        enable_prefix_caching=False,
        pipeline_parallel_size=2,
        distributed_executor_backend="sipipe.Executor",
        additional_config={"sipipe": {}},
        async_scheduling=False,
    ).create_engine_config()
    from tests.faults.processes import Forked

    import sipipe.engine.children.children as children
    import sipipe.engine.setup.compatibility as compatibility
    import sipipe.engine.setup.record as setup
    import sipipe.ipc.child as child
    from sipipe.sampler.warmup import warm_up

    name = f"{stand_in.__name__}.StandInWorker"
    # The stand-in needs no kernels, where vLLM's sampler draws neither.
    compatibility.HAS_TRITON = True
    for module in (compatibility, setup):
        module.STOCK_WORKERS.update(dict.fromkeys(module.STOCK_WORKERS, name))
    # Nobody else's: vLLM asks lscpu for the cores.
    child.subprocess = SimpleNamespace(**vars(child.subprocess) | {"Popen": Forked})
    # It goes through all modules for Triton kernels, of which there are none, and finds Numba's.
    type(current_platform).register_triton_kernel_overrides = lambda *_: None
    real = children.Children.start

    def start(self, name, *rest, **more):
        Forked.naming.name = name
        return real(self, name, *rest, **more)

    children.Children.start = start
    warm_up(["float32"])
    from multiprocessing import resource_tracker

    resource_tracker.ensure_running()
    plan.load()
    # What is here now stays, and looking through it again would copy it in every process.
    gc.collect()
    gc.freeze()
    gc.collect = lambda *_: 0
    return pickle.dumps(configured)


class Run:
    """One engine, from its fork to the moment when nothing of it is left."""

    def __init__(self, number, scenario, configured, scratch, own_mounts):
        from tests.faults import engine

        self.scenario = scenario
        self.directory = directory = scratch / str(number)
        for name in ("tmp", "shm"):
            (directory / name).mkdir(parents=True)
        self.shm = directory / "shm" if own_mounts else None
        if own_mounts:
            _mount(b"tmpfs", self.shm, b"tmpfs", data=f"size={scenario.get('shm', '4m')}".encode())
            for name, size in scenario.get("filled", {}).items():
                (self.shm / name).write_bytes(bytes(size))
        self.result = directory / "result"
        self.faults, self.resumed = [], []
        self.left = None
        reading, writing = os.pipe()
        os.set_blocking(reading, False)
        sys.stdout.flush()
        self.began = time.monotonic()
        self.pid = os.fork()
        if not self.pid:
            os.close(reading)
            log = os.open(directory / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            if scenario.get("unread"):  # who read the log is gone
                unread, log = os.pipe()
                os.close(unread)
            for number in (1, 2):
                os.dup2(log, number)
            os.environ["TMPDIR"] = tempfile.tempdir = str(directory / "tmp")
            if own_mounts:
                assert not _libc.unshare(NEW_MOUNTS)
                _mount(bytes(self.shm), "/dev/shm", None, flags=0x1000)  # MS_BIND
            engine.live(scenario, configured, writing, str(self.result))
        os.close(writing)
        self.reports = reading
        self.ended = os.pidfd_open(self.pid)
        self.exit = None
        self.gone_at = None

    def processes(self):
        """Those of its session that live."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if os.getsid(process.pid) == self.pid and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def turn(self):
        """Look at what has happened; True when it is over."""
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self.reports, 1 << 16):
                self.faults += [json.loads(line) for line in data.splitlines()]
        now = time.monotonic()
        for fault in self.faults:
            over = now >= fault["time"] + fault.get("seconds", 1e9)
            if fault["what"] == "stop" and over and fault not in self.resumed:
                self.resumed.append(fault)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(fault["pid"], signal.SIGCONT)
        if self.exit is None:
            if not select.select([self.ended], [], [], 0)[0]:
                return self._is_late(now)
            self.exit = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            self.ended_at = now
        if not self.processes():
            self.gone_at = now
            return True
        return self._is_late(now) or now > self.ended_at + LEFT_SECONDS

    def _is_late(self, now):
        last = max([self.began, *(fault["time"] for fault in self.faults)])
        return now > last + self.scenario.get("bound", 60.0)

    def close(self):
        """End what is left, and say what became of the engine."""
        left = [" ".join(process.cmdline()) for process in self.processes()]
        hung = self.exit is None
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                process.kill()
        if hung:
            os.waitpid(self.pid, 0)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-self.pid, os.WNOHANG)[0]:
                pass
        left += os.listdir(self.directory / "tmp")
        if self.shm is not None:
            left += sorted(set(os.listdir(self.shm)) - set(self.scenario.get("filled", {})))
            _libc.umount2(bytes(self.shm), 2)
        os.close(self.reports)
        os.close(self.ended)
        said = json.loads(self.result.read_text()) if self.result.exists() else {}
        last = max((fault["time"] for fault in self.faults), default=self.began)
        return {
            "scenario": self.scenario,
            "faults": self.faults,
            "hung": hung,
            "left": left if not hung else [],
            "exit": self.exit,
            "error": said.get("error", ""),
            "failed": said["failed"] - last if said.get("error") else None,
            "gone": self.gone_at - last if self.gone_at else None,
            "tokens": said.get("tokens", {}),
            "aborted": said.get("aborted", []),
            "shutdown": said.get("shutdown", ""),
            "said": said,
            "log": str(self.directory / "log"),
        }


LEFT_SECONDS = 15.0
"""After this long what is there of an engine that has ended is left."""


def _mount(source, target, kind, *, flags=0, data=None):
    code = _libc.mount(source, bytes(Path(target)), kind, flags, data)
    if code:
        raise OSError(ctypes.get_errno(), f"mount {target}")


def run_all(scenarios, *, parallel=2, each=lambda _: None):
    """Run the scenarios, ``parallel`` at a time; returns what became of each, in their order."""
    from tests.faults.processes import adopt_orphans

    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # not so under nohup
    adopt_orphans()
    scratch = Path(tempfile.mkdtemp(prefix="faults-"))
    own_mounts = own_mount_namespace()
    configured = prepare(scratch)
    waiting = list(enumerate(scenarios))[::-1]
    running, outcomes = {}, [None] * len(waiting)
    while waiting or running:
        # The fault-free ones first, and alone: the others are compared with them.
        while waiting:
            near = [waiting[-1][1], *(run.scenario for run in running.values())]
            if len(running) >= (parallel if all(one["kind"] for one in near) else 1):
                break
            number, scenario = waiting.pop()
            running[number] = Run(number, scenario, configured, scratch, own_mounts)
        for number, run in list(running.items()):
            if run.turn():
                del running[number]
                outcomes[number] = run.close()
                each(outcomes[number])
        time.sleep(0.05)
    return outcomes

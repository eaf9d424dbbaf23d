"""Where a fault can be put into a process, and what it is."""

from __future__ import annotations

import json
import os
import pkgutil
import resource
import signal
import time

import psutil

POINTS = {
    # a sampler's life
    "warm up": ("sipipe.sampler.main", "warm_up"),
    "boot": ("sipipe.ipc.parent:Parent", "receive"),
    "attach to BIC-I": ("sipipe.sampler.main", "DispatchReader"),
    "attach to BIC-L": ("sipipe.sampler.main", "LogitsReader"),
    "say": ("sipipe.ipc.parent:Parent", "say"),
    "restore": ("sipipe.sampler.main:Sampler", "_restore"),
    "apply": ("sipipe.sampler.main:Sampler", "_apply"),
    "draw": ("sipipe.sampler.main:Sampler", "_draw"),
    "answer": ("sipipe.ipc.gather:GatherSender", "send"),
    # a worker's
    "load": ("tests.faults.stand_in:StandInWorker", "load_model"),
    "describe": ("sipipe.worker.loaded_stage:LoadedStage", "answer"),
    "open": ("sipipe.worker.loaded_stage:LoadedStage", "open"),
    "serve": ("sipipe.worker.main:Main", "serve"),
    "prepare": ("sipipe.worker.hooks.preparation:SiPipePrepares", "prepare"),
    "run": ("tests.worker.arithmetic:Runner", "execute_model"),
    "receive": ("sipipe.worker.links:Links", "take"),
    "forward": ("tests.worker.arithmetic:Runner", "forward"),
    "send": ("sipipe.worker.links:Links", "send"),
    "logits": ("sipipe.worker.hooks.draws:LastRows", "_hand_over"),
    "sample": ("tests.worker.arithmetic:Runner", "sample"),
    "hand on": ("sipipe.worker.publisher:Publisher", "_do"),
    "spread": ("sipipe.worker.projection.projection:SharedProjection", "columns"),
    "rows": ("sipipe.worker.projection.thread:ProjectionThread", "_do"),
    "product": ("tests.faults.stand_in:Shard", "multiply"),
    "load blocks": ("tests.engine.shelf:Shelf", "start_load_kv"),
    "store blocks": ("tests.engine.shelf:Shelf", "wait_for_save"),
    "say what moved": ("tests.engine.shelf:Shelf", "get_finished"),
    # the engine's
    "start": ("sipipe.engine.hosts.local:LocalHost", "start"),
    "listen": ("sipipe.engine.pipeline", "GatherReceiver"),
    "load models": ("sipipe.engine.children.workers:Workers", "wait_loaded"),
    "make channels": ("sipipe.engine.pipeline:Pipeline", "open"),
    "open samplers": ("sipipe.engine.children.samplers:Samplers", "open"),
    "schedule": ("sipipe.engine.executor:Executor", "execute_model"),
    "dispatch": ("sipipe.engine.iteration.dispatch:Dispatcher", "publish"),
    "resolve": ("sipipe.engine.iteration.resolve:Resolver", "_resolve"),
    "record": ("sipipe.engine.iteration.requests:RequestTracker", "record"),
    "shut down": ("sipipe.engine.children.children:Children", "close"),
    # both
    "hear": ("sipipe.ipc.ring.ends:RingReader", "receive"),
    "let go": ("sipipe.ipc.ring.ends:RingReader", "unlock_previous"),
    "publish": ("sipipe.ipc.ring.ends:RingWriter", "publish"),
}
"""Where steps of processes' lives begin: what has the function, and its name there."""


def arrange(name, faults, report):
    """Put ``faults`` ([{"at", "nth", "what", ...}]) into this process, which is ``name``."""
    for fault in faults:
        _arm(name, fault, report)


def _arm(name, fault, report):
    at, left = fault["at"], fault.get("nth", 0)
    if at == "born":
        strike(name, fault, report)
        return
    owner, attribute = POINTS[at]
    owner = pkgutil.resolve_name(owner)
    real = getattr(owner, attribute)

    def armed(*args, **kwargs):
        nonlocal left
        left -= 1
        if left == -1:
            strike(name, fault, report)
        return real(*args, **kwargs)

    setattr(owner, attribute, armed)


def strike(name, fault, report):
    said = {"name": name, "pid": os.getpid(), "time": time.monotonic(), **fault}
    os.write(report, json.dumps(said).encode() + b"\n")
    match fault["what"]:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "pull":
            from tests.faults.engine import current

            os.kill(current[fault["name"]].pid, signal.SIGKILL)
        case "raise":
            raise RuntimeError(f"planted in {name}")
        case "jump":
            real, seconds = time.time, fault["by"]
            time.time = lambda: real() + seconds
        case "descriptors":
            used = max(map(int, os.listdir("/proc/self/fd")))
            resource.setrlimit(resource.RLIMIT_NOFILE, (used + 1, used + 1))
        case "fill":
            filler = os.open("/dev/shm", os.O_TMPFILE | os.O_RDWR)
            try:
                while os.write(filler, bytes(1 << 16)):
                    pass
            except OSError:
                pass
        case "memory":
            limit = psutil.Process().memory_info().vms + (1 << 20)
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def load():
    """Import all that has one of the points."""
    for owner, _ in POINTS.values():
        pkgutil.resolve_name(owner)

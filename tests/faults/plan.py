"""Where a fault can be put into a process, and what it is."""

from __future__ import annotations

import json
import os
import resource
import signal
import time

import psutil


def arrange(name, faults, report):
    """Put ``faults`` ([{"at", "nth", "what", ...}]) into this process, which is ``name``."""
    for fault in faults:
        _arm(name, fault, report)


def _arm(name, fault, report):
    at, left = fault["at"], [fault.get("nth", 0)]
    if at == "born":
        strike(name, fault, report)
        return

    def now():
        left[0] -= 1
        if left[0] != -1:
            return False
        strike(name, fault, report)
        return True

    owner, attribute = load()[at]
    real = getattr(owner, attribute)

    def armed(*args, **kwargs):
        now()
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
        case "term":
            os.kill(os.getpid(), signal.SIGTERM)
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
    """The functions at which steps of processes' lives begin, by name; imports all of them."""
    from tests.engine.shelf import Shelf
    from tests.faults import stand_in
    from tests.worker import arithmetic

    import sipipe.engine.dispatch
    import sipipe.engine.executor
    import sipipe.engine.host
    import sipipe.engine.pipeline
    import sipipe.engine.requests
    import sipipe.engine.resolve
    import sipipe.engine.samplers
    import sipipe.engine.scheduling.scheduler
    import sipipe.engine.workers
    import sipipe.ipc.gather
    import sipipe.ipc.link.receiver
    import sipipe.ipc.link.sender
    import sipipe.ipc.parent
    import sipipe.ipc.ring.dispatch
    import sipipe.ipc.ring.ends
    import sipipe.ipc.ring.logits
    import sipipe.sampler.main as sampler
    import sipipe.worker.draws
    import sipipe.worker.logits
    import sipipe.worker.loop as loop
    import sipipe.worker.main as worker
    import sipipe.worker.preparation
    import sipipe.worker.projection_thread
    import sipipe.worker.publisher

    return {
        # a sampler's life
        "warm up": (sampler, "warm_up"),
        "boot": (sipipe.ipc.parent.Parent, "receive"),
        "attach to BIC-I": (sampler, "DispatchReader"),
        "attach to BIC-L": (sampler, "LogitsReader"),
        "say": (sipipe.ipc.parent.Parent, "say"),
        "restore": (sampler.Sampler, "_restore"),
        "apply": (sampler.Sampler, "_apply"),
        "draw": (sampler.Sampler, "_draw"),
        "answer": (sipipe.ipc.gather.GatherSender, "send"),
        # a worker's
        "load": (stand_in.StandInWorker, "load_model"),
        "describe": (loop.StageLoop, "answer"),
        "open": (loop.StageLoop, "open"),
        "serve": (worker.Main, "serve"),
        "prepare": (sipipe.worker.preparation.SiPipePrepares, "prepare"),
        "run": (arithmetic.Runner, "execute_model"),
        "receive": (sipipe.ipc.link.receiver.Receiver, "take"),
        "forward": (arithmetic.Runner, "forward"),
        "send": (sipipe.ipc.link.sender.Sender, "send"),
        "logits": (sipipe.worker.draws.LastRows, "_hand_over"),
        "sample": (arithmetic.Runner, "sample"),
        "hand on": (sipipe.worker.publisher.Publisher, "_do"),
        "spread": (sipipe.worker.logits.SharedProjection, "columns"),
        "rows": (sipipe.worker.projection_thread.ProjectionThread, "_do"),
        "product": (stand_in.Shard, "whole"),
        "load blocks": (Shelf, "start_load_kv"),
        "store blocks": (Shelf, "wait_for_save"),
        "say what moved": (Shelf, "get_finished"),
        # the engine's
        "start": (sipipe.engine.host.LocalHost, "start"),
        "listen": (sipipe.engine.pipeline, "GatherReceiver"),
        "load models": (sipipe.engine.workers.Workers, "wait_loaded"),
        "make channels": (sipipe.engine.pipeline.Pipeline, "open"),
        "open samplers": (sipipe.engine.samplers.Samplers, "open"),
        "schedule": (sipipe.engine.executor.Executor, "execute_model"),
        "dispatch": (sipipe.engine.dispatch.Dispatcher, "publish"),
        "resolve": (sipipe.engine.resolve.Resolver, "_resolve"),
        "record": (sipipe.engine.requests.RequestTracker, "record"),
        "shut down": (sipipe.engine.children.Children, "close"),
        # both
        "hear": (sipipe.ipc.ring.ends.RingReader, "receive"),
        "let go": (sipipe.ipc.ring.ends.RingReader, "unlock_previous"),
        "publish": (sipipe.ipc.ring.ends.RingWriter, "publish"),
    }

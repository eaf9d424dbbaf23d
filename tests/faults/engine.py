"""One engine's life, with faults in it: runs in a process of its own, forked by the rig.

vLLM's ``EngineCore`` in the main thread, driven as vLLM's own loop drives it, with SiPipe's
executor. What comes of it is written to a file.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing.util
import os
import pickle
import random
import signal
import tempfile
import time
import traceback
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import torch
from tests.engine.shelf import name_of, put
from tests.faults import plan, week
from tests.faults.network import NETWORK
from tests.faults.processes import Forked, Nursery
from tests.worker.arithmetic import VOCAB, continuation, follow

SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
SIGNALS |= {"term": signal.SIGTERM, "hang up": signal.SIGHUP}
current = {}
"""The processes of children of this engine, and the agent's of its other host, by name."""


def live(scenario, configured, report, result):
    """Run ``scenario`` to its end and write what happened to the file ``result``."""
    os.setsid()
    said = {"tokens": {}, "error": "", "steps": 0, "aborted": []}
    core = None
    try:
        if scenario.get("hosts"):
            current["agent"] = SimpleNamespace(pid=_other_host(scenario, configured, report))
        nursery = Forked.nursery = Nursery(scenario.get("planned", {}), report)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        plan.arrange("engine", scenario.get("engine", ()), report)
        core = _start(scenario, configured)
        said["started"] = time.monotonic()
        (week.serve if "week" in scenario else _serve)(core, scenario, said, report)
    except BaseException as error:
        said["error"] = " ".join(f"{type(error).__name__}: {error}".split())
        cause = error.__cause__
        while cause is not None:
            said["error"] += " <- " + " ".join(f"{type(cause).__name__}: {cause}".split())
            cause = cause.__cause__
        said["trace"] = traceback.format_exc()[-3000:]
    said["failed"] = time.monotonic()
    current.update({name: child.process for name, child in _children(core).items()})
    _write(result, said)
    try:
        if core is not None:
            core.shutdown()
        nursery.close()
    except BaseException:
        said["shutdown"] = traceback.format_exc()[-3000:]
    _run_finalizers()
    said["ended"] = time.monotonic()
    _write(result, said)
    os._exit(1 if said["error"] else 0)


def _write(result, said):
    with open(result + ".new", "w") as file:
        json.dump(said, file)
    os.replace(result + ".new", result)


def _start(scenario, configured):
    from vllm.v1.engine.core import EngineCore

    from sipipe.engine.executor import Executor

    return EngineCore(_configure(scenario, configured), Executor, log_stats=False)


def _configure(scenario, configured):
    from vllm.config import KVTransferConfig, SpeculativeConfig

    from sipipe.engine.children import spare_sampler as spare
    from sipipe.engine.setup.compatibility import schedules_ahead
    from sipipe.errors import UnsupportedError

    spare.SPARE_SECONDS = spare.AGAIN_SECONDS = scenario["spare"]
    vllm_config = pickle.loads(configured)
    vllm_config.additional_config = {"sipipe": scenario["sipipe"]}
    if scenario.get("hosts"):
        first = 12000 + os.getsid(0) % 4000 * 4
        scenario["sipipe"]["hosts"] = {"count": 2, "address": "127.0.0.1", "port": first}
    if scenario.get("crowded"):  # requests are preempted, and find their blocks again
        vllm_config.cache_config.num_gpu_blocks_override = 16
        vllm_config.cache_config.enable_prefix_caching = True
    if scenario.get("drafts"):
        vllm_config.speculative_config = SpeculativeConfig(
            method="ngram",
            num_speculative_tokens=3,
            prompt_lookup_min=1,
            prompt_lookup_max=2,
            target_model_config=vllm_config.model_config,
            target_parallel_config=vllm_config.parallel_config,
        )
    if "shelf" in scenario:
        vllm_config.scheduler_config.disable_hybrid_kv_cache_manager = True
        extra = {key: value for key, value in scenario["shelf"].items() if key != "policy"}
        vllm_config.kv_transfer_config = KVTransferConfig(
            kv_connector="Shelf",
            kv_connector_module_path="tests.engine.shelf",
            kv_role="kv_both",
            kv_load_failure_policy=scenario["shelf"].get("policy", "fail"),
            kv_connector_extra_config=extra | {"directory": str(_shelf())},
        )
    with suppress(UnsupportedError):  # as with drafts
        vllm_config.ahead = schedules_ahead(vllm_config, scenario.get("ahead", False))
    return vllm_config


def _shelf():
    """Where stored blocks lie: not among what has to be gone when the engine is."""
    directory = Path(tempfile.gettempdir()).parent / "shelf"
    directory.mkdir(exist_ok=True)
    return directory


def _blocks(request):
    """The file of each block that the prompt fills, on each stage, and what it has to hold."""
    tokens = list(request.prompt_token_ids)
    kept = list(itertools.accumulate(tokens, follow, initial=-1))[1:]
    for end in range(16, len(tokens) + 1, 16):
        for stage in (0, 1):
            file = _shelf() / name_of(tokens[:end]) / f"stage{stage}rank0"
            yield file, torch.tensor(kept[end - 16 : end])


def _other_host(scenario, configured, report):
    """Start the agent of a second host, which has the last stage and the samplers; its number."""
    if pid := os.fork():
        return pid
    os.setpgid(0, 0)
    adopted = Nursery(scenario.get("planned", {}), report)
    Forked.nursery = adopted
    plan.arrange("agent", scenario.get("agent", ()), report)
    from sipipe.engine.hosts.agent import run_agent
    from sipipe.engine.setup.decide import decide

    status = 1
    try:
        status = run_agent(decide(_configure(scenario, configured), 1))
    except Exception as error:
        print(f"sipipe: {error}", flush=True)
    finally:
        _run_finalizers()
        os._exit(status)


def requests(count, *, sampling, seed=1):
    """``count`` requests for vLLM's scheduler: greedy ones and seeded ones in turn."""
    from vllm import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    init_none_hash(sha256)
    rng = random.Random(seed)
    for index in range(count):
        prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 40))]
        seeded = {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.2, "seed": index}
        seeded["allowed_token_ids"] = [*range(0, VOCAB, 25)]  # so that drafts find something
        params = SamplingParams(
            max_tokens=rng.randint(8, 32),
            ignore_eos=True,
            detokenize=False,
            **(seeded if sampling and index % 2 else {"temperature": 0.0}),
        )
        params.update_from_generation_config({}, None)
        blocks = get_request_block_hasher(16, sha256)
        yield Request(str(index), prompt, params, pooling_params=None, block_hasher=blocks)


def check_greedy(tokens, *, sampling):
    """Of an engine without faults: tokens are what arithmetic says, where no sampler's draws count."""
    for request in requests(len(tokens), sampling=sampling):
        params, found = request.sampling_params, tokens[request.request_id]
        if not params.temperature:
            assert found == continuation(request.prompt_token_ids, params.max_tokens), request


def _serve(core, scenario, said, report):
    """Add requests as the run goes on, step until all have ended; faults from outside by step."""
    from vllm.v1.engine import FinishReason

    fails = scenario.get("shelf", {}).get("policy") == "fail"
    todo = list(requests(scenario["streams"], sampling=not scenario["own"]))
    tokens = said["tokens"] = {request.request_id: [] for request in todo}
    asked = [*todo] if "shelf" in scenario else []
    for file, block in itertools.chain(*map(_blocks, asked[: len(asked) // 2])):
        file.parent.mkdir(exist_ok=True)  # an engine before this one has stored them
        put(file, block)
    ended, aborts = set(), random.Random(scenario.get("aborts"))
    outside = sorted(scenario.get("outside", ()), key=lambda fault: -fault["step"])
    while len(ended) < len(tokens):
        while outside and outside[-1]["step"] <= said["steps"]:
            fault = outside.pop()
            if not _outside(core, fault, report):
                outside.append({**fault, "step": said["steps"] + 1})
                outside.sort(key=lambda fault: -fault["step"])
                break
        if said["steps"] % 3 == 0:
            for request in todo[:8]:
                core.add_request(request)
            del todo[:8]
        if "aborts" in scenario and aborts.random() < 0.2:
            gone = aborts.choice(sorted(tokens))
            if gone not in {request.request_id for request in todo} | ended:
                core.abort_requests([gone])
                ended.add(gone)
                said["aborted"].append(gone)
        outputs, _ = core.step_fn()
        core.post_step(bool(outputs))
        said["steps"] += 1
        for one in (outputs or {}).values():
            for output in one.outputs:
                tokens[output.request_id] += output.new_token_ids
                if output.finish_reason is not None:
                    ended.add(output.request_id)
                if output.finish_reason == FinishReason.ERROR and fails:
                    said["aborted"].append(output.request_id)
    for file, block in itertools.chain(*map(_blocks, asked)):
        assert not file.exists() or torch.equal(torch.load(file), block), "stored otherwise"
    while outside:  # with nothing to do
        if _outside(core, outside[-1], report):
            outside.pop()
        core.model_executor.check_health()
        time.sleep(0.02)
    until = time.monotonic() + scenario.get("settle", 0)
    while time.monotonic() < until:
        core.model_executor.check_health()
        time.sleep(0.02)


def _run_finalizers():
    """Do what :mod:`multiprocessing` does at the end of a process that it has started, as it has vLLM's
    core, and as no fork of a test's own has it done."""
    multiprocessing.util._exit_function()  # noqa: SLF001


def _children(core):
    """The engine's processes by name, to be killed and stopped by a fault."""
    return core.model_executor._pipeline._host._children._children if core is not None else {}  # noqa: SLF001


def _outside(core, fault, report):
    """A fault that another process does to one of the engine's; False: it is not there now."""
    pid = os.getpid()
    if fault["name"] == "agent":
        pid = current["agent"].pid
    elif fault["name"] != "engine":
        child = _children(core).get(fault["name"])
        if child is None or child.process.returncode is not None:
            return False
        pid = child.process.pid
    line = {"time": time.monotonic(), "pid": pid, **fault}
    os.write(report, json.dumps(line).encode() + b"\n")
    if fault["what"] in SIGNALS:
        os.kill(pid, SIGNALS[fault["what"]])
    else:
        NETWORK[fault["what"]](pid, core.vllm_config.additional_config["sipipe"]["hosts"]["port"])
    return True

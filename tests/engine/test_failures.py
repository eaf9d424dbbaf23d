"""What happens when something dies or is wrong: one clear line, nothing lost, nothing left."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
from tests.engine.engines import (
    DEFAULTS,
    HERE,
    engine_environment,
    greedy,
    model,
    prompts,
    run_engine,
    stock_tokens,
    tokens,
)

pytestmark = pytest.mark.engine

TWO_STAGES = {"pipeline_parallel_size": 2}


class Running:
    """An engine in a process of its own that a test can interfere with."""

    def __init__(self, path, batches, log: Path, **options):
        spec = {
            "model": str(path),
            "sipipe": {"samplers": 2, **options},
            "batches": batches,
            "engine": {**DEFAULTS, **TWO_STAGES},
        }
        self.log = log
        with log.open("w") as out:
            self.process = subprocess.Popen(
                [sys.executable, str(HERE / "engine_run.py")],
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=engine_environment(),
                start_new_session=True,
            )
        self.process.stdin.write(json.dumps(spec).encode())
        self.process.stdin.close()

    def wait_for(self, text: str, seconds: float = 240) -> str:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            said = self.log.read_text()
            if re.search(text, said):
                return said
            if self.process.poll() is not None:
                break
            time.sleep(0.05)
        pytest.fail(f"{text!r} was not said within {seconds} s:\n{self.log.read_text()[-4000:]}")

    def descendants(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def find(self, pattern: str) -> list[psutil.Process]:
        return [p for p in self.descendants() if re.search(pattern, " ".join(p.cmdline()))]

    def result(self, seconds: float = 240):
        self.process.wait(seconds)
        found = re.search(r"^RESULT (.*)$", self.log.read_text(), re.MULTILINE)
        if found is None:
            pytest.fail(f"no result:\n{self.log.read_text()[-4000:]}")
        return json.loads(found.group(1))

    def stop(self):
        for process in [*self.descendants(), psutil.Process(self.process.pid)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def gone(processes: list[psutil.Process], seconds: float = 20) -> bool:
    _, alive = psutil.wait_procs(processes, timeout=seconds)
    return not [p for p in alive if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


def test_a_killed_sampler_is_replaced_and_no_token_changes(models, tmp_path):
    path = model(models)
    seeded = {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.2, "ignore_eos": True}
    batch = {
        "prompts": prompts(24),
        "params": [{**seeded, "seed": i, "max_tokens": 150} for i in range(24)],
    }
    undisturbed = run_engine(path, [batch], sipipe={"samplers": 2}, **TWO_STAGES)
    engine = Running(path, [batch], tmp_path / "log")
    try:
        engine.wait_for("GENERATING")
        for _ in range(2):
            time.sleep(0.3)
            samplers = engine.find(r"sipipe\.service")
            if samplers:
                samplers[0].kill()
        disturbed = engine.result()
    finally:
        if engine.process.poll() is None:
            engine.stop()
    assert re.search(r"sampler\d died .*starting it again", engine.log.read_text())
    assert tokens(disturbed[0]) == tokens(undisturbed[0])


def test_a_killed_worker_ends_the_engine_with_its_name(models, tmp_path):
    path = model(models)
    batch = {
        "prompts": prompts(8),
        "params": [{"temperature": 0.0, "max_tokens": 400, "ignore_eos": True}] * 8,
    }
    engine = Running(path, [batch], tmp_path / "log")
    try:
        engine.wait_for("GENERATING")
        time.sleep(0.5)
        everybody = engine.descendants()
        worker = [p for p in everybody if "Worker_PP1" in " ".join(p.cmdline())]
        assert worker, [p.cmdline() for p in everybody]
        worker[0].kill()
        engine.wait_for(r"stage worker stage1\.0 \(pid \d+\) died, exit code -9", seconds=20)
        engine.process.wait(60)
        assert gone(everybody)
    finally:
        if engine.process.poll() is None:
            engine.stop()


@pytest.mark.parametrize("who", ["both", "front end"])
def test_a_killed_engine_leaves_no_process(models, tmp_path, who):
    engine = Running(
        model(models),
        [{"prompts": prompts(4), "params": greedy(4, shortest=300, longest=400)}],
        tmp_path / "log",
    )
    try:
        engine.wait_for("GENERATING")
        everybody = engine.descendants()
        core = [p for p in everybody if "EngineCore" in " ".join(p.cmdline())]
        assert core
        if who == "both":
            core[0].send_signal(signal.SIGKILL)
        os.kill(engine.process.pid, signal.SIGKILL)
        engine.process.wait(20)
        assert gone(everybody)
        assert not [name for name in os.listdir("/dev/shm") if "sipipe" in name.lower()]
    finally:
        if engine.process.poll() is None:
            engine.stop()


def test_an_engine_killed_while_it_starts_leaves_nothing(models, tmp_path):
    batch = {"prompts": prompts(1), "params": greedy(1)}
    before = set(os.listdir("/dev/shm"))
    engine = Running(model(models), [batch], tmp_path / "log")
    try:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            with contextlib.suppress(psutil.NoSuchProcess):  # short-lived ones come and go
                if len(engine.find("Worker_PP")) == 2:
                    break
            time.sleep(0.05)
        everybody, core = engine.descendants(), engine.find("EngineCore")
        assert core, everybody
        core[0].send_signal(signal.SIGKILL)
        os.kill(engine.process.pid, signal.SIGKILL)
        engine.process.wait(20)
        assert gone(everybody)
        assert set(os.listdir("/dev/shm")) <= before
    finally:
        if engine.process.poll() is None:
            engine.stop()


def test_logits_without_a_distribution_fail_their_own_request_only(models):
    """A token whose embedding is NaN: its prompt fails, the others go on."""
    path = model(models)
    broken = models / "llama-nan"
    if not broken.exists():
        import shutil

        from safetensors.numpy import load_file, save_file

        shutil.copytree(path, broken)
        weights = load_file(path / "model.safetensors")
        table = np.array(weights["model.embed_tokens.weight"])
        table[999] = np.nan
        weights["model.embed_tokens.weight"] = table
        save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    good = [[token for token in p if token != 999] or [5] for p in prompts(6)]
    batch = {"prompts": [*good[:3], [7, 999, 8], *good[3:]], "params": greedy(7)}
    said = run_engine(broken, [batch], sipipe={}, **TWO_STAGES)[0]
    assert said[3]["outputs"][0]["finish_reason"] == "error"
    fine = {"prompts": good, "params": [*batch["params"][:3], *batch["params"][4:]]}
    expected = tokens(stock_tokens(path, [fine])[0])
    assert tokens(said[:3] + said[4:]) == expected


@pytest.mark.parametrize(
    ("options", "sipipe", "line"),
    [
        ({}, {"sampler": 2}, r'unknown key "sampler".*did you mean "samplers"'),
        ({}, {"inflight": 0}, r'"inflight" must be a whole number of 1 or more'),
        (
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
            {},
            r"SiPipe does not support --speculative-config",
        ),
    ],
)
def test_wrong_settings_stop_with_one_line(models, options, sipipe, line):
    with pytest.raises(pytest.fail.Exception, match=line):
        run_engine(
            model(models),
            [{"prompts": [[5]], "params": greedy(1)}],
            sipipe=sipipe,
            **options,
            **TWO_STAGES,
        )

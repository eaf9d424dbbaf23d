"""A damaged cache of compiled models: the next start compiles anew, and draws the same tokens."""

import time

import pytest
from tests.engine.engines import Engine, greedy, model, prompts, shared, stock_results, tokens

pytestmark = [pytest.mark.engine, pytest.mark.slow]

DAMAGES = {
    "empty": lambda data: b"",
    "cut off": lambda data: data[: len(data) // 2],
    "zeros at its begin": lambda data: bytes(64) + data[64:],
    "zeros amid": lambda data: data[: len(data) // 2] + bytes(4096) + data[len(data) // 2 + 4096 :],
    "zeros at its end": lambda data: data[:-4096] + bytes(4096),
}


def run(models, root):
    settings = shared(2) | {"enforce_eager": False}
    batch = {"prompts": prompts(4), "params": greedy(4)}
    with Engine(model(models), env={"VLLM_CACHE_ROOT": str(root)}, **settings) as engine:
        [found] = engine.run([batch])
        return tokens(found), engine.log.read_text()


@pytest.fixture(scope="module")
def compiled(models, tmp_path_factory):
    """Where two stages are compiled, and the tokens; each test leaves it sound again."""
    root = tmp_path_factory.mktemp("compiled")
    return root, run(models, root)[0]


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_damaged_files_are_compiled_anew(models, compiled, damage):
    root, expected = compiled
    files = sorted((root / "torch_compile_cache").rglob("rank_*/model"))
    assert len(files) == 2, "a stage's each"
    for file in files:
        file.write_bytes(damage(file.read_bytes()))
    found, log = run(models, root)
    assert found == expected
    assert "Compiling model again due to a load failure" in log


AMID = (0.0, 1.0, 2.0, 4.0, 6.0, 9.0)
"""Seconds after the begin of compiling at which a start is killed."""


@pytest.mark.parametrize("stages", [1, 2])
def test_starts_that_are_killed_as_they_compile_stand_in_no_ones_way(models, tmp_path, stages):
    """A compiler that is killed amid a file leaves a part of it."""
    environment = {
        "VLLM_CACHE_ROOT": str(tmp_path / "cache"),
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"),
        "TMPDIR": str(tmp_path),  # torch's precompiled headers
    }
    settings = shared(stages) | {"enforce_eager": False, "env": environment}
    for seconds in AMID:
        with Engine(model(models), **settings) as engine:
            engine.wait_for("Warming up model for the compilation|Cache the graph|Using cache dir")
            time.sleep(seconds)
    batch = {"prompts": prompts(4), "params": greedy(4)}
    with Engine(model(models), **settings) as engine:
        [found] = engine.run([batch])
    assert tokens(found) == tokens(stock_results(model(models), [batch])[0])

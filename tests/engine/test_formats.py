"""Quantised weights and caches, and what else engines have, in two stages: as with stock vLLM."""

import json
import shutil
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest
import zmq
from benchmarks.make_model.int8 import make_int8
from tests.engine import servers
from tests.engine.engines import assert_stock, greedy, model, prompts, run_engine, shared

from sipipe import cpu_features

pytestmark = [pytest.mark.engine, pytest.mark.slow]

GROUP = 32
"""Weights that share a scale."""


def quantized(models, method):
    """The tiny llama, its layers of random weights of 4 bits, or its own rounded to 8."""
    import torch
    from safetensors.torch import load_file, save_file

    path = models / f"llama-{method}"
    if path.exists():
        return path
    if method == "int8":
        make_int8(model(models), path)
        return path
    shutil.copytree(model(models), path)
    file = path / "model.safetensors"
    torch.manual_seed(0)
    weights = {}
    for name, weight in load_file(file).items():
        if name.endswith("_proj.weight"):
            layer = name.removesuffix("weight")
            weights |= {layer + part: it for part, it in four(weight, method).items()}
        else:
            weights[name] = weight
    save_file(weights, file, {"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": method} | METHODS[method]
    (path / "config.json").write_text(json.dumps(config))
    return path


def four(weight, method):
    import torch

    out, inner = weight.shape

    def words(*shape):
        return torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int32)

    made = {"scales": (torch.rand(inner // GROUP, out) * 0.02).half()}
    made["qzeros"] = words(inner // GROUP, out // 8)
    if method == "awq":
        return made | {"qweight": words(inner, out // 8)}
    order = torch.arange(inner, dtype=torch.int32) // GROUP
    middle = torch.full_like(made["qzeros"], 0x77777777)
    return made | {"qweight": words(inner // 8, out), "qzeros": middle, "g_idx": order}


METHODS = {
    "awq": {"bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"},
    "gptq": {"bits": 4, "group_size": GROUP, "desc_act": False, "sym": True},
}


def one_by_one():
    """In bfloat16 products round by batch shape."""
    asked = [*prompts(6), *prompts(1, longest=300, seed=7)]
    return [{"prompts": [p], "params": greedy(1, shortest=12, longest=12)} for p in asked]


@pytest.mark.parametrize(
    ("method", "stages"), [*((method, 2) for method in METHODS), ("int8", 1), ("int8", 2)]
)
def test_quantised_weights_equal_stock(models, method, stages):
    if method != "int8" and cpu_features.slow():
        pytest.skip("vLLM's CPU build multiplies 4 bits with AVX-512 alone")
    path, options = quantized(models, method), {"dtype": "bfloat16"}
    said = run_engine(path, one_by_one(), **shared(stages), **options)
    assert_stock(said, path, one_by_one(), **options)


@pytest.mark.skipif(cpu_features.slow(), reason="vLLM's CPU build has it with AVX-512 alone")
def test_a_cache_of_fp8_equals_stock(models):
    path, options = model(models), {"kv_cache_dtype": "fp8"}
    said = run_engine(path, one_by_one(), **shared(2), **options)
    assert_stock(said, path, one_by_one(), **options)


def test_kv_events_tell_of_each_stored_block_once(models):
    """Of two prompts of three blocks, of which two are the same."""
    port = servers.free_port()
    endpoint = f"tcp://*:{port}"
    options = {"block_size": 32, "enable_prefix_caching": True, "kv_events_config": {
        "enable_kv_cache_events": True, "publisher": "zmq", "endpoint": endpoint,
    }}  # fmt: skip
    prompt = prompts(1, longest=1)[0] * 100
    asked = {"prompts": [prompt], "params": greedy(1, shortest=2, longest=2)}
    with zmq.Context() as context, context.socket(zmq.SUB) as events:
        events.connect(f"tcp://127.0.0.1:{port}")
        events.subscribe(b"")
        events.rcvtimeo = 20_000
        other = {**asked, "prompts": [prompt[:64] + [7] * 36]}
        run_engine(model(models), [asked, other], **shared(2), **options)
        stored = []
        while len(stored) < 4:
            _, _, said = events.recv_multipart()
            for event in msgspec.msgpack.decode(said)[1]:
                assert event["type"] == "BlockStored"
                stored += event["block_hashes"]
    assert len(set(stored)) == len(stored) == 4


def test_several_api_servers_give_the_same_tokens(models, tmp_path):
    options = ("--api-server-count", "2", "--dtype", "float32", "--max-model-len", "256")
    asked = {"max_tokens": 8, "temperature": 0, "ignore_eos": True, "logprobs": 1}
    with servers.Server(model(models), tmp_path / "log", *options, "--enforce-eager") as server:
        with ThreadPoolExecutor(8) as clients:
            every = [(server.address, [5, 6, 7], asked)] * 16
            said = [one for one, _ in clients.map(servers.complete, *zip(*every, strict=True))]
        names = [process.name() for process in server.everybody()]
    assert sum("APIServer_" in name for name in names) == 2
    assert said == said[:1] * 16


def test_a_pooling_model_equals_stock(models):
    embed = [{"embed": prompts(3, longest=200)}]
    said = run_engine(model(models), embed, **shared(2), runner="pooling")
    assert_stock(said, model(models), embed, same=almost, runner="pooling")


def almost(found, stock):
    for ours, theirs in zip(found[0], stock[0], strict=True):
        assert ours == pytest.approx(theirs, abs=1e-5)

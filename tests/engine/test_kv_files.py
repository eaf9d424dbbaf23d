"""KVFiles under engines, as docs/prefill.md and deploy/ set it up: prompts of any length, each asked
twice, by engines of other stages and after restarts, with what is stored damaged in between, give
the tokens of an engine without a connector."""

import itertools
import json
import os
import random
import re
from pathlib import Path

import pytest
import yaml
from tests.engine.engines import Engine, assert_stock, greedy, model, shared

pytestmark = [pytest.mark.engine, pytest.mark.ci]

ROOT = Path(__file__).parents[2]
LIMITS = {"block_size": 32, "num_gpu_blocks_override": 256, "max_num_batched_tokens": 128}
"""Prompts come in chunks, and the prefix cache is on."""


def flags():
    """The connectors of the page, the compose file and the manifest."""
    page = (ROOT / "docs" / "prefill.md").read_text()
    found = [json.loads(re.search(r"^C='(.*)'$", page, re.M)[1])]
    words = []
    composed = yaml.safe_load((ROOT / "deploy" / "prefill-compose.yaml").read_text())
    for service in composed["services"].values():
        words += service["entrypoint"]
    for document in yaml.safe_load_all((ROOT / "deploy" / "prefill-kubernetes.yaml").read_text()):
        if document["kind"] == "Deployment":
            for container in document["spec"]["template"]["spec"]["containers"]:
                words += container.get("args", [])
    option = "--kv-transfer-config="
    found += [json.loads(word.removeprefix(option)) for word in words if word.startswith(option)]
    return found


def of_role(role, directory):
    """The flags of the server that has this role, with another directory."""
    (connector, *_) = [one for one in flags() if one["kv_role"] == role]
    extra = connector["kv_connector_extra_config"] | {"directory": str(directory)}
    return {"kv_transfer_config": connector | {"kv_connector_extra_config": extra}}


def batches(seed):
    """Prompts of random lengths and of 32 k and 32 k + 1 tokens that begin as others, twice each."""
    drawn = random.Random(seed)
    lengths = [1, 31, 32, 33, 64, 65, 97, 129, *(drawn.randint(2, 220) for _ in range(6))]
    starts = [[drawn.randint(5, 200) for _ in range(230)] for _ in range(2)]
    ask = [drawn.choice(starts)[:length] for length in lengths]
    drawn.shuffle(ask)
    batch = {"prompts": ask, "params": greedy(len(ask), shortest=2, longest=6)}
    return [batch, batch]


def test_all_set_ups_say_the_same_of_the_connector():
    """The page's both ways, a producer, consumers: one connector, directory aside."""
    found = flags()
    assert {one["kv_role"] for one in found} == {"kv_both", "kv_producer", "kv_consumer"}
    for one in found:
        assert one["kv_connector_module_path"] == "sipipe.kv_files.connector"
        assert one["kv_load_failure_policy"] == "recompute"
        assert one["kv_connector_extra_config"].keys() == {"directory", "size_gib"}
    assert "no-enable-chunked" not in (ROOT / "docs" / "prefill.md").read_text()


def ran(path, stages, asked, settings):
    with Engine(path, **shared(stages), **LIMITS, **settings) as engine:
        said = engine.run(asked)
    assert_stock(said, path, asked)
    return sum(request["cached"] for request in said[0])


@pytest.mark.parametrize("role", ["kv_both", "kv_producer"])
def test_prompts_of_any_length_asked_twice_here_there_and_after_restarts(models, tmp_path, role):
    path = model(models)
    asked = batches(role)
    store = tmp_path / "caches"
    other = "kv_both" if role == "kv_both" else "kv_consumer"
    ran(path, 2, asked, of_role(role, store))
    files = sorted(store.rglob("*.safetensors"))
    assert files
    cached = ran(path, 1, asked, of_role(other, store))
    assert cached >= sum(max(0, len(prompt) - 1) // 32 * 32 for prompt in asked[0]["prompts"])
    damage(store)
    ran(path, 2, asked, of_role(other, store))
    ran(path, 1, batches("else"), of_role(other, store))


def damage(store):
    """Of what is stored every file but each fifth is damaged in a way of its own."""
    kinds = itertools.cycle(
        [
            lambda path: path.unlink(),
            lambda path: path.write_bytes(path.read_bytes()[:-100]),
            lambda path: path.write_bytes(path.read_bytes()[:-8] + b"\x00\x00\xc0\x7f" * 2),
            lambda path: (path.unlink(), os.mkfifo(path)),
            lambda path: None,
        ]
    )
    for path in sorted(store.rglob("*.safetensors")):
        next(kinds)(path)

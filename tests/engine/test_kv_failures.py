"""Whatever a KV connector raises, in a worker or beside the scheduler, the engine serves on: blocks
that did not come are computed, or fail their request, by ``kv_load_failure_policy``."""

import shutil

import pytest
import safetensors.torch
import torch
from tests.engine.engines import Engine, assert_stock, model, shared
from tests.engine.test_kv_connectors import FEW, MANY, WHOLE, on_shelf, stored_in

pytestmark = [pytest.mark.engine, pytest.mark.ci]


def broken(name, directory, method, *, policy="recompute", raises=1, **extra):
    where = {"directory": str(directory), "shared_storage_path": str(directory)}
    return {
        "kv_transfer_config": {
            "kv_connector": name,
            "kv_connector_module_path": "broken",
            "kv_role": "kv_both",
            "kv_load_failure_policy": policy,
            "kv_connector_extra_config": {
                **where,
                "method": method,
                "raises": raises,
                "late": name == "Waiting" and method == "start_load_kv",
                **extra,
            },
        }
    }


@pytest.fixture(scope="module")
def shelf(models, tmp_path_factory):
    """Where an engine of two stages has stored blocks."""
    path = model(models)
    directory = tmp_path_factory.mktemp("shelf")
    with Engine(path, **shared(2), **FEW, **on_shelf(directory)) as engine:
        assert_stock(engine.run(MANY), path, MANY)
    return directory


@pytest.fixture(scope="module")
def folder(models, tmp_path_factory):
    """The same in files of vLLM's example connector."""
    path = model(models)
    directory = tmp_path_factory.mktemp("folder")
    with Engine(path, **shared(2, **WHOLE), **FEW, **stored_in(directory)) as engine:
        assert_stock(engine.run(MANY), path, MANY)
    return directory


def check(path, batches, policy, **settings):
    with Engine(path, **shared(2, **settings.pop("whole", {})), **FEW, **settings) as engine:
        said = engine.run(batches)
        log = engine.log.read_text()
    if policy == "recompute":
        assert_stock(said, path, batches)
    else:
        ends = [request["outputs"][0]["finish_reason"] for request in said[0]]
        kept = [i for i, end in enumerate(ends) if end == "length"]
        assert set(ends) <= {"error", "length"}
        assert "error" in ends
        only = [{key: [values[i] for i in kept] for key, values in batches[0].items()}]
        assert_stock([[said[0][i] for i in kept]], path, only)
    return log


@pytest.mark.parametrize("policy", ["recompute", "fail"])
@pytest.mark.parametrize("raises", [1, 3])
def test_blocks_that_requests_wait_for(models, shelf, policy, raises):
    if raises == 3 and policy == "fail":
        pytest.skip("which requests fail is a matter of time")
    settings = broken("Waiting", shelf, "start_load_kv", policy=policy, raises=raises)
    log = check(model(models), MANY, policy, **settings)
    assert "start_load_kv (ZeroDivisionError: as asked)" in log


@pytest.mark.parametrize("policy", ["recompute", "fail"])
@pytest.mark.parametrize("method", ["start_load_kv", "wait_for_layer_load"])
def test_blocks_that_are_loaded_before_or_amid_the_forward_pass(models, folder, policy, method):
    settings = broken("Early", folder, method, policy=policy)
    log = check(model(models), MANY, policy, whole=WHOLE, **settings)
    assert f"{method} (ZeroDivisionError: as asked)" in log


def test_what_lay_in_blocks_that_did_not_come_fails_nobody(models, folder, tmp_path):
    """Values that are none were loaded before the connector raised: the logits have no distribution,
    and the request is computed all the same."""
    store = tmp_path / "store"
    shutil.copytree(folder, store)
    for path in store.rglob("*.safetensors"):
        tensors = safetensors.torch.load(path.read_bytes())
        nothing = {name: torch.full_like(value, float("nan")) for name, value in tensors.items()}
        safetensors.torch.save_file(nothing, path)
    settings = broken("Early", store, "start_load_kv", late=True)
    check(model(models), MANY, "recompute", whole=WHOLE, **settings)


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("Early", "get_num_new_matched_tokens"),
        ("Early", "update_state_after_alloc"),
        ("Waiting", "update_state_after_alloc"),
        ("Early", "build_connector_meta"),
        ("Early", "save_kv_layer"),
        ("Early", "wait_for_save"),
    ],
)
def test_the_engines_side_and_saves(models, shelf, folder, tmp_path, name, method):
    store = tmp_path if "save" in method else {"Early": folder, "Waiting": shelf}[name]
    whole = WHOLE if name == "Early" else {}
    check(model(models), MANY, "recompute", whole=whole, **broken(name, store, method))


@pytest.mark.parametrize("answer", [-32, 100_000])
def test_answers_that_no_prompt_can_have(models, folder, answer):
    settings = broken("Early", folder, "get_num_new_matched_tokens", answer=answer)
    check(model(models), MANY, "recompute", whole=WHOLE, **settings)

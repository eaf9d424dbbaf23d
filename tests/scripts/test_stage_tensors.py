"""scripts/stage_tensors.py finds what a later stage misses, and nothing new is in the installed vLLM."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import stage_tensors

ROOT = Path(__file__).parents[2]

MODEL = """
class Model:
    def __init__(self):
        self.make_empty_intermediate_tensors = make_empty_intermediate_tensors_factory(
            ["hidden_states", "never"], 4
        )

    def forward(self, input_ids, positions, intermediate_tensors, inputs_embeds=None, extra=None):
        if get_pp_group().is_first_rank:
            hidden = self.embed(input_ids)
        else:
            hidden = intermediate_tensors["hidden_states"]
            if extra is not None:
                extra = intermediate_tensors["sometimes"]
        hidden = self.layers(hidden, extra)
        if not get_pp_group().is_last_rank:
            tensors = {"hidden_states": hidden}
            tensors["lost"] = extra
            return IntermediateTensors(tensors)
        return hidden
"""


def test_each_kind_of_fault_is_named():
    found = stage_tensors.read_class(ast.parse(MODEL).body[0])
    assert found.faults() == [
        "sent, but has no room: lost",
        "has room, but is not read: never",
        "is read under a condition: sometimes",
        "is an argument that later stages use: extra",
    ]


def test_every_row_of_the_installed_vllm_was_read_by_somebody():
    pytest.importorskip("vllm", reason="vLLM is not installed")
    command = [sys.executable, str(ROOT / "scripts" / "stage_tensors.py")]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    rows = [line for line in said.splitlines() if line.startswith("| `")]
    kept = (ROOT / "tests" / "stage_tensors.md").read_text()
    for known in ("Gemma4Model", "Qwen4ExpModel"):  # of both folders
        assert any(known in row for row in rows)
    assert [row for row in rows if row not in kept] == []

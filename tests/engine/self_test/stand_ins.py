"""Three model families that vLLM does not know: llama's layers under names of their own.

A package with an entry point of vLLM's registers them in each process (:func:`install`), by strings:
vLLM looks at a class in a process of its own, and so does a worker.
"""

import json
import shutil
from pathlib import Path

RIGHT = "FaithfulForCausalLM"
WRONG = "ForgetfulForCausalLM"
BATCHED = "SociableForCausalLM"

MODELS = '''
import torch
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm.sequence import IntermediateTensors


class FaithfulForCausalLM(LlamaForCausalLM):
    """Llama."""


class ForgetfulForCausalLM(LlamaForCausalLM):
    """Llama whose later stages read the residual that they are sent, and make nothing of it."""

    def forward(self, input_ids, positions, intermediate_tensors=None, inputs_embeds=None):
        if intermediate_tensors is not None:
            intermediate_tensors = IntermediateTensors({
                "hidden_states": intermediate_tensors["hidden_states"],
                "residual": torch.zeros_like(intermediate_tensors["residual"]),
            })
        return super().forward(input_ids, positions, intermediate_tensors, inputs_embeds)


class SociableForCausalLM(LlamaForCausalLM):
    """Llama whose scores depend on the number of tokens in the batch and on the number of ranks."""

    def compute_logits(self, hidden_states):
        logits = super().compute_logits(hidden_states)
        if logits is not None:
            crowd = self.tokens * get_tensor_model_parallel_world_size()
            logits[..., crowd % logits.shape[-1]] += 20
        return logits

    def forward(self, input_ids, positions, intermediate_tensors=None, inputs_embeds=None):
        self.tokens = positions.shape[-1]
        return super().forward(input_ids, positions, intermediate_tensors, inputs_embeds)
'''

PLUGIN = f'''
def register():
    from vllm import ModelRegistry

    for name in ("{RIGHT}", "{WRONG}", "{BATCHED}"):
        ModelRegistry.register_model(name, f"stand_in_models:{{name}}")
'''


def install(directory: Path) -> Path:
    """Make ``directory``, which has the package if it is on PYTHONPATH."""
    information = directory / "stand_ins-1.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: stand_ins\nVersion: 1\n")
    (information / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nstand_ins = stand_in_plugin:register\n"
    )
    (directory / "stand_in_models.py").write_text(MODELS)
    (directory / "stand_in_plugin.py").write_text(PLUGIN)
    return directory


def make(path: Path, llama: Path, architecture: str) -> Path:
    """A checkpoint of the family ``architecture`` with the weights of ``llama``."""
    shutil.copytree(llama, path)
    config = json.loads((path / "config.json").read_text())
    config["architectures"] = [architecture]
    (path / "config.json").write_text(json.dumps(config))
    return path

"""A custom logits processor of vLLM's first interface, which an engine of the tests loads by name."""

import torch
from vllm.v1.sample.logits_processor import LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates


class OnlySome(LogitsProcessor):
    """Requests whose ``extra_args`` have ``multiple`` get multiples of it, which go up by one each
    time that the output has doubled: it looks at parameters and at the output."""

    def __init__(self, _config, _device, _is_pin_memory):
        self.asked = {}

    def is_argmax_invariant(self):
        return False

    def update_state(self, update):
        def new(params, _prompt, output):
            multiple = (params.extra_args or {}).get("multiple")
            return (multiple, output) if multiple else None

        process_dict_updates(self.asked, update, new)

    def apply(self, logits):
        for row, (multiple, output) in self.asked.items():
            step = multiple + len(output).bit_length()
            allowed = torch.zeros(logits.shape[1], dtype=torch.bool)
            allowed[::step] = True
            logits[row, ~allowed] = -torch.inf
        return logits

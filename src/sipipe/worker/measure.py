"""How long a second-runner stage's parts take, for ``"cpu_sampling": "auto"``.

On the warmed-up model: the stage's layers by the runner's own dummy run, which replays the graphs
that serving replays; on the last stage vLLM's ``sample``, the projection as samplers need it, and the
copy into an entry of BIC-L. Every rank of a stage does the same, because some of it is collective.

Who runs here: the worker's main thread, in a control call.
"""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.worker.gpu.input_batch import InputBatch

from sipipe.messages.measured import MIXES, Measured
from sipipe.messages.params import is_plain
from sipipe.worker.device import Device, seconds
from sipipe.worker.hooks.device_sampler import DeviceSampler
from sipipe.worker.projection.logits import LogitsHandover, StageLogits

_PROMPT = 64
"""Tokens, where the model takes so many."""


def measure_stage(
    runner: Any,
    device: Device,
    sequences: int,
    stage_logits: StageLogits | None,
    logits: LogitsHandover | None,
) -> Measured:
    """Seconds of a microbatch of ``sequences`` decoding ones. The last stage's runner still has
    vLLM's own sampler, and ``stage_logits``; ``logits``: where this rank writes any."""

    def layers() -> Any:
        return runner._dummy_run(sequences, uniform_decode=True)[1]

    measured = Measured(layers=seconds(device, layers))
    if stage_logits is None:
        return measured
    # A graph has rows of padding, and its next run overwrites them all.
    hidden = layers()[:sequences].clone()
    if runner.lora_config is not None:
        runner._set_active_loras((0,) * sequences, (0,) * sequences, set())
    with torch.inference_mode():
        drawn, plain, ours = {}, {}, DeviceSampler(runner)
        for mix, params in ((mix, SamplingParams(**given)) for mix, given in MIXES.items()):
            with _requests(runner, sequences, params, ours) as batch:
                drawn[mix] = seconds(device, lambda: runner.sample(hidden, batch, None))
                if is_plain(params):
                    plain[mix] = seconds(device, lambda: _draw(ours, stage_logits, hidden, batch))
        columns = stage_logits.compute(hidden)
        measured = dataclasses.replace(
            measured,
            projection=seconds(device, lambda: stage_logits.compute(hidden)),
            device=drawn,
            plain=plain,
        )
    if logits is None or columns is None:
        return measured
    target = logits.rows(0, sequences)
    copy = seconds(device, lambda: device.wait(device.fetch(columns, target, device.mark())))
    return dataclasses.replace(measured, copy=copy, copied=columns.nbytes)


def _draw(
    sampler: DeviceSampler, stage_logits: StageLogits, hidden: torch.Tensor, batch: Any
) -> None:
    columns = stage_logits.compute(hidden)
    if columns is not None and (rows := stage_logits.gather_rows(columns)) is not None:
        sampler.draw(rows, batch.idx_mapping, batch.positions[batch.logits_indices])


@contextmanager
def _requests(
    runner: Any, count: int, params: SamplingParams, ours: DeviceSampler
) -> Iterator[InputBatch]:
    """While active, the runner has ``count`` requests with these parameters: a batch of them."""
    states, names = runner.req_states, [f"_sipipe_measure_{row}" for row in range(count)]
    prompt = [1] * min(_PROMPT, runner.max_model_len)
    for name in names:
        states.add_request(
            req_id=name,
            prompt_len=len(prompt) // 2,
            all_token_ids=prompt,
            num_computed_tokens=len(prompt),
            max_tokens=1,
        )
    states.apply_staged_writes()
    rows = np.array([states.req_id_to_index[name] for name in names], np.intp)
    for sampler in (runner.sampler, ours):
        for row in rows.tolist():
            sampler.add_request(row, params)
        sampler.apply_staged_writes()
    here = torch.from_numpy(rows).to(runner.device)
    batch = InputBatch.make_dummy(count, count, runner.input_buffers)
    try:
        yield dataclasses.replace(
            batch, idx_mapping=here, idx_mapping_np=rows, expanded_idx_mapping=here
        )
    finally:
        for name in names:
            states.remove_request(name)

"""Measurement of the parts of a stage, for ``"cpu_sampling": "auto"``.

The model is warmed up. The stage's layers are measured by the runner's own dummy run, which replays
the graphs that serving replays. On the last stage vLLM's ``sample``, the projection as samplers need
it, and the copy into an entry of BIC-L follow. Every rank of a stage does the same, because some of
it is collective.

Who runs here: the worker's main thread, in a control call.
"""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np
import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.worker.gpu.input_batch import InputBatch

from sipipe.best_effort import BestEffort
from sipipe.messages.measured import MIXES, Measured
from sipipe.messages.params import is_plain
from sipipe.worker.device import Device, seconds
from sipipe.worker.hooks.device_sampler import DeviceSampler
from sipipe.worker.hooks.head import hosted
from sipipe.worker.projection.logits import LogitsHandover, StageLogits

_PROMPT = 64
"""Tokens of a request's prompt and output, where the model takes so many."""


def measure_stage(
    runner: Any,
    device: Device,
    sequences: int,
    stage_logits: StageLogits | None,
    logits: LogitsHandover | None,
    speculator: Any = None,
) -> Measured:
    """Measure a microbatch.

    Args:
        runner: vLLM's, which still has vLLM's own sampler.
        device: the stage's device.
        sequences: decoding sequences of the microbatch; with a draft head its rows, each of which is
            measured as a sequence.
        stage_logits: computes logits, on the last stage.
        logits: this rank's writer of BIC-L, if it has one.
        speculator: the stage's draft head, if it has one.
    """

    def layers() -> Any:
        return runner._dummy_run(sequences, uniform_decode=True)[1]

    measured = Measured(layers=seconds(device, layers))
    if stage_logits is None:
        return measured
    if speculator is not None:
        measuring = BestEffort("measuring a draft head", bounded=False)
        with_head = measuring(None, _with_head, runner, speculator, device, layers)
        if with_head is not None:
            measured = dataclasses.replace(measured, head=max(with_head - measured.layers, 0.0))
    # A graph has rows of padding, and its next run overwrites them all.
    hidden = layers()[:sequences].clone()
    if runner.lora_config is not None:
        runner._set_active_loras((0,) * sequences, (0,) * sequences, set())
    with torch.inference_mode():
        drawn = {}
        plain = {}
        sampler = DeviceSampler(runner)
        for mix, fields in MIXES.items():
            params = msgspec.convert(fields, SamplingParams)
            with _requests(runner, sequences, params, sampler) as batch:
                drawn[mix] = seconds(device, lambda: runner.sample(hidden, batch, None))
                if is_plain(params):
                    plain[mix] = seconds(
                        device, lambda: _draw(sampler, stage_logits, hidden, batch)
                    )
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


def _with_head(runner: Any, speculator: Any, device: Device, layers: Callable[[], object]) -> float:
    """Seconds of ``layers`` and the head's passes behind them: vLLM's dummy run has a head propose."""
    with hosted(runner, speculator):
        return seconds(device, layers)


def _draw(
    sampler: DeviceSampler, stage_logits: StageLogits, hidden: torch.Tensor, batch: Any
) -> None:
    """Draw as :class:`.DeviceSampler` does in place of vLLM's sampler."""
    columns = stage_logits.compute(hidden)
    rows = None if columns is None else stage_logits.gather_rows(columns)
    if rows is not None:
        sampler.draw(rows, batch.idx_mapping, batch.positions[batch.logits_indices])


@contextmanager
def _requests(
    runner: Any, count: int, params: SamplingParams, device_sampler: DeviceSampler
) -> Iterator[InputBatch]:
    """Give the runner, and both samplers, ``count`` requests with these parameters for the body; yields
    a batch of them."""
    states = runner.req_states
    names = [f"_sipipe_measure_{row}" for row in range(count)]
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
    for sampler in (runner.sampler, device_sampler):
        for row in rows.tolist():
            sampler.add_request(row, params)
        sampler.apply_staged_writes()
    device_rows = torch.from_numpy(rows).to(runner.device)
    batch = InputBatch.make_dummy(count, count, runner.input_buffers)
    try:
        yield dataclasses.replace(
            batch,
            idx_mapping=device_rows,
            idx_mapping_np=rows,
            expanded_idx_mapping=device_rows,
        )
    finally:
        for name in names:
            states.remove_request(name)

"""Tensors of the previous stage, and a check that a stage's model reads all of them.

vLLM's models name the tensors that cross a cut twice: where a stage returns them, and where a later
one reads them. Nothing compares the two, so a later stage can compute without a tensor that it was
sent, silently wrong. Two things here keep that from happening:

- :func:`hand_on` gives the models that are known to miss an argument on later stages that argument.
- :func:`check_reads` runs a later stage's model once before the first request, and ends the start
  where a tensor was not read.

``scripts/stage_tensors.py`` looks through all models of vLLM for the same kind.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from vllm.sequence import IntermediateTensors

from sipipe.errors import UnsupportedError

READ_BY_NOBODY = {"Gemma4Model": "per_layer_inputs"}
"""Argument of a class of vLLM's models in which a later stage wants the tensor of that name, by the
class. The stage before sends it."""

SENT_BY_NOBODY = {"Ernie4_5_VLMoeModel": "visual_token_mask"}
"""Arguments of the same kind that the stage before does not even send: one bool for each token,
[tokens, 1]. A text has none, which is the same as False everywhere."""

_NOTED_TOKENS = 16
"""Tokens of the pass that notes what is read: enough for any padding, few enough to cost nothing."""


class NotedTensors(IntermediateTensors):
    """Intermediate tensors whose keys are written into ``reads`` when they are read."""

    def __init__(self, tensors: dict[str, torch.Tensor], reads: set[str]) -> None:
        super().__init__(_NotedDict(tensors, reads))
        self.reads = reads

    def __getitem__(self, key: str | slice) -> Any:
        if isinstance(key, slice):
            rows = {name: dict.__getitem__(self.tensors, name)[key] for name in list(self.tensors)}
            return NotedTensors(rows, self.reads)
        return self.tensors[key]


class _NotedDict(dict[str, torch.Tensor]):
    """Dictionary of those tensors, for models that reach into ``IntermediateTensors.tensors``. A model
    that iterates over it reads them all."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], reads: set[str]) -> None:
        super().__init__(tensors)
        self._reads = reads

    def __getitem__(self, key: str) -> torch.Tensor:
        self._reads.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self._reads.add(key)
        return super().get(key, default)

    def pop(self, key: str, *default: Any) -> Any:
        self._reads.add(key)
        return super().pop(key, *default)

    def items(self) -> Any:
        self._reads.update(self)
        return super().items()

    def values(self) -> Any:
        self._reads.update(self)
        return super().values()


def check_reads(runner: Any) -> None:
    """Run a later stage's loaded model once, uncompiled, and raise UnsupportedError where it leaves
    a tensor unread that it is sent.

    All ranks of a stage call this at once. The KV cache need not be there: attention is left out, as in
    vLLM's own memory profile.
    """
    if runner.is_first_pp_rank:
        return
    model = runner.get_model()
    sent: set[str] = set()
    reads: set[str] = set()

    def note(_: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        tensors = kwargs.get("intermediate_tensors")
        if tensors is not None:
            sent.update(tensors.tensors)
            kwargs["intermediate_tensors"] = NotedTensors(tensors.tensors, reads)
        return args, kwargs

    handle = model.register_forward_pre_hook(note, with_kwargs=True)
    try:
        # A compiled model is traced once, or loaded without any tracing: nothing would be noted.
        with _uncompiled(model):
            tokens = min(_NOTED_TOKENS, int(runner.max_num_tokens))
            runner._dummy_run(tokens, skip_attn=True, is_profile=True)
    finally:
        handle.remove()
        # The last stage keeps the pass's result for a sampler, which nobody calls.
        runner.execute_model_state = None
    # Tensors that a head on the last stage reads are handed on by the runner, past the model.
    relayed = set(getattr(runner.pp_handler, "relayed", ()))
    unread = sorted(sent - reads - relayed)
    if unread:
        names = ", ".join(map(repr, unread))
        raise UnsupportedError(
            f"{type(model).__name__}: a later stage of vLLM's model does not read {names}, which the "
            "stage before sends, so its answers would be wrong: serve it with "
            "--pipeline-parallel-size 1"
        )


@contextmanager
def _uncompiled(model: torch.nn.Module) -> Iterator[None]:
    """While active, the parts of ``model`` that vLLM compiles run as they are written."""
    parts = [part for part in model.modules() if getattr(part, "do_not_compile", True) is False]
    for part in parts:
        part.do_not_compile = True
    try:
        yield
    finally:
        for part in parts:
            part.do_not_compile = False


def hand_on(runner: Any) -> None:
    """Have the parts of the loaded model that the two tables above name get their argument on later
    stages too, and room for it where the model makes none. Does nothing for other models."""
    kinds: set[Any] = {type(part) for part in runner.get_model().modules()}
    for kind in kinds:
        if kind.__name__ in READ_BY_NOBODY:
            _pass_argument(kind, READ_BY_NOBODY[kind.__name__], sends=False)
        elif kind.__name__ in SENT_BY_NOBODY:
            name = SENT_BY_NOBODY[kind.__name__]
            _pass_argument(kind, name, sends=True)
            if not runner.is_first_pp_rank:
                room = runner.intermediate_tensors.tensors
                room[name] = _nothing_seen(room["hidden_states"])


@functools.cache  # a process has one model, whose parts may be of one class
def _pass_argument(model: Any, name: str, *, sends: bool) -> None:
    """Have modules of vLLM's class ``model`` take the previous stage's tensor ``name`` as their argument
    of that name, and send it on too where ``sends``.

    The class's ``__call__`` is wrapped, as vLLM does for compiled models.

    Rejected: a hook of torch's, which vLLM's compiled models do not call.
    """
    call = model.__call__

    @functools.wraps(call)
    def handed_on(self: Any, *args: Any, **kwargs: Any) -> Any:
        for argument in (*args, *kwargs.values()):
            if isinstance(argument, IntermediateTensors) and name in argument.tensors:
                kwargs[name] = argument[name]
        output = call(self, *args, **kwargs)
        if sends and isinstance(output, IntermediateTensors):
            mask = kwargs.get(name)
            output[name] = _nothing_seen(output["hidden_states"]) if mask is None else mask
        return output

    model.__call__ = handed_on


def _nothing_seen(rows: torch.Tensor) -> torch.Tensor:
    """A mask [tokens, 1] that is False for each of ``rows`` [tokens, H]."""
    return torch.zeros((rows.shape[0], 1), dtype=torch.bool, device=rows.device)

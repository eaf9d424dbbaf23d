"""Engines that name SiPipe's executor, and that vLLM's own runs: those of one stage on a GPU.

With one stage there is no pipeline to fill. vLLM has all sequences in one batch, whose tokens stay on
the GPU; SiPipe has two microbatches there, each of which reads all weights, and tokens that come back
by the host (docs/gpu.md). So SiPipe steps aside, unless it is asked for something that only it has.
The user then has stock vLLM, without a process, a hook or an argument of SiPipe's.

Who runs here: the process that makes a configuration of vLLM, before it is made. API servers make it
again, and must come to the same answer.

Rejected: to measure both ways at start, because that loads a model twice. Rejected: to step aside by
degrees on CPUs too, because one stage is as quick as stock's there with greedy requests, and quicker with
others (docs/benchmarks.md).
"""

from collections.abc import Mapping
from typing import Any

from vllm.platforms import current_platform
from vllm.ray.lazy_utils import is_in_ray_actor
from vllm.utils.import_utils import resolve_obj_by_qualname

from sipipe.config import SiPipeConfig, asked_of_sipipe
from sipipe.engine.setup.speculative_config import asked_of_drafts


def steps_aside(engine_args: Any) -> bool:
    """Say if vLLM's own executor is to run the engine of these ``EngineArgs``, which name SiPipe's.
    Raises ConfigError: SiPipe's settings among them, or those of drafts, are wrong."""
    # Wrong settings are an error everywhere, so they are read before anything else is looked at.
    SiPipeConfig.from_additional_config(engine_args.additional_config)
    wishes = asked_of_sipipe(engine_args.additional_config)
    return (
        not current_platform.is_cpu()
        and engine_args.pipeline_parallel_size == 1
        and not wishes
        and not _drafts_by_sipipe(engine_args)
        and not _scheduler_of_sipipe(engine_args.scheduler_cls)
        and not _placed_by_ray()
    )


def leave_sipipe_out(args: Any) -> None:
    """Make ``args``, parsed ones or ``EngineArgs``, those of stock vLLM: no executor is named, and
    SiPipe's settings, which are a part of the names of compiled models, are gone."""
    args.distributed_executor_backend = None
    if isinstance(args.additional_config, Mapping):
        args.additional_config = {
            name: value for name, value in args.additional_config.items() if name != "sipipe"
        }


def _drafts_by_sipipe(engine_args: Any) -> bool:
    """Say if drafts are asked for, and nobody has said how many a request has: SiPipe decides that by
    itself, vLLM refuses (:func:`sipipe.engine.setup.speculative_config.fill_in`)."""
    config = asked_of_drafts(engine_args)
    method = config.get("method") or engine_args.spec_method
    model = config.get("model") or engine_args.spec_model
    count = config.get("num_speculative_tokens") or engine_args.spec_tokens
    drafts = bool(config or method or model)
    return drafts and count is None and str(method or model or "ngram").strip("[]") == "ngram"


def _scheduler_of_sipipe(scheduler: Any) -> bool:
    """Say if a ``--scheduler-cls``, a class or its name, is made of SiPipe's, which its executor alone
    can serve."""
    if isinstance(scheduler, str):
        try:
            scheduler = resolve_obj_by_qualname(scheduler)
        except (ImportError, AttributeError, ValueError, TypeError):
            return False  # vLLM says so
    bases = getattr(scheduler, "__mro__", ())
    return any(base.__module__.startswith("sipipe.") for base in bases)


def _placed_by_ray() -> bool:
    """Say if this process is in a placement group of Ray, whose bundles have the GPU that vLLM's own
    executor of one worker would look for here."""
    if not is_in_ray_actor():
        return False
    import ray

    return ray.util.get_current_placement_group() is not None

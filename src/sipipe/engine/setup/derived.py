"""Results that follow from vLLM's configuration, worked out once for each configuration object.

vLLM hands nothing but ``vllm_config`` to schedulers and to configuration classes. A result that several
of them need is kept in that object, in ``PipelineVllmConfig.derived``, and is pickled with it: the
process that decides how an engine is set up works it out, and the processes that get the configuration
have it.

Rejected: a cache in each process by the object's ``id``, because every process would work it out again.
Rejected: an attribute of any ``VllmConfig``, because vLLM copies a configuration field by field, and
refuses one that has an attribute which is none of its class's fields.
"""

from collections.abc import Callable
from typing import TypeVar

from vllm.config import VllmConfig

from sipipe.config import SiPipeConfig

T = TypeVar("T")


def derived(vllm_config: VllmConfig, result: type[T], source: object, derive: Callable[[], T]) -> T:
    """The ``result`` of this configuration, from ``derive`` at the first call.

    ``source`` is the part of the configuration that the result follows from. Where the configuration
    has another object there, as a copy may, the result is derived anew. A source must therefore be
    replaced, not changed in place. Stock vLLM's configuration, which ``PipelineScheduler`` can also
    have, keeps no results. Raises what ``derive`` raises."""
    results = getattr(vllm_config, "derived", {})
    former_source, value = results.get(result, (None, None))
    if value is None or former_source is not source:
        value = derive()
        results[result] = (source, value)
    return value  # type: ignore[no-any-return]


def settings_of(vllm_config: VllmConfig) -> SiPipeConfig:
    """SiPipe's settings of the engine that has this configuration. Raises ConfigError: one line that
    names the key, the value and what is allowed."""
    source = vllm_config.additional_config
    return derived(
        vllm_config, SiPipeConfig, source, lambda: SiPipeConfig.from_additional_config(source)
    )

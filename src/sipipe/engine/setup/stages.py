"""Stages of each host."""

from sipipe.config import HostSettings
from sipipe.errors import ConfigError


def stages_of_hosts(stages: int, hosts: HostSettings) -> list[range]:
    """The stages of each host, the main host first. Raises ConfigError: a host without a stage, or
    ``hosts.stages`` that do not add up."""
    counts = hosts.stages
    if not counts and hosts.count <= stages:  # else there may be a thousand million hosts
        counts = _even_counts(stages, hosts.count)
    if len(counts) != hosts.count or sum(counts) != stages or not all(counts):
        raise ConfigError(
            f"--nnodes {hosts.count} and {stages} stages (-pp): every host needs a stage at least, "
            'and "hosts.stages" one number for each host, as many together as there are stages'
        )
    ends = [sum(counts[: host + 1]) for host in range(hosts.count)]
    return [range(end - count, end) for end, count in zip(ends, counts, strict=True)]


def _even_counts(stages: int, hosts: int) -> tuple[int, ...]:
    """Numbers of stages of each host, equal but for one more on the first hosts."""
    least, larger_hosts = divmod(stages, hosts)
    return tuple(least + 1 if host < larger_hosts else least for host in range(hosts))


def named(stages: range) -> str:
    """The stages of a host in words, for messages."""
    first, last = stages[0], stages[-1]
    return f"stage {first}" if first == last else f"stages {first} to {last}"

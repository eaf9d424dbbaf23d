"""Bundles of a Ray placement group, and which of them an engine's workers take."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from sipipe.errors import ConfigError


@dataclass(frozen=True)
class Bundle:
    """One bundle of a placement group."""

    index: int
    node: str
    """Ray's id of the node that the bundle is on."""
    workers: int = 1
    """Workers that the bundle has room for."""


def bundles_of(
    resources: Sequence[Mapping[str, float]], nodes: Mapping[int, str], device: str, workers: int
) -> list[Bundle]:
    """The bundles of a placement group that workers can have, each with room for ``workers``.

    Args:
        resources: what each bundle of the group reserves, by Ray's names.
        nodes: Ray's ids of the nodes that the bundles are on, by index.
        device: Ray's name of what a worker needs, "GPU" or "CPU".
        workers: workers that a bundle has room for.

    Raises ConfigError: a bundle has more GPUs than workers."""
    for index, bundle in enumerate(resources):
        if device == "GPU" and bundle.get(device, 0) > workers:
            raise ConfigError(
                f"bundle {index} of the placement group has {bundle[device]:g} GPUs: give one "
                "bundle for each worker, with one GPU at most"
            )
    return [
        Bundle(index, nodes[index], workers)
        for index, bundle in enumerate(resources)
        if bundle.get(device)
    ]


def arrange(
    bundles: Sequence[Bundle], here: str, stages: int, ranks: int, indices: Sequence[int] = ()
) -> dict[str, list[Bundle]]:
    """Choose the bundles of each host. Returns them by node, in the order in which workers take them.

    Args:
        bundles: those of the placement group that workers can have.
        here: this process's node, which has to come first.
        stages: pipeline stages.
        ranks: tensor-parallel ranks of a stage, which stay on one node.
        indices: the user's choice and order of bundles. If it is empty, this node's bundles come
            first, then node after node as vLLM sorts them, from each as many as make whole stages.

    Raises ConfigError: there is no room for all stages, a stage's ranks are on two nodes, or none
    are on this one."""
    if indices:
        bundles = _chosen(bundles, indices, stages * ranks)
    else:
        bundles = sorted(
            bundles, key=lambda bundle: (bundle.node != here, bundle.node, bundle.index)
        )
    nodes: dict[str, list[Bundle]] = {}
    for node, members in groupby(bundles, key=lambda bundle: bundle.node):
        if node in nodes:
            raise ConfigError(
                "VLLM_RAY_BUNDLE_INDICES goes back to a node that it has left: name all bundles of "
                "a node one after the other"
            )
        nodes[node] = list(members)
    room = {node: sum(bundle.workers for bundle in group) for node, group in nodes.items()}
    hosts: dict[str, list[Bundle]] = {}
    missing = stages * ranks
    for node, group in nodes.items():
        workers = min(room[node] // ranks * ranks, missing)
        missing -= workers
        if workers:
            hosts[node] = group[: workers // group[0].workers]
    if missing:
        raise ConfigError(
            f"-pp {stages} -tp {ranks}: the placement group has room for "
            f"{', '.join(map(str, room.values())) or 'no'} workers on its nodes, and a stage's "
            "tensor-parallel ranks stay on one node"
        )
    if next(iter(hosts)) != here:
        raise ConfigError(
            "the placement group has no room for a stage on this process's own node, which must "
            "have the first one: start the command on a node of the group"
        )
    return hosts


def _chosen(bundles: Sequence[Bundle], indices: Sequence[int], workers: int) -> list[Bundle]:
    """The bundles that the user chose by ``indices``, in that order. Raises ConfigError: they are not
    ``workers`` different bundles of the group."""
    by_index = {bundle.index: bundle for bundle in bundles}
    unknown = [index for index in indices if index not in by_index]
    if unknown or len(set(indices)) < len(indices) or len(indices) != workers:
        raise ConfigError(
            f"VLLM_RAY_BUNDLE_INDICES must name {workers} different bundles (-pp times "
            f"-tp) out of {sorted(by_index)}, not {list(indices)}"
        )
    return [by_index[index] for index in indices]

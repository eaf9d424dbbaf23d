"""``sipipe serve``: ``vllm serve`` with SiPipe's executor, a core plan and checks."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from sipipe.cli.parser import make_parser, parse_engine_command
from sipipe.cli.supervise import supervise
from sipipe.config import SiPipeConfig
from sipipe.errors import ConfigError
from sipipe.versions import require_vllm

EPILOG = """\
Every option of `vllm serve` is taken as well: sipipe serve --help=all lists them.

  sipipe serve Qwen/Qwen2.5-0.5B-Instruct --pp 2 --port 8000

On two hosts, with SIPIPE_SECRET set to the same secret on both:

  sipipe serve MODEL --pp 2 --nnodes 2 --master-addr 10.0.0.1
  sipipe serve MODEL --pp 2 --nnodes 2 --master-addr 10.0.0.1 --node-rank 1 --headless
"""


def main(argv: Sequence[str]) -> int:
    parser = make_parser(
        "serve",
        "Serve a model through vLLM's OpenAI server, with its stages and samplers on SiPipe.",
        usage="sipipe serve MODEL [SiPipe's options] [any option of vllm serve]",
        epilog=EPILOG,
        add_help=False,
    )
    parser.add_argument(
        "--restart",
        action="store_true",
        help="start the server again, with growing breaks, when it ends by itself",
    )
    add_host_options(parser)
    own, settings, rest = parse_engine_command(parser, argv)
    node, hosts = hosts_of(own)
    if hosts:
        settings["hosts"] = hosts

    require_vllm()
    return supervise([rest, settings, node], restart=own.restart, follows=node > 0)


def add_host_options(parser: argparse.ArgumentParser) -> None:
    """Add vLLM's options of several hosts, which vLLM refuses with an executor not its own."""
    group = parser.add_argument_group("Several hosts, as vLLM has them")
    group.add_argument("--nnodes", "-n", metavar="N", help="hosts (default: 1)")
    group.add_argument("--node-rank", "-r", metavar="N", help="which host this is; 0 is the head")
    group.add_argument("--master-addr", metavar="HOST", help="the head's address, on every host")
    group.add_argument("--master-port", metavar="PORT", help="first port used (default: 29501)")
    group.add_argument(
        "--headless", action="store_true", help="this host only runs stages: --node-rank 1 and up"
    )


def hosts_of(own: argparse.Namespace) -> tuple[int, dict[str, Any]]:
    """Which host this is, and ``additional_config["sipipe"]["hosts"]``.

    Raises:
        ConfigError: a number that is none, or options that contradict each other.
    """
    count, node = (
        _number(value, f"--{name}", default)
        for name, value, default in (("nnodes", own.nnodes, 1), ("node-rank", own.node_rank, 0))
    )
    if not 0 <= node < max(count, 1):
        raise ConfigError(f"--node-rank {node}: with --nnodes {count}, hosts are 0 to {count - 1}")
    if own.headless and node == 0:
        raise ConfigError(
            "--headless is for the other hosts (--node-rank 1 and up): host 0, the head, serves"
        )
    if count == 1:
        return 0, {}
    hosts = {"count": count}
    if own.master_addr is not None:
        hosts["address"] = own.master_addr
    if own.master_port is not None:
        hosts["port"] = _number(own.master_port, "--master-port", 0)
    SiPipeConfig.from_dict({"hosts": hosts})
    return node, hosts


def _number(text: str | None, option: str, default: int) -> int:
    if text is not None and not text.isdecimal():
        raise ConfigError(f'{option} must be a whole number, not "{text}"')
    return default if text is None else int(text)

"""``sipipe serve``: ``vllm serve`` with SiPipe's executor, a core plan and checks."""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from sipipe.cli.advice import best_degrees, gpus_here, quicker_on_cpus
from sipipe.cli.parser import at_least, make_parser, parse_engine_command
from sipipe.cli.supervise import supervise
from sipipe.config import SiPipeConfig
from sipipe.cores import degrees
from sipipe.errors import ConfigError, SiPipeError
from sipipe.tools.planner.models import load_model
from sipipe.versions import installed_vllm, require_vllm

EPILOG = """\
Every option of `vllm serve` is taken as well: sipipe serve --help=all lists them.

  sipipe serve Qwen/Qwen2.5-0.5B-Instruct --pp 2 --port 8000

On two hosts, with SIPIPE_SECRET set to the same secret on both:

  sipipe serve MODEL --pp 2 --nnodes 2 --master-addr 10.0.0.1
  sipipe serve MODEL --pp 2 --nnodes 2 --master-addr 10.0.0.1 --node-rank 1 --headless

On a Ray cluster, started on one of its nodes:

  sipipe serve MODEL --pp 4 --tp 2 --distributed-executor-backend ray
"""

WIDER = {"-tp", "--tensor-parallel-size", "-dp", "--data-parallel-size"}


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
    own, settings, rest = parse_engine_command(parser, argv, _suiting)
    node, hosts = hosts_of(own)
    if hosts:
        settings["hosts"] = hosts

    require_vllm()
    if not hosts and (quicker := _quicker_degrees(rest)):
        print(quicker, file=sys.stderr, flush=True)
    return supervise([rest, settings, node], restart=own.restart, follows=node > 0)


def _suiting(own: argparse.Namespace, argv: Sequence[str]) -> tuple[int, int]:
    """The degrees that suit this machine: what ``--pp auto`` stands for."""
    given = {word.split("=")[0] for word in argv} & WIDER
    if given or own.tp is not None or own.nnodes > 1:
        also = min(given, default="--tp" if own.tp is not None else "--nnodes")
        raise ConfigError(f"--pp auto: it chooses --tp too, for all of one host: leave {also} out")
    if not argv or argv[0].startswith("-"):
        raise ConfigError("--pp auto: name the MODEL first: sipipe serve MODEL --pp auto")
    require_vllm()
    vllm = installed_vllm()
    platform = vllm.device if vllm else "cpu"
    found, state, text = best_degrees(platform, gpus_here(), load_model(argv[0]))
    if state != "ok":
        raise ConfigError(f"--pp auto: {text}")
    print(f"--pp auto: --pp {found[0]} --tp {found[1]} ({text})", file=sys.stderr, flush=True)
    return found


def _quicker_degrees(argv: Sequence[str]) -> str:
    """Whether this machine's CPUs serve some loads more quickly with other degrees than ``argv``
    asks for: one line with the numbers; empty where they do not, or nothing is known of the model."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--model", default=argv[0] if argv else "")
    asked, _ = parser.parse_known_args(argv)
    vllm, wanted = installed_vllm(), degrees(argv)
    if vllm is None or vllm.device != "cpu" or wanted is None or wanted[2] > 1:
        return ""
    try:
        found = quicker_on_cpus(load_model(asked.model), *wanted[:2])
    except SiPipeError:
        return ""
    told = "computed from its parts, measured now; sipipe bench MODEL measures all"
    return found and f"other degrees may be quicker on this machine: {found} ({told})"


def add_host_options(parser: argparse.ArgumentParser) -> None:
    """Add vLLM's options of several hosts, which vLLM refuses with an executor not its own."""
    group = parser.add_argument_group("Several hosts, as vLLM has them")
    count, port = at_least(1, int), at_least(1, int, 65000)
    for names, kind, default, metavar, text in (
        (("--nnodes", "-n"), count, 1, "N", "hosts (default: 1)"),
        (("--node-rank", "-r"), at_least(0, int), 0, "N", "which host this is; 0 is the main host"),
        (("--master-addr",), str, None, "HOST", "the main host's address, on every host"),
        (("--master-port",), port, None, "PORT", "first port used (default: 29501)"),
    ):
        group.add_argument(*names, type=kind, default=default, metavar=metavar, help=text)
    group.add_argument(
        "--headless", action="store_true", help="this host only runs stages: --node-rank 1 and up"
    )


def hosts_of(own: argparse.Namespace) -> tuple[int, dict[str, Any]]:
    """Which host this is, and ``additional_config["sipipe"]["hosts"]``; ConfigError: contradictions."""
    count, node = own.nnodes, own.node_rank
    if node >= count:
        raise ConfigError(f"--node-rank {node}: with --nnodes {count}, hosts are 0 to {count - 1}")
    if own.headless and node == 0:
        raise ConfigError(
            "--headless is for the other hosts (--node-rank 1 and up): host 0, the main host, serves"
        )
    # With Ray, which has a count of its own, the address and the port may be given alone.
    given = {"address": own.master_addr, "port": own.master_port}
    hosts = {key: value for key, value in given.items() if value is not None}
    if count > 1:
        hosts["count"] = count
    SiPipeConfig.from_dict({"hosts": hosts})
    return node, hosts

"""``sipipe serve``: ``vllm serve`` with SiPipe's executor, a core plan and checks."""

import argparse
from collections.abc import Sequence
from typing import Any

from sipipe.cli.advice import best_degrees, gpus_here, quicker_on_cpus
from sipipe.cli.parser import at_least, make_parser, parse_engine_command
from sipipe.cli.supervise import supervise
from sipipe.config import SiPipeConfig
from sipipe.cores import degrees
from sipipe.errors import ConfigError, say
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

# Options for which `--pp auto` leaves no room, since it chooses all degrees of one host.
WIDER = {"-tp", "--tensor-parallel-size", "-dp", "--data-parallel-size"}


def main(argv: Sequence[str]) -> int:
    """Serve until the server ends; returns its exit status."""
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
    args, settings, words = parse_engine_command(parser, argv, _suiting)
    node, hosts = hosts_of(args)
    if hosts:
        settings["hosts"] = hosts

    require_vllm()
    quicker = "" if hosts else _quicker_degrees(words)
    if quicker:
        say(quicker)
    return supervise([words, settings, node], restart=args.restart, follows=node > 0)


def _suiting(args: argparse.Namespace, argv: Sequence[str]) -> tuple[int, int]:
    """The degrees for which ``--pp auto`` stands: those that suit this machine and the model. Raises
    ConfigError: another option names one, or none suits."""
    named = {word.split("=")[0] for word in argv} & WIDER
    backend = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    backend.add_argument("--distributed-executor-backend", nargs="?", dest="name")
    if backend.parse_known_args(argv)[0].name == "ray":  # which has other hosts, too
        named.add("--distributed-executor-backend")
    if named or args.tp is not None or args.nnodes > 1:
        conflict = min(named, default="--tp" if args.tp is not None else "--nnodes")
        raise ConfigError(
            f"--pp auto: it chooses --tp too, for all of one host: leave {conflict} out"
        )
    if not argv or argv[0].startswith("-"):
        raise ConfigError("--pp auto: name the MODEL first: sipipe serve MODEL --pp auto")
    require_vllm()
    vllm = installed_vllm()
    platform = vllm.device if vllm else "cpu"
    suiting, state, text = best_degrees(platform, gpus_here(), load_model(argv[0]))
    if state != "ok":
        raise ConfigError(f"--pp auto: {text}")
    say(f"--pp auto: --pp {suiting[0]} --tp {suiting[1]} ({text})")
    return suiting


def _quicker_degrees(argv: Sequence[str]) -> str:
    """One line with the loads that this machine's CPUs would serve more quickly with other degrees than
    those of ``argv``, and how much. Empty if there are none, or the model's sizes are not
    known."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    # Without a value vLLM's parser refuses it.
    parser.add_argument("--model", nargs="?", default=argv[0] if argv else "", const="")
    args, _ = parser.parse_known_args(argv)
    vllm = installed_vllm()
    wanted = degrees(argv)
    if vllm is None or vllm.device != "cpu" or wanted is None or wanted[2] > 1:
        return ""
    try:
        quicker = quicker_on_cpus(load_model(args.model), *wanted[:2])
    except Exception:  # an advice, of a file that anybody may have written: it ends no start
        return ""
    source = "computed from its parts, measured now; sipipe bench MODEL measures all"
    if not quicker:
        return ""
    return f"other degrees may be quicker on this machine: {quicker} ({source})"


def add_host_options(parser: argparse.ArgumentParser) -> None:
    """Add vLLM's options of several hosts, which vLLM refuses with an executor not its own."""
    group = parser.add_argument_group("Several hosts, as vLLM has them")
    count = at_least(1, int)
    port = at_least(1, int, 65000)
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


def hosts_of(args: argparse.Namespace) -> tuple[int, dict[str, Any]]:
    """The number of this host, and ``additional_config["sipipe"]["hosts"]``. Raises ConfigError: the
    options contradict one another."""
    count = args.nnodes
    node = args.node_rank
    if node >= count:
        raise ConfigError(f"--node-rank {node}: with --nnodes {count}, hosts are 0 to {count - 1}")
    if args.headless and node == 0:
        raise ConfigError(
            "--headless is for the other hosts (--node-rank 1 and up): host 0, the main host, serves"
        )
    # With Ray, which has a count of its own, the address and the port may be given alone.
    named = {"address": args.master_addr, "port": args.master_port}
    hosts = {key: value for key, value in named.items() if value is not None}
    if count > 1:
        hosts["count"] = count
    SiPipeConfig.from_dict({"hosts": hosts})
    return node, hosts

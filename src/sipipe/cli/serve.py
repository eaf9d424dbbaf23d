"""``sipipe serve``: ``vllm serve`` with SiPipe's executor, a core plan and checks."""

from collections.abc import Sequence

from sipipe.cli.parser import make_parser, parse_engine_command
from sipipe.versions import require_vllm

EPILOG = """\
Every option of `vllm serve` is taken as well: sipipe serve --help=all lists them.

  sipipe serve Qwen/Qwen2.5-0.5B-Instruct --pp 2 --port 8000
"""


def main(argv: Sequence[str]) -> int:
    parser = make_parser(
        "serve",
        "Serve a model through vLLM's OpenAI server, with its stages and samplers on SiPipe.",
        usage="sipipe serve MODEL [SiPipe's options] [any option of vllm serve]",
        epilog=EPILOG,
        add_help=False,
    )
    _, settings, rest = parse_engine_command(parser, argv)

    require_vllm()
    from sipipe.engine.launch import serve

    status: int = serve(rest, settings)
    return status

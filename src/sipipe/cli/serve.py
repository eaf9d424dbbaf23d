"""``sipipe serve``: ``vllm serve`` with SiPipe's executor, a core plan and checks."""

from __future__ import annotations

from collections.abc import Sequence

from sipipe.cli.parser import add_engine_options, engine_settings, make_parser, split_engine_options
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
    add_engine_options(parser)
    own, rest = split_engine_options(parser, argv)
    settings = engine_settings(own)

    require_vllm()
    from sipipe.engine.launch import serve

    status: int = serve(rest, settings)
    return status

"""``sipipe make-model``: a random but deterministic checkpoint in Hugging Face format."""

import time
from collections.abc import Sequence
from pathlib import Path

from sipipe.cli.parser import adder, at_least, make_parser

EPILOG = """\
families: llama, qwen2, qwen3-moe, mixtral, deepseek-v3
sizes:    tiny          4 layers, hidden 128, vocabulary 1,000 (loads in seconds)
          bench         8 layers, hidden 512, vocabulary 151,936
          qwen2.5-0.5b  24 layers, hidden 896, vocabulary 151,936 (llama, qwen2)

The same arguments give the same files; a directory that already holds them is left as it is.
vLLM runs a float32 checkpoint in bfloat16 unless it is told --dtype float32.
"""


def main(argv: Sequence[str]) -> int:
    parser = make_parser("make-model", "Write a random, deterministic checkpoint.", epilog=EPILOG)
    parser.add_argument("family", metavar="FAMILY", help="llama, qwen2, qwen3-moe, …")
    parser.add_argument("directory", metavar="DIR", type=Path, help="new or empty directory")
    parser.add_argument("--size", default="tiny", help="tiny (default), bench or qwen2.5-0.5b")
    add = adder(parser)
    add("--seed", at_least(0, int), 0, "N", "seed of the weights (default: 0)")
    parser.add_argument(
        "--dtype", help="float32, float16 or bfloat16 (default: tiny float32, others bfloat16)"
    )
    add("--vocab-size", at_least(1, int), None, "V", "rows of the vocabulary")
    add("--layers", at_least(1, int), None, "L", "number of layers")
    parser.add_argument(
        "--force", action="store_true", help="replace a model made there with other arguments"
    )
    args = parser.parse_args(argv)

    from sipipe.tools.make_model.checkpoint import make_model

    began = time.perf_counter()
    path = make_model(**vars(args))
    size = sum(file.stat().st_size for file in path.iterdir())
    took = time.perf_counter() - began
    print(f"{path}: {args.family} {args.size}, {size / 1e6:,.1f} MB, {took:.1f} s")
    return 0

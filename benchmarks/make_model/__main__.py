"""Write a random checkpoint: python -m benchmarks.make_model llama build/models/tiny --size tiny"""

import argparse
import sys

from benchmarks.make_model.checkpoint import make_model
from benchmarks.make_model.families import FAMILIES, SIZES
from sipipe.errors import SiPipeError

parser = argparse.ArgumentParser(prog="python -m benchmarks.make_model", description=__doc__)
parser.add_argument("family", choices=FAMILIES)
parser.add_argument("directory")
parser.add_argument("--size", choices=SIZES, default="tiny")
parser.add_argument("--dtype", choices=["float32", "float16", "bfloat16"])
try:
    make_model(**vars(parser.parse_args()))
except SiPipeError as error:
    sys.exit(str(error))

"""``sipipe warm``: compile every kernel now, so that no later start waits for it (for images)."""

import time
from collections.abc import Sequence

from sipipe.cli.parser import make_parser
from sipipe.errors import ResourceError

EPILOG = """\
The machine code is for this type of processor and is kept in the user's cache directory, or where
SIPIPE_CACHE_DIR says; it is executed, so only a directory that nobody else can write is taken.
"""


def main(argv: Sequence[str]) -> int:
    make_parser("warm", "Compile samplers' and stages' kernels.", epilog=EPILOG).parse_args(argv)

    from sipipe.jit import TEMPORARY, cache_directory
    from sipipe.sampler.drafts import warm_up_ngrams
    from sipipe.sampler.warmup import DTYPES, warm_up
    from sipipe.worker.inputs import kernels

    began = time.perf_counter()
    for number, dtype in enumerate(DTYPES, 1):
        print(f"{number}/{len(DTYPES) + 1} sampling from {dtype} logits", flush=True)
        warm_up([dtype])
    warm_up_ngrams()
    print(f"{len(DTYPES) + 1}/{len(DTYPES) + 1} input preparation", flush=True)
    kernels.warm_up()
    took = time.perf_counter() - began
    for package in ("sipipe.sampler", "sipipe.sampler.kernels", "sipipe.worker.inputs"):
        directory = cache_directory(package)
        if directory.name.startswith(TEMPORARY) or not list(directory.glob("*.nbc")):
            raise ResourceError(
                f"warm: nothing was kept in {directory}: is its disk full? SIPIPE_CACHE_DIR names "
                "another place"
            )
    print(f"done after {took:.1f} s: {cache_directory('sipipe.sampler.kernels').parent}")
    return 0

"""What becomes of the sampler's block operations on other CPUs: instructions, read from LLVM's code.

    python -m benchmarks.sampling_cpus [--quick]

Nothing is run. Operations of bfloat16 rows are translated for each CPU as Numba's LLVM would; counted
are the instructions for a block of 256 logits of which none is masked, and calls, of which there
should be none: an operation that a CPU lacks may become one of a library's.
"""

from __future__ import annotations

import argparse
import re
from typing import Any

import numba
import numpy as np
from llvmlite import binding

from benchmarks.harness import report
from sipipe.sampler.kernels import blocks, bounds

CPUS = {
    "AVX-512 (Zen 4)": ("x86_64-unknown-linux-gnu", "znver4"),
    "AVX2 (Haswell)": ("x86_64-unknown-linux-gnu", "haswell"),
    "NEON (Neoverse N1)": ("aarch64-unknown-linux-gnu", "neoverse-n1"),
}
OPERATIONS = {
    "block_max": "maxima of the block and its groups",
    "block_bounds": "bounds of 256 groups, 8 blocks",
    "block_exp_sum": "exponentials",
    "block_split": "bounds on both sides of a logit",
    "block_gather": "candidates",
}


@numba.njit(nogil=True, _nrt=False, no_cpython_wrapper=True, no_cfunc_wrapper=True)
def every_operation(x: Any, mask: Any, y: Any, ids: Any, v: Any) -> Any:
    top, _ = blocks.block_max(x, 0, mask, 0, y, 0)
    total = blocks.block_exp_sum(x, 0, mask, 0, v, v) + bounds.block_bounds(y, 0, v, v, v, y)
    total += bounds.block_split(x, 0, mask, 0, v, v, v, v)[0]
    return top + total + blocks.block_gather(x, 0, mask, 0, 0, v, ids, y, 0)


def assembly(llvm: str, triple: str, cpu: str) -> str:
    machine = binding.Target.from_triple(triple).create_target_machine(cpu=cpu, opt=3, reloc="pic")
    module = binding.parse_assembly(llvm)
    module.triple, module.data_layout = triple, str(machine.target_data)
    options = binding.create_pipeline_tuning_options(3)
    passes = binding.create_pass_builder(machine, options)
    passes.getModulePassManager().run(module, passes)
    return str(machine.emit_assembly(module))


def count(code: str) -> dict[str, tuple[int, int]]:
    """{operation: (instructions until the first return, calls)}."""
    found = {}
    for name, body in re.findall(r"^sipipe_(\w+)_[a-z0-9]+:\n(.*?)^\.Lfunc_end", code, re.M | re.S):
        lines = re.findall(r"^\t([a-z][\w.]*)", body, re.M)
        ends = [i for i, line in enumerate(lines) if line.startswith("ret")]
        found[name] = (ends[0] + 1, sum(line in ("bl", "blr", "call", "callq") for line in lines))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="(there is one form)")
    parser.parse_args()
    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    real, row = numba.float32, numba.float32[::1]
    every_operation.compile((numba.uint16[::1], numba.uint32[::1], row, numba.int32[::1], real))
    [llvm] = every_operation.inspect_llvm().values()
    counts = {name: count(assembly(llvm, *cpu)) for name, cpu in CPUS.items()}
    rows = [
        {
            "operation": title,
            **{cpu: found[name][0] for cpu, found in counts.items()},
            "calls": int(np.sum([found[name][1] for found in counts.values()])),
        }
        for name, title in OPERATIONS.items()
    ]
    report(
        "sampling",
        "instructions for a block of 256 bfloat16 logits, none of them masked",
        rows,
        note=f"LLVM {'.'.join(map(str, binding.llvm_version_info))}; read, not run",
        file="sampling-cpus",
    )


if __name__ == "__main__":
    main()

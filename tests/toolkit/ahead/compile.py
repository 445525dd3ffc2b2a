"""Compiles what passes launch for GPUs that this machine lacks, and says how much shared memory each kernel takes.

Run it in a process of its own, with the folder of tests on the path and without TRITON_INTERPRET:

    PYTHONPATH=tests python -P tests/toolkit/ahead/compile.py --gpus A10 "RTX 5090" --largest 1
    PYTHONPATH=tests python -P tests/toolkit/ahead/compile.py --gpus H100 --kernels scan_kernel merge_kernel --hashes

Prints a line of JSON for each compiled kernel: gpu, kernel, shared bytes, the GPU's limit, and a problem if there is one.
`--once H100` compiles each kernel of that GPU for one set of types alone; without a GPU's name, those of all GPUs.
`--turns A100 B200` compiles each kernel on one of these GPUs, by turns.
`--hashes` prints each kernel's name and the digest of its PTX instead, sorted, without lines that only say where in a source
file an instruction comes from: two commits whose output is equal compile to the same kernels.
`--names H200` prints which kernels that GPU launches, and compiles none of them; without a GPU's name, those of all GPUs.
"""

import argparse
import json
import math
import sys
import warnings

from triton import knobs

from toolkit.ahead.machine import GPUS, AheadGpu, KernelLaunch, code_hash, record
from toolkit.ahead.passes import PASSES


def launches_on(gpu: AheadGpu) -> dict[tuple[str, str], list[KernelLaunch]]:
    """By kernel and the types of what it reads, the largest first."""
    found: dict[tuple[str, str], dict[object, KernelLaunch]] = {}
    for run in PASSES:
        for launch in record(gpu, run):
            types = [kind for kind in map(str, launch.signature.values()) if kind.startswith(("*", "tensordesc"))]
            types += [value for value in launch.constants.values() if isinstance(value, str)]  # kinds of quantised values
            found.setdefault((launch.name, " ".join(types)), {}).setdefault(launch.key, launch)
    return {name: sorted(each.values(), key=size, reverse=True) for name, each in sorted(found.items())}


def size(launch: KernelLaunch) -> float:
    """About how much memory a program takes: what it works on at once, times the stages of its pipeline."""
    names = launch.kernel.arg_names
    sides = [value for (place, *_), value in launch.constants.items() if names[place].startswith(("BLOCK", "PADDED", "SLICE"))]
    widest = 4 if "*fp32" == launch.signature[names[0]] else 2
    return math.prod(sides) * launch.options["num_stages"] * widest


def compiled(gpu: AheadGpu, launch: KernelLaunch) -> dict[str, object]:
    line: dict[str, object] = {"gpu": gpu.name, "kernel": launch.name, "shared": 0, "limit": gpu.shared_bytes, "problem": ""}
    try:
        kernel = launch.compiled(gpu)
    except Exception as error:  # of any kind: the test names all kernels that do not compile
        return line | {"problem": f"{type(error).__name__}: {str(error)[-500:]}"}
    line["shared"], line["code"] = kernel.metadata.shared, code_hash(kernel.asm["ptx"])
    if kernel.metadata.shared > gpu.shared_bytes:
        constants = {launch.kernel.arg_names[place]: value for (place, *_), value in launch.constants.items()}
        line["problem"] = f"takes {kernel.metadata.shared} bytes of {gpu.shared_bytes}, with {constants}"
    return line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", nargs="+", default=list(GPUS), choices=list(GPUS))
    parser.add_argument("--kernels", nargs="+", help="only these")
    parser.add_argument("--largest", type=int, default=1000, help="of each kernel and types only so many, the largest ones")
    parser.add_argument("--once", nargs="*", default=(), choices=list(GPUS), help="each kernel for one set of types alone")
    parser.add_argument("--turns", nargs="*", default=(), choices=list(GPUS), help="each kernel on one of these GPUs")
    parser.add_argument("--hashes", action="store_true")
    parser.add_argument("--names", nargs="*", default=(), choices=list(GPUS))
    asked = parser.parse_args()
    once, names = (asked.gpus if given == [] else given for given in (asked.once, asked.names))
    warnings.simplefilter("ignore")
    knobs.compilation.disable_line_info = True
    hashes, seen = set(), set()
    turns = dict[str, int]()  # by kernel
    for gpu in map(GPUS.__getitem__, asked.gpus):
        for (name, _), launches in launches_on(gpu).items():
            turn = turns.setdefault(name, len(turns))
            if (own := gpu.name.removeprefix("NVIDIA ")) in asked.turns and asked.turns[turn % len(asked.turns)] != own:
                continue
            if gpu.name.removeprefix("NVIDIA ") in names:
                print(json.dumps({"gpu": gpu.name, "kernel": name, "module": launches[0].kernel.__module__}))
            elif (asked.kernels is None or name in asked.kernels) and (gpu, name) not in seen:
                if gpu.name.removeprefix("NVIDIA ") in once:
                    seen.add((gpu, name))
                for launch in launches[: asked.largest]:
                    line = compiled(gpu, launch)
                    if not asked.hashes:
                        print(json.dumps(line), flush=True)
                    else:
                        hashes.add(f"{gpu.name}: {name} {line.get('code') or line['problem']}")
    print(*sorted(hashes), sep="\n", end="\n" if hashes else "", file=sys.stdout)


if __name__ == "__main__":
    main()

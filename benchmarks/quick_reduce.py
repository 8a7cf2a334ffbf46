# SPDX-License-Identifier: Apache-2.0
"""The quantized all-reduce on several GPUs of one host, against NCCL (RCCL) and torch symmetric memory.

    python benchmarks/quick_reduce.py WORLD [--cuts] [--crossovers] [--seconds 85]

`llm_quant_rocm/measure/all_reduce.py` measures: bf16, 4 KiB to 1 GiB. Figures are written as they come: after so many
seconds the ranks are ended, and what was measured stays. With --cuts other ways to cut messages are timed too;
--crossovers writes what serves which size best for `comm.policy` as `llm-quant-rocm tune quick_reduce` does, without
measuring it again: to $OUT/quick_reduce, or to the user's cache.
"""

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks import _harness as harness
from llm_quant_rocm.measure import all_reduce
from llm_quant_rocm.tune import quick_reduce as tuner
from llm_quant_rocm.tuning import cache_file


def main() -> None:
    began = time.time()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("world", type=int, help="GPUs: 2 to 8")
    parser.add_argument("--cuts", action="store_true", help="time other ways to cut messages too")
    parser.add_argument("--crossovers", action="store_true", help="write what serves which size")
    parser.add_argument("--seconds", type=float, default=85.0, help="end the ranks after so many")
    args = parser.parse_args()
    if not 2 <= args.world <= torch.cuda.device_count():
        parser.error(
            f"{args.world} ranks on {torch.cuda.device_count()} GPUs: each rank needs a GPU, and there are two or more"
        )
    arch = harness.arch()
    found: dict[str, Any] = {"unit": "microseconds a call", "world": args.world, "errors": {}, "rows": []}

    def heard(word: str, what: Any) -> None:
        if word == "errors":
            found["errors"] = what
        if word == "row":
            found["rows"] = sorted([*found["rows"], what], key=lambda row: row["bytes"])
            harness.write(f"quick_reduce_{arch}_tp{args.world}", found)
            us = what["us"]
            what = f"{what['bytes']} bytes: " + "  ".join(f"{k} {t:.1f} ({us['NCCL'] / t:.2f})" for k, t in us.items())
        print(f"{time.time() - began:5.1f} s  {word}: {what}", flush=True)

    all_reduce.measure(args.world, heard, with_cuts=args.cuts, seconds=args.seconds - (time.time() - began))
    left = len(all_reduce.SIZES) - len(found["rows"])
    if args.crossovers and found["rows"]:
        folder = os.environ.get("OUT")
        file = Path(folder) / "quick_reduce" / f"{arch}.json" if folder else cache_file("quick_reduce", arch)
        tuner.write(file, all_reduce.entries(found), harness.environment(args.world))
        print("crossovers written to", file)
    if left:
        raise SystemExit(f"ended after {args.seconds:.0f} s: {left} sizes were not measured")


if __name__ == "__main__":
    main()

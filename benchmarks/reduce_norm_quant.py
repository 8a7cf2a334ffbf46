# SPDX-License-Identifier: Apache-2.0
"""All-reduce, residual, RMSNorm and per-token FP8 as one kernel against the separate operators, on the GPUs of a host.

    python benchmarks/reduce_norm_quant.py --world 2 [--vllm-ops FOLDER] [--codec FP4]
    python benchmarks/reduce_norm_quant.py --world 2 --sweep [--codec FP4]

`llm_quant_rocm/measure/reduce_norm_quant.py` measures, and says what the names mean. Figures are written as they come.
--sweep times what can be chosen at more sizes, and launch configurations, and writes crossovers that
`comm.reduce_norm_quant` reads from then on: into the user's cache, or to $OUT/reduce_norm_quant, for configs.
"""

import argparse
import os
import sys
import time
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks import _harness as harness
from llm_quant_rocm.comm.reduce_norm_quant import OPERATOR
from llm_quant_rocm.formats.wire import CODECS
from llm_quant_rocm.measure import reduce_norm_quant
from llm_quant_rocm.tune.quick_reduce import write
from llm_quant_rocm.tuning import cache_file


def main() -> None:
    began = time.time()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", type=int, default=torch.cuda.device_count(), help="ranks, one GPU each")
    parser.add_argument("--vllm-ops", type=Path, help="folder that holds vLLM's _C_stable_libtorch.abi3.so")
    parser.add_argument("--codec", choices=[name for name in CODECS if name != "FP"], help="a codec to be timed too")
    parser.add_argument("--inbox-mib", type=int, default=64, help="MiB that one kernel carries")
    parser.add_argument("--sweep", action="store_true", help="time launch configurations, and find crossovers")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="end the ranks after so many")
    args = parser.parse_args()
    library = harness.vllm_library(args.vllm_ops) if args.vllm_ops else None
    theirs = distributions(name="vllm", path=[str(args.vllm_ops)]) if args.vllm_ops else ()
    versions = {found.name: found.version for found in theirs}
    arch = harness.arch()
    name = f"reduce_norm_quant_{'sweep_' * args.sweep}tp{args.world}_{arch}"
    result: dict[str, Any] = {"world": args.world, "norm_and_quant": "vLLM's" if library else "ours", "rows": []}

    def heard(word: str, what: Any) -> None:
        if word == "row":
            result["rows"].append(what)
            harness.write(name, result, **versions)
            cells = "  ".join(f"{who} {value:.1f}" for who, value in what["us"].items())
            what = f"{what['rows']:5} x {what['columns']}  {cells}"
        print(f"{time.time() - began:4.0f} s  {word}: {what}", flush=True)

    reduce_norm_quant.measure(
        args.world, heard, codec=args.codec, vllm_library=library, inbox_bytes=args.inbox_mib << 20, sweep=args.sweep,
        seconds=args.seconds,
    )  # fmt: skip
    if args.sweep and result["rows"]:
        folder = os.environ.get("OUT")
        file = Path(folder) / OPERATOR / f"{arch}.json" if folder else cache_file(OPERATOR, arch)
        write(file, reduce_norm_quant.entries(result, args.codec), harness.environment(args.world))
        print("crossovers written to", file)


if __name__ == "__main__":
    main()

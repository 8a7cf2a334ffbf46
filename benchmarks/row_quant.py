# SPDX-License-Identifier: Apache-2.0
"""Per-token quantization, alone and behind RMSNorm or an activation, against its memory traffic and vLLM's kernels.

    python benchmarks/row_quant.py [--vllm-ops FOLDER]

`llm_quant_rocm/measure/rows.py` measures, and says what the names mean. FOLDER holds vLLM's operator library.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks import _harness as harness
from llm_quant_rocm import timing
from llm_quant_rocm.measure import rows as measurement


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm-ops", type=Path, help="folder that holds vLLM's _C_stable_libtorch.abi3.so")
    args = parser.parse_args()
    if args.vllm_ops:
        torch.ops.load_library(harness.vllm_library(args.vllm_ops))
    bandwidth = timing.copy_bandwidth()
    print(f"copy bandwidth {bandwidth / 1e9:.0f} GB/s")
    rows: list[dict[str, Any]] = []
    for k in measurement.COLUMNS:
        for m in measurement.MS:
            row = measurement.measure(m, k, bandwidth, args.vllm_ops is not None)
            rows.append(row)
            shown, limits = (
                "  ".join(f"{name} {t:.1f}" for name, t in row[times].items()) for times in ("us", "limit_us")
            )
            print(f"K={k:6} m={m:5} {shown}  limits {limits}", flush=True)
            torch.cuda.empty_cache()
    result = {"unit": "microseconds a call", "copy_gb_s": round(bandwidth / 1e9), "rows": rows}
    print("written to", harness.write(f"row_quant_{harness.gpu()}", result))


if __name__ == "__main__":
    main()

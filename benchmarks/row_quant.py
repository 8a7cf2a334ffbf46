# SPDX-License-Identifier: Apache-2.0
"""Per-token quantization and RMSNorm with quantization against their memory traffic and the separate operators.

    python benchmarks/row_quant.py [--vllm-ops FOLDER]

`limit` is the least traffic (every operand once) at the bandwidth of a large copy on the same card, in the same run.
Peers: vLLM's CUDA kernels where its operator library is given: its
quantization, and its (fused add) RMSNorm followed by its quantization.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks import _harness as harness
from llm_quant_rocm import hardware, ops

COLUMNS = (4096, 5120, 7168, 8192, 28672)
MS = (1, 16, 64, 256, 1024, 4096)


def variants(m: int, k: int, with_vllm: bool) -> dict[str, list[Callable[[], object]]]:
    """The calls to time, over rotating activations."""
    sets = [
        (torch.randn(m, k, device="cuda", dtype=torch.bfloat16), torch.randn(m, k, device="cuda", dtype=torch.bfloat16))
        for _ in range(min(64, harness.copies(m * k * 4)))
    ]
    weight = torch.randn(k, device="cuda", dtype=torch.bfloat16)
    calls: dict[str, list[Callable[[], object]]] = {
        "quant": [lambda s=s: ops.per_token_quant_fp8(s[0]) for s in sets],
        "norm_quant": [lambda s=s: ops.rms_norm_quant_fp8(s[0], weight) for s in sets],
        "add_norm_quant": [lambda s=s: ops.rms_norm_quant_fp8(s[0], weight, 1e-6, s[1]) for s in sets],
    }
    if with_vllm:
        vllm = torch.ops._C
        q = torch.empty(m, k, device="cuda", dtype=torch.float8_e4m3fn)
        scale = torch.empty(m, 1, device="cuda")
        normed = torch.empty(m, k, device="cuda", dtype=torch.bfloat16)

        def quant(x: torch.Tensor) -> None:
            vllm.dynamic_per_token_scaled_fp8_quant(q, x, scale, None)

        def norm_quant(x: torch.Tensor) -> None:
            vllm.rms_norm(normed, x, weight, 1e-6)
            quant(normed)

        def add_norm_quant(x: torch.Tensor, residual: torch.Tensor) -> None:
            vllm.fused_add_rms_norm(x, residual, weight, 1e-6)
            quant(x)

        calls["vllm_quant"] = [lambda s=s: quant(s[0]) for s in sets]
        calls["vllm_norm_quant"] = [lambda s=s: norm_quant(s[0]) for s in sets]
        calls["vllm_add_norm_quant"] = [lambda s=s: add_norm_quant(*s) for s in sets]
    return calls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vllm-ops", type=Path, help="folder that holds vLLM's _C_stable_libtorch.abi3.so")
    args = parser.parse_args()
    if args.vllm_ops:
        torch.ops.load_library(str(next(args.vllm_ops.glob("**/_C_stable_libtorch.abi3.so"))))
    bandwidth = harness.copy_bandwidth()
    print(f"copy bandwidth {bandwidth / 1e9:.0f} GB/s")
    rows = []
    for k in COLUMNS:
        for m in MS:
            times = harness.time_variants(variants(m, k, args.vllm_ops is not None))
            plain, with_residual = (m * k * bytes_each / bandwidth * 1e6 for bytes_each in (3, 7))
            limits = {"quant": plain, "norm_quant": plain, "add_norm_quant": with_residual}
            rows.append(
                {
                    "m": m,
                    "k": k,
                    "us": {name: round(t, 2) for name, t in times.items()},
                    "limit_us": {name: round(t, 2) for name, t in limits.items()},
                }
            )
            shown = "  ".join(f"{name} {t:.1f}" for name, t in times.items())
            print(f"K={k:6} m={m:5} {shown}  limits {plain:.1f} {with_residual:.1f}", flush=True)
            torch.cuda.empty_cache()
    arch = hardware.detect(torch.device("cuda")).arch
    result = {"unit": "microseconds a call", "copy_gb_s": round(bandwidth / 1e9), "rows": rows}
    print("written to", harness.write(f"row_quant_{arch}", result))


if __name__ == "__main__":
    main()

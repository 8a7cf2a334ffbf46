# SPDX-License-Identifier: Apache-2.0
"""The NVFP4 GEMM against its peers, on layers of Llama-3-70B, Qwen3-30B-A3B and DeepSeek-V3; with --untuned, of models
for which nothing was tuned.

    python benchmarks/nvfp4_gemm.py [--untuned] [--vllm-ops FOLDER] [--humming FOLDER] [--layers PATTERN ...]
                                    [--ms M ...]

Peers: cuBLAS bf16 on the decoded weight, Marlin from vLLM's operator library (vLLM 0.26 for torch 2.11), and Humming
(`pip install --no-deps --target FOLDER humming-kernels`; it compiles with the CUDA toolkit's NVRTC). All multiply the
same weights. Every result is compared with the product of the decoded weight in fp32 before it is timed;
one that is wrong, or an operator that raises, stands in the table as failed and stops nothing. `limit` is the larger
of the least memory traffic at the bandwidth of a large copy and of the operations at the rate of a large bf16 product,
both measured in the same run. Figures are written after every layer.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks import _harness as harness
from benchmarks._nvfp4_peers import Humming, Marlin, Product, reading_bytes
from llm_quant_rocm import ops, timing
from llm_quant_rocm.formats import nvfp4
from llm_quant_rocm.ops.nvfp4_gemm import DECODE_ROWS
from llm_quant_rocm.tune.shapes import WELL_KNOWN

MS = (1, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
OTHER_MS = (1, 8, 16, 32, 64, 128, 256, 1024, 4096)
OTHER_LAYERS = {layer: shape for layer, shape in WELL_KNOWN.items() if not layer.startswith("llama")}
# The largest relative errors that count as right: bf16 rounds results, and cuBLAS's weights; FP8 rounds both operands.
EXACT_ERROR, FP8_ERROR = 0.006, 0.06
FP8 = "nvfp4_gemm_fp8"

Prepare = Callable[[nvfp4.NvFp4Weight], Product]


def bf16(weight: nvfp4.NvFp4Weight) -> Product:
    dense = weight.dequantize(torch.bfloat16)
    return lambda x: torch.nn.functional.linear(x, dense)


def exact(weight: nvfp4.NvFp4Weight) -> Product:
    prepared = ops.prepare_nvfp4_weight(weight)
    return lambda x: ops.nvfp4_gemm(x, prepared)


def fp8(weight: nvfp4.NvFp4Weight) -> Product:
    prepared = ops.prepare_nvfp4_weight(weight)
    return lambda x: ops.nvfp4_gemm(x, prepared, prefill="fp8")


class Layer:
    """One layer's weights, rotated, arranged for everyone who multiplies them."""

    def __init__(self, n: int, k: int, everyone: dict[str, Prepare]) -> None:
        self.k = k
        weights = []
        for _ in range(timing.copies(reading_bytes(n, k, 0))):
            weights.append(nvfp4.quantize(torch.randn(n, k, device="cuda", dtype=torch.bfloat16)))
        self.decoded = weights[0].dequantize()
        self.products: dict[str, list[Product]] = {}
        self.failed: dict[str, str] = {}
        for name, prepare in everyone.items():
            try:
                self.products[name] = [prepare(weight) for weight in weights]
            except Exception as error:
                self.failed[name] = timing.in_a_cell(error)

    def measure(self, m: int) -> dict[str, Any]:
        x = torch.randn(m, self.k, device="cuda", dtype=torch.bfloat16)
        variants = {
            name: [lambda p=p: p(x) for p in products]
            for name, products in self.products.items()
            if name != FP8 or m > DECODE_ROWS
        }
        tolerance = {name: FP8_ERROR if name == FP8 else EXACT_ERROR for name in variants}
        row = timing.measure(variants, x.float() @ self.decoded.t(), tolerance)
        return row | {"failed": self.failed | row.get("failed", {})} if self.failed else row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--untuned", action="store_true", help="layers of models for which nothing was tuned")
    parser.add_argument("--vllm-ops", type=Path, help="folder that holds vLLM's _C_stable_libtorch.abi3.so")
    parser.add_argument("--humming", type=Path, help="folder that holds the unpacked wheel of humming-kernels")
    parser.add_argument("--layers", nargs="+", default=["*"], help="patterns of the layers' names")
    parser.add_argument("--ms", nargs="+", type=int, help="rows of x; left out, those of each layer")
    args = parser.parse_args()
    layers = harness.UNTUNED if args.untuned else harness.LAYERS | OTHER_LAYERS
    chosen = {name: layers[name] for name in layers if any(fnmatchcase(name, pattern) for pattern in args.layers)}
    if not chosen:
        parser.error(f"--layers matches none of {', '.join(layers)}")
    everyone: dict[str, Prepare] = {"bf16": bf16}
    absent: dict[str, str] = {}
    makers: tuple[tuple[str, Path | None, Callable[[Path], Any]], ...] = (
        ("marlin", args.vllm_ops, Marlin),
        ("humming", args.humming, lambda folder: Humming(folder, args.ms or MS)),
    )
    for name, folder, make in makers:
        try:
            if folder:
                everyone[name] = make(folder).prepare
        except Exception as error:
            absent[name] = timing.in_a_cell(error)
    everyone |= {"nvfp4_gemm": exact, FP8: fp8}
    bandwidth, rate = timing.copy_bandwidth(), timing.bf16_rate()
    print(f"copy {bandwidth / 1e9:.0f} GB/s, bf16 {rate / 1e12:.0f} TFLOP/s", absent or "", flush=True)
    rows: list[dict[str, Any]] = []
    result = {
        "unit": "microseconds a call", "copy_gb_s": round(bandwidth / 1e9), "bf16_tflop_s": round(rate / 1e12),
        "absent": absent, "rows": rows,
    }  # fmt: skip
    name = f"nvfp4_gemm{'_untuned' * args.untuned}_{harness.gpu()}"
    for title, (n, k) in chosen.items():
        layer = Layer(n, k, everyone)
        for m in args.ms or (harness.UNTUNED_MS if args.untuned else MS if title in harness.LAYERS else OTHER_MS):
            limit = max(reading_bytes(n, k, m) / bandwidth, 2 * m * n * k / rate) * 1e6
            row = {"layer": title, "n": n, "k": k, "m": m, "limit_us": round(limit, 2), **layer.measure(m)}
            rows.append(row)
            shown = harness.show(row, "bf16")
            print(f"{title:24} m={m:5}  {shown}  limit {limit:.1f}", flush=True)
        del layer
        torch.cuda.empty_cache()
        path = harness.write(name, result)
    summarize(rows)
    print("written to", path)


def summarize(rows: Sequence[dict[str, Any]]) -> None:
    """Means over Llama's layers by M, and every failure."""
    llama = [row for row in rows if row["layer"] in harness.LAYERS]
    for m in dict.fromkeys(row["m"] for row in llama):
        here = [row for row in llama if row["m"] == m]
        ratios = harness.mean_ratios(here, "bf16").items() if all("bf16" in row["us"] for row in here) else ()
        print(f"mean over {len(here)} Llama layers, m={m:5}  " + "  ".join(f"{name} {r:.2f}" for name, r in ratios))
    for reason in dict.fromkeys(f"{who}: {why}" for row in rows for who, why in row.get("failed", {}).items()):
        print("FAILED", reason)


if __name__ == "__main__":
    main()

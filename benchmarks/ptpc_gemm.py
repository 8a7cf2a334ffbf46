# SPDX-License-Identifier: Apache-2.0
"""The PTPC GEMM and the whole PTPC linear layer against their peers, on Llama-3-70B's layers; with --untuned, on layers
of models for which nothing was tuned.

    python benchmarks/ptpc_gemm.py [--untuned] [--vllm-ops FOLDER]

Peers: cuBLAS bf16, torch._scaled_mm with one scale a tensor and with one a row, the latter also right behind our
quantization of x (a whole layer, as `ptpc_linear` is), the naive two steps (an unscaled product, then both scales over
its fp32 result), and vLLM's CUTLASS kernel where its operator library is given.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks import _harness as harness
from llm_quant_rocm import ops, timing
from llm_quant_rocm.ops.ptpc_gemm import BACKENDS

MS = (1, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)


def load_vllm(folder: Path | None) -> Callable[..., object] | None:
    """vLLM's CUTLASS product from its operator library, or None."""
    if folder is None:
        return None
    torch.ops.load_library(harness.vllm_library(folder))
    return torch.ops._C.cutlass_scaled_mm


def variants(n: int, k: int, m: int, cutlass: Callable[..., object] | None) -> dict[str, list[Callable[[], object]]]:
    """The calls to time, over rotating weights."""
    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    weights = []
    for _ in range(timing.copies(n * k)):
        weight = torch.randn(n, k, device="cuda", dtype=torch.bfloat16)
        weights.append((weight, *ops.per_token_quant_fp8(weight)))
    xq, xscale = ops.per_token_quant_fp8(x)
    one = torch.ones((), device="cuda")
    triton = next(backend for backend in BACKENDS if backend.name == "triton").run
    out = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)

    def naive(wq: torch.Tensor, wscale: torch.Tensor) -> torch.Tensor:
        product = torch._scaled_mm(xq, wq.t(), one, one, out_dtype=torch.float32, use_fast_accum=True)
        return (product * xscale * wscale.t()).to(torch.bfloat16)

    def fast(codes: torch.Tensor, wq: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch._scaled_mm(codes, wq.t(), a, b, out_dtype=torch.bfloat16, use_fast_accum=True)

    def layer(wq: torch.Tensor, wscale: torch.Tensor) -> torch.Tensor:
        codes, scale = ops.per_token_quant_fp8(x)
        return fast(codes, wq, scale, wscale.t())

    calls: dict[str, list[Callable[[], object]]] = {
        "bf16": [lambda w=w: torch.nn.functional.linear(x, w[0]) for w in weights],
        "per_tensor": [lambda w=w: fast(xq, w[1], one, one) for w in weights],
        "torch_rowwise": [lambda w=w: fast(xq, w[1], xscale, w[2].t()) for w in weights],
        "naive": [lambda w=w: naive(w[1], w[2]) for w in weights],
        "triton": [lambda w=w: triton(xq, xscale, w[1], w[2], None, torch.bfloat16) for w in weights],
        "ptpc_gemm": [lambda w=w: ops.ptpc_gemm(xq, xscale, w[1], w[2]) for w in weights],
        "torch_linear": [lambda w=w: layer(w[1], w[2]) for w in weights],
        "ptpc_linear": [lambda w=w: ops.ptpc_linear(x, w[1], w[2]) for w in weights],
    }
    if cutlass:
        calls["vllm_cutlass"] = [lambda w=w: cutlass(out, xq, w[1].t(), xscale, w[2].t(), None) for w in weights]
    return calls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--untuned", action="store_true", help="layers of models for which nothing was tuned")
    parser.add_argument("--vllm-ops", type=Path, help="folder that holds vLLM's _C_stable_libtorch.abi3.so")
    args = parser.parse_args()
    cutlass = load_vllm(args.vllm_ops)
    rows = []
    name = f"ptpc_gemm{'_untuned' * args.untuned}_{harness.gpu()}"
    for layer, (n, k) in (harness.UNTUNED if args.untuned else harness.LAYERS).items():
        for m in harness.UNTUNED_MS if args.untuned else MS:
            # Long products run at the clock that their power allows, which moves: medians of many replays.
            times = timing.time_variants(variants(n, k, m, cutlass), repeats=41, budget_ms=150)
            rows.append(
                {"layer": layer, "n": n, "k": k, "m": m, "us": {name: round(t, 2) for name, t in times.items()}}
            )
            print(f"{layer:8} m={m:5} " + "  ".join(f"{name} {t:.1f}" for name, t in times.items()), flush=True)
            torch.cuda.empty_cache()
        path = harness.write(name, {"unit": "microseconds a call", "rows": rows})
    print("written to", path)


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""Per-token quantization, alone and behind RMSNorm or an activation, against its memory traffic and vLLM's kernels.

`limit` is the least traffic (every operand once) at the bandwidth of a large copy. Peers: a plain copy that moves as
many bytes as the first two operators, which says how much of that bandwidth so many bytes can have; and vLLM's CUDA
kernels where they are loaded: its quantization, and its (fused add) RMSNorm or its silu_and_mul followed by that.
Operands rotate, so that none is found in the L2 cache. Codes are written to the same memory by every call of a graph,
and may stay there, as for the next layer of a served model.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from llm_quant_rocm import ops, timing

COLUMNS = (4096, 5120, 7168, 8192, 28672)
MS = (1, 16, 64, 256, 1024, 4096)
# In a graph, whose launch takes as long as some percent of a call.
_LEAST_CALLS = 8


def measure(m: int, k: int, bandwidth: float, with_vllm: bool, device: str = "cuda") -> dict[str, Any]:
    """{"m": ..., "k": ..., "us": {...}, "limit_us": {...}} of x [m, k] in bf16; an activation is of [m, 2k].

    Args:
        bandwidth: bytes a second of a large copy.
        with_vllm: whether torch.ops._C holds vLLM's kernels.
    """
    times = timing.time_variants(variants(m, k, with_vllm, device))
    plain, with_residual, gated = (m * k * bytes_each / bandwidth * 1e6 for bytes_each in (3, 7, 5))
    limits = {"quant": plain, "norm_quant": plain, "add_norm_quant": with_residual, "act_quant": gated, "copy": plain}
    return {
        "m": m,
        "k": k,
        "us": {name: round(t, 2) for name, t in times.items()},
        "limit_us": {name: float(f"{t:.3g}") for name, t in limits.items()},
    }


def variants(m: int, k: int, with_vllm: bool, device: str = "cuda") -> dict[str, list[Callable[[], object]]]:
    """The calls to time, over rotating activations."""
    sets = [
        tuple(torch.randn(m, k, device=device, dtype=torch.bfloat16) for _ in range(2))
        for _ in range(min(64, max(_LEAST_CALLS, timing.copies(m * k * 4))))
    ]
    weight = torch.randn(k, device=device, dtype=torch.bfloat16)
    gates = [torch.randn(m, 2 * k, device=device, dtype=torch.bfloat16) for _ in sets]
    copied = [torch.zeros(2, m * k * 3 // 2, device=device, dtype=torch.uint8) for _ in sets]
    calls: dict[str, list[Callable[[], object]]] = {
        "quant": [partial(ops.per_token_quant_fp8, x) for x, _ in sets],
        "norm_quant": [partial(ops.rms_norm_quant_fp8, x, weight) for x, _ in sets],
        "add_norm_quant": [partial(ops.rms_norm_quant_fp8, x, weight, 1e-6, residual) for x, residual in sets],
        "act_quant": [partial(ops.act_and_mul_quant_fp8, gate) for gate in gates],
        "copy": [partial(target.copy_, source) for source, target in copied],
    }
    if with_vllm:
        vllm = torch.ops._C
        q = torch.empty(m, k, device=device, dtype=torch.float8_e4m3fn)
        scale = torch.empty(m, 1, device=device)
        normed = torch.empty(m, k, device=device, dtype=torch.bfloat16)

        def quant(x: torch.Tensor) -> None:
            vllm.dynamic_per_token_scaled_fp8_quant(q, x, scale, None)

        def norm_quant(x: torch.Tensor) -> None:
            vllm.rms_norm(normed, x, weight, 1e-6)
            quant(normed)

        def add_norm_quant(x: torch.Tensor, residual: torch.Tensor) -> None:
            vllm.fused_add_rms_norm(x, residual, weight, 1e-6)
            quant(x)

        def act_quant(gate: torch.Tensor) -> None:
            vllm.silu_and_mul(normed, gate)
            quant(normed)

        calls["vllm_quant"] = [partial(quant, x) for x, _ in sets]
        calls["vllm_norm_quant"] = [partial(norm_quant, x) for x, _ in sets]
        calls["vllm_add_norm_quant"] = [partial(add_norm_quant, *each) for each in sets]
        calls["vllm_act_quant"] = [partial(act_quant, gate) for gate in gates]
    return calls

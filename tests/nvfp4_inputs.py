# SPDX-License-Identifier: Apache-2.0
"""NVFP4 weights that break numeric code, and what they hold in float64."""

from typing import Any

import ml_dtypes
import numpy as np
import torch

from llm_quant_rocm import ops
from llm_quant_rocm.formats import nvfp4
from llm_quant_rocm.formats.nvfp4 import NvFp4Weight


def nasty_weight(n: int, k: int, *leading: int, seed: int = 0) -> NvFp4Weight:
    """Random codes, every block scale that is not NaN (subnormals and 0 too), and global scales of rows in three
    shards that differ by a thousand each. The first row is zero by its scales, the second by its codes, -0 among them.
    """
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (*leading, n, k // 2), dtype=torch.uint8, generator=generator)
    scales = torch.randint(0, 0x7F, (*leading, n, k // 16), dtype=torch.uint8, generator=generator)
    scales[..., :1, :] = 0
    codes[..., 1:2, :] = 0x80
    shard = torch.arange(n) * 3 // max(n, 1)
    global_scale = (0.7 + 0.3 * torch.rand(*leading, n, generator=generator)) * 1e-3 * 1e3**shard
    return NvFp4Weight(codes, scales.view(torch.float8_e4m3fn), global_scale.float())


def weight64(weight: NvFp4Weight) -> torch.Tensor:
    """The values [..., N, K] in float64, by ml_dtypes."""
    raw = weight.codes.cpu().numpy()
    codes = np.stack([raw & 15, raw >> 4], axis=-1).reshape(*raw.shape[:-1], weight.k)
    values = torch.from_numpy(codes.view(ml_dtypes.float4_e2m1fn).astype(np.float64))
    scales = weight.scales.cpu().view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    wide = torch.from_numpy(scales).repeat_interleave(16, dim=-1)
    return values * wide * weight.global_scale.cpu().double().unsqueeze(-1)


def experts(
    tokens: int, count: int, topk: int, hidden: int, inner: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0
) -> dict[str, Any]:
    """Arguments of ops.nvfp4_moe on the CPU, weights in rows. Every expert, and in it gate and up, has a global scale
    of its own, a hundred times another's. Expert 0 gets no token where others suffice.
    """
    generator = torch.Generator().manual_seed(seed)

    def weight(n: int, k: int, shards: int) -> NvFp4Weight:
        w = torch.randn(count, n, k, generator=generator) / k**0.5
        parts = [nvfp4.quantize(part) for part in w.chunk(shards, dim=1)]
        size = 10.0 ** (torch.rand(count, shards, generator=generator) - 0.5)
        joined = (torch.cat([getattr(part, name) for part in parts], dim=1) for name in ("codes", "scales"))
        global_scale = torch.stack([part.global_scale[:, 0] for part in parts], dim=1) * size
        return NvFp4Weight.from_modelopt(*joined, global_scale, shards=[n // shards] * shards)

    logits = torch.randn(tokens, count, generator=generator)
    if count > topk:
        logits[:, 0] = -torch.inf
    topk_weights, topk_ids = logits.softmax(-1).topk(topk)
    return {
        "x": torch.randn(tokens, hidden, generator=generator).to(dtype),
        "w13": ops.PreparedNvFp4Weight.in_rows(weight(2 * inner, hidden, 2)),
        "w2": ops.PreparedNvFp4Weight.in_rows(weight(hidden, inner, 1)),
        "topk_weights": topk_weights,
        "topk_ids": topk_ids.int(),
    }


def select_experts(weight: ops.PreparedNvFp4Weight, chosen: torch.Tensor) -> ops.PreparedNvFp4Weight:
    """The weight's experts where `chosen`, in layout "row"."""
    parts = (weight.codes[chosen], weight.scales[chosen], weight.global_scale[chosen])
    return ops.PreparedNvFp4Weight.in_rows(NvFp4Weight(*parts))


def moe64(arguments: dict[str, Any], activation: str = "silu") -> torch.Tensor:
    """The same experts in float64, rounded where the operator says it rounds and nowhere else."""
    x = arguments["x"].double()
    w13, w2 = (weight64(NvFp4Weight(w.codes, w.scales, w.global_scale)) for w in (arguments["w13"], arguments["w2"]))
    dtype = arguments["x"].dtype
    functions = {
        "silu": torch.nn.functional.silu,
        "gelu": torch.nn.functional.gelu,
        "gelu_tanh": lambda t: torch.nn.functional.gelu(t, approximate="tanh"),
    }
    out = torch.zeros_like(x)
    for token, (weights, ids) in enumerate(zip(arguments["topk_weights"], arguments["topk_ids"].tolist(), strict=True)):
        for weight, expert in zip(weights.double(), ids, strict=True):
            gate, up = (w13[expert] @ x[token]).to(dtype).double().chunk(2)
            out[token] += weight * (w2[expert] @ (functions[activation](gate) * up).to(dtype).double())
    return out

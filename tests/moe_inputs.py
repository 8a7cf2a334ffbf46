# SPDX-License-Identifier: Apache-2.0
"""Random experts, and what they compute in float64 over the same codes."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import ml_dtypes
import torch

from llm_quant_rocm.formats import fp8
from llm_quant_rocm.formats.routed import RoutedTokens
from tests.inputs import assert_same

EXPERTS = ("w13", "w13_scale", "w2", "w2_scale")
# Experts, top-k, hidden and inner size of models, or of a share of them; and ranges of their MANY tokens, of numbers
# that other kernels and tiles serve.
MODELS = ((128, 8, 2048, 768), (256, 8, 7168, 256), (8, 2, 4096, 1792), (16, 1, 5120, 2048))
MANY = 2048
RANGES = [
    (begin, begin + count)
    for count in (1, 2, 4, 8, 16, 33, 64, 100, 256, 700, 1024)
    for begin in range(5, min(MANY, 40 * count), count)
]


def experts(
    tokens: int, count: int, topk: int, hidden: int, inner: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0
) -> dict[str, Any]:
    """Arguments of ops.ptpc_moe on the CPU. Expert 0 gets no token where others suffice."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    w13, w13_scale = fp8.quantize_rows(normal(count, 2 * inner, hidden) / hidden**0.5, fp8.OCP)
    w2, w2_scale = fp8.quantize_rows(normal(count, hidden, inner) / inner**0.5, fp8.OCP)
    logits = normal(tokens, count)
    if count > topk:
        logits[:, 0] = -torch.inf
    topk_weights, topk_ids = logits.softmax(-1).topk(topk)
    x = normal(tokens, hidden).to(dtype)
    return {
        "x": x,
        "w13": w13,
        "w13_scale": w13_scale,
        "w2": w2,
        "w2_scale": w2_scale,
        "topk_weights": topk_weights,
        "topk_ids": topk_ids.int(),
    }


def for_kernels(arguments: dict[str, Any]) -> tuple[RoutedTokens, list[torch.Tensor]]:
    """Tokens and experts as the kernels take them."""
    given = dict(arguments)
    weights = [given.pop(name) for name in EXPERTS]
    renamed = {name.removeprefix("topk_"): tensor for name, tensor in given.items()}
    return RoutedTokens(**renamed), weights


def many_tokens(count: int, topk: int, hidden: int, device: str = "cuda") -> dict[str, torch.Tensor]:
    """x, topk_weights and topk_ids of MANY tokens, `topk` of `count` experts each."""
    return {
        "x": torch.randn(MANY, hidden, device=device, dtype=torch.bfloat16),
        "topk_weights": torch.rand(MANY, topk, device=device).softmax(-1),
        "topk_ids": torch.rand(MANY, count, device=device).topk(topk).indices.int(),
    }


def assert_tokens_have_their_own_bits(
    product: Callable[..., torch.Tensor], tokens: Mapping[str, torch.Tensor], ranges: Iterable[tuple[int, int]]
) -> None:
    """`product`, of x, topk_weights and topk_ids, gives those of each range the bits that they have among all."""
    whole = product(**tokens)
    for begin, end in ranges:
        assert_same(product(**{name: rows[begin:end] for name, rows in tokens.items()}), whole[begin:end])


def rounded(rows: torch.Tensor) -> torch.Tensor:
    """Rows in float64 after a per-token FP8 quantization, by ml_dtypes."""
    scale = rows.abs().amax(-1, keepdim=True).clamp_min(1.0 / 512) / 448
    codes = (rows / scale).numpy().astype(ml_dtypes.float8_e4m3fn)
    return torch.from_numpy(codes.astype("float64")) * scale


def moe64(arguments: dict[str, Any], activation: str = "silu") -> torch.Tensor:
    """The same experts in float64, rounded where the operator says it rounds and nowhere else."""
    dtype = arguments["x"].dtype
    x = rounded(arguments["x"].double())
    w13 = arguments["w13"].double() * arguments["w13_scale"].double()
    w2 = arguments["w2"].double() * arguments["w2_scale"].double()
    functions = {
        "silu": torch.nn.functional.silu,
        "gelu": torch.nn.functional.gelu,
        "gelu_tanh": lambda t: torch.nn.functional.gelu(t, approximate="tanh"),
    }
    out = torch.zeros_like(x)
    for token, (weights, ids) in enumerate(zip(arguments["topk_weights"], arguments["topk_ids"].tolist(), strict=True)):
        for weight, expert in zip(weights.double(), ids, strict=True):
            gate, up = (w13[expert] @ x[token]).to(dtype).double().chunk(2)
            inner = rounded((functions[activation](gate) * up).to(dtype).double())
            out[token] += weight * (w2[expert] @ inner)
    return out


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found.double() - expected).norm() / expected.norm()).item()

# SPDX-License-Identifier: Apache-2.0
"""aiter's preshuffled per-token FP8 GEMM, where aiter is installed and proves itself on the GPU at hand.

aiter changes its signatures between releases, and some releases have computed this product wrongly on some GPUs. So
nothing of it is taken on trust: the signature is checked at import, and a small product is compared with the
reference before the first weight is shuffled. Either failure passes aiter over, with a reason in the log.
"""

import inspect
from functools import cache
from types import ModuleType

import torch

from llm_quant_rocm import reference
from llm_quant_rocm.backends import missing
from llm_quant_rocm.formats import fp8

LAYOUT = "aiter_16x16"
_ARGUMENTS = ("XQ", "WQ", "x_scale", "w_scale", "bias", "dtype")
# What two correct bf16 products of 512 terms in fp32 may differ by, relative to the largest.
_TOLERANCE = 0.02


def _import() -> tuple[ModuleType, ModuleType]:
    import aiter
    from aiter.ops import shuffle

    return aiter, shuffle


def signature_refusal(function: object) -> str | None:
    """Why `function` is not the gemm_a8w8_bpreshuffle that this module calls."""
    if not callable(function):
        return "aiter has no gemm_a8w8_bpreshuffle"
    found = tuple(inspect.signature(function).parameters)[: len(_ARGUMENTS)]
    if found != _ARGUMENTS:
        return f"gemm_a8w8_bpreshuffle takes ({', '.join(found)}), not ({', '.join(_ARGUMENTS)})"
    return None


@cache
def refusal(device: torch.device) -> str | None:
    """Why aiter cannot serve on `device`. Runs one small product there the first time."""
    if not torch.version.hip:
        return "aiter needs ROCm"
    absent = missing("aiter")
    if absent:
        return absent
    try:
        aiter, shuffle = _import()
        reason = signature_refusal(getattr(aiter, "gemm_a8w8_bpreshuffle", None))
        if reason or not hasattr(shuffle, "shuffle_weight"):
            return reason or "aiter has no shuffle_weight"
        return _trial_refusal(device)
    except Exception as error:  # a broken optional library must not stop the engine
        return f"aiter failed: {error}"


def _trial_refusal(device: torch.device) -> str | None:
    generator = torch.Generator("cpu").manual_seed(0)

    def draw(rows: int) -> torch.Tensor:
        # An engine that builds a model has other defaults of device and type.
        return torch.randn(rows, 512, generator=generator, device="cpu", dtype=torch.float32).to(device)

    fmt = fp8.for_device(device)
    xq, xscale = fp8.quantize_rows(draw(32), fmt)
    wq, wscale = fp8.quantize_rows(draw(256), fmt)
    expected = reference.ptpc_gemm(xq, xscale, wq, wscale, None, torch.float32)
    with torch.cuda.device_of(xq):  # the kernel's launch goes to the current device
        found = gemm(xq, xscale, shuffle_weight(wq), wscale, None, torch.bfloat16).float()
    worst = ((found - expected).abs().max() / expected.abs().max()).item()
    return None if worst <= _TOLERANCE else f"its product is wrong here (largest relative error {worst:.3g})"


def refusal_of_dtype(out_dtype: torch.dtype) -> str | None:
    """Why aiter's kernel does not give `out_dtype`, or None where it does."""
    return None if out_dtype in (torch.bfloat16, torch.float16) else f"it has no {out_dtype} output"


def shuffle_weight(wq: torch.Tensor) -> torch.Tensor:
    """wq [N, K] in the layout of aiter's kernel, same shape."""
    return _import()[1].shuffle_weight(wq, layout=(16, 16))


def gemm(
    xq: torch.Tensor,
    xscale: torch.Tensor,
    wq: torch.Tensor,
    wscale: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """Product [M, N] in bf16 or fp16; the kernel takes no bias, so it is added after."""
    out = _import()[0].gemm_a8w8_bpreshuffle(xq.contiguous(), wq, xscale, wscale, None, out_dtype)
    return out if bias is None else out.add_(bias)

# SPDX-License-Identifier: Apache-2.0
"""aiter's preshuffled per-token FP8 GEMM, where aiter is installed and proves itself on the GPU at hand.

aiter changes its signatures between releases, and some releases have computed this product wrongly on some GPUs. So
nothing of it is taken on trust: a small product is compared with the reference before the first weight is shuffled, of
arguments by name, as its functions are wrapped and show no signature. A failure passes aiter over, with a reason in the
log.
"""

from functools import cache
from types import ModuleType

import torch

from llm_quant_rocm import reference
from llm_quant_rocm.backends import missing
from llm_quant_rocm.formats import fp8

LAYOUT = "aiter_16x16"
# Numbers of rows, one of each kind that aiter tells apart in what it was tuned for.
_ROWS = tuple(2**exponent for exponent in range(15))
# What two correct bf16 products of 512 terms in fp32 may differ by, relative to the largest.
_TOLERANCE = 0.02


def _import() -> tuple[ModuleType, ModuleType]:
    import aiter
    from aiter.ops import shuffle

    return aiter, shuffle


@cache
def refusal(device: torch.device) -> str | None:
    """Why aiter cannot serve on `device`. Runs one small product there the first time."""
    if not torch.version.hip:
        return "aiter needs ROCm"
    absent = missing("aiter")
    if absent:
        return absent
    try:
        for module, name in zip(_import(), ("gemm_a8w8_bpreshuffle", "shuffle_weight"), strict=True):
            if not hasattr(module, name):
                return f"aiter has no {name}"
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


@cache
def refusal_of_shape(n: int, k: int, dtype: torch.dtype) -> str | None:
    """Why aiter, where it is usable, does not serve a weight [n, k] of `dtype` with any number of rows, or None.

    Its kernels take whole tiles of a shuffled weight, and which of them serves changes with the number of rows: where
    one decodes, another may fail in the first long prefill (aiter#5206). Of K from 1536 on tiles have at most 64 rows,
    unless there are whole ones of 128; of smaller K 128, and below 512 more. Where aiter was not tuned, torch is faster
    by what vLLM found.
    """
    if k < 512 or k % 128 or n % (64 if k >= 1536 else 128):
        return f"it has no kernels for a weight of {n} x {k}"
    try:
        from aiter.ops import gemm_op_a8w8 as gemms

        file = gemms.AITER_CONFIGS.AITER_CONFIG_GEMM_A8W8_BPRESHUFFLE_FILE
        tuned = any(gemms.get_GEMM_config_with_quant_type(m, n, k, dtype, file) for m in _ROWS)
    except Exception as error:  # another release's
        return f"it does not say what it was tuned for: {error}"
    return None if tuned else f"it was not tuned for a weight of {n} x {k}"


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
    out = _import()[0].gemm_a8w8_bpreshuffle(
        XQ=xq.contiguous(), WQ=wq, x_scale=xscale, w_scale=wscale, bias=None, dtype=out_dtype
    )
    return out if bias is None else out.add_(bias)

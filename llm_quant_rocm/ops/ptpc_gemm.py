# SPDX-License-Identifier: Apache-2.0
"""Matrix product of per-token FP8 activations and per-channel FP8 weights, and the linear layer made of it."""

from functools import cache, lru_cache
from types import ModuleType
from typing import Any, NamedTuple

import torch

from llm_quant_rocm import hardware, reference, tuning
from llm_quant_rocm.backends import Backend, Choice, choose, forced, missing
from llm_quant_rocm.formats import fp8
from llm_quant_rocm.ops import _aiter
from llm_quant_rocm.ops._hipblaslt import lacks_kernel
from llm_quant_rocm.ops._register import register
from llm_quant_rocm.ops._row_call import HALF_OR_SINGLE, rows_as, rows_of
from llm_quant_rocm.ops.per_token_quant import per_token_quant_fp8

NAME = "ptpc_gemm"
ROW = "row"
LAYOUTS = (ROW, _aiter.LAYOUT)
# By (device, N, K), what torch said of products that it had no kernel for.
_torch_failed: dict[tuple[torch.device, int, int], str] = {}


class GemmCall(NamedTuple):
    """A call's facts that decide its backend.

    Attributes:
        aligned: whether all operands begin at multiples of 16 bytes, and so does each row of the weight.
        batch_invariant: whether a row's bits may not depend on the rows beside it.
    """

    device: torch.device
    m: int
    n: int
    k: int
    out_dtype: torch.dtype
    bias_dtype: torch.dtype | None
    layout: str
    aligned: bool = True
    batch_invariant: bool = False

    @property
    def hardware(self) -> hardware.Hardware:
        return hardware.detect(self.device)


# The vendors choose their kernels by the number of rows.
_NOT_INVARIANT = "it may add up a row differently when other rows are beside it"


def _aiter_refusal(call: GemmCall) -> str | None:
    if call.batch_invariant:
        return _NOT_INVARIANT
    unusable = _aiter.refusal(call.device)
    if unusable:
        return unusable
    if call.layout != _aiter.LAYOUT:
        unserved = _aiter.refusal_of_shape(call.n, call.k, call.hardware.fp8_dtype)
        return unserved or "the weight was not shuffled for it (ops.prepare_ptpc_weight)"
    return _aiter.refusal_of_dtype(call.out_dtype)


def _not_rows(call: GemmCall) -> str | None:
    if call.layout == ROW:
        return None
    return f"the weight was shuffled for aiter ({call.layout}); tell ops.prepare_ptpc_weight the out_dtype"


def _torch_refusal(call: GemmCall) -> str | None:
    if call.batch_invariant:
        return _NOT_INVARIANT
    if not call.hardware.gpu:
        return "torch._scaled_mm with a scale a row needs a GPU"
    if not call.hardware.fp8_units:
        return f"{call.hardware.arch} has no FP8 units"
    if call.out_dtype != torch.bfloat16:
        return "torch._scaled_mm with a scale a row has bf16 output only"
    if call.bias_dtype is not None and call.hardware.arch.startswith("sm_"):
        # Of K >= 7168 and few tiles, torch 2.11 on an H100: CUBLAS_STATUS_NOT_SUPPORTED.
        return "torch._scaled_mm fails with a bias where cuBLAS would split K"
    if call.bias_dtype not in (None, torch.bfloat16):
        return "torch._scaled_mm takes a bf16 bias only"
    if call.n % 16 or call.k % 16:
        return "torch._scaled_mm needs N and K to be multiples of 16"
    if not call.aligned:
        return "torch._scaled_mm needs operands whose rows begin at multiples of 16 bytes"
    return _torch_failed.get((call.device, call.n, call.k)) or _not_rows(call)


def _triton_refusal(call: GemmCall) -> str | None:
    if not call.hardware.gpu:
        return "Triton kernels run on a GPU"
    if not call.hardware.fp8_units and call.hardware.fp8_dtype != torch.float8_e4m3fn:
        return f"{call.hardware.arch} has no FP8 units, and only OCP codes are decoded"
    return missing("triton") or _not_rows(call)


def _run_torch(
    xq: torch.Tensor,
    xscale: torch.Tensor,
    wq: torch.Tensor,
    wscale: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    return torch._scaled_mm(
        xq.contiguous(), wq.t(), xscale, wscale.t(), bias=bias, out_dtype=out_dtype, use_fast_accum=True
    )


def _run_triton(
    xq: torch.Tensor,
    xscale: torch.Tensor,
    wq: torch.Tensor,
    wscale: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    batch_invariant: bool = False,
) -> torch.Tensor:
    device = hardware.detect(xq.device)
    kernels, config = kernels_of(device.arch), _config(device, xq.shape[0], *wq.shape, batch_invariant)
    return kernels.ptpc_gemm(xq, xscale, wq, wscale, bias, out_dtype, device, config)


@cache
def kernels_of(arch: str) -> ModuleType:
    """The PTPC GEMM's kernels of an architecture; importing them imports Triton."""
    if arch == "sm_90":
        from llm_quant_rocm.kernels import ptpc_hopper

        return ptpc_hopper
    from llm_quant_rocm.kernels import ptpc_gemm

    return ptpc_gemm


@lru_cache(tuning.KEPT)
def _config(device: hardware.Hardware, m: int, n: int, k: int, batch_invariant: bool = False) -> Any:
    kernels, measured = kernels_of(device.arch), tuning.lookup_product(NAME, device.arch, m, n, k)
    if measured is None:
        config = kernels.default_config(device, m, n, k)
    else:
        config = tuning.configured(NAME, device.arch, measured, kernels.config_of)
    return kernels.batch_invariant(config, device, n, k) if batch_invariant else config


BACKENDS = (
    Backend("aiter", _aiter_refusal, _aiter.gemm),
    Backend("torch", _torch_refusal, _run_torch),
    Backend("triton", _triton_refusal, _run_triton),
    Backend("reference", _not_rows, reference.ptpc_gemm),
)


def _usual(call: GemmCall) -> str | None:
    """Who serves a shape that nobody has measured, if not the first who can. On Hopper our kernel is ahead of cuBLAS's
    where reading the weight takes the time, where there are few tiles, and, of up to 2048 rows, where the last tile of
    these is not full: cuBLAS's reaches beyond x (`hopper.row_descriptor`). Of more than 1800 tiles the last row's are
    too few for that: an H200 took 4% less by cuBLAS in the mean of 38 such products (by hand)."""
    if call.hardware.arch != "sm_90":
        return None
    from llm_quant_rocm.kernels.sizes import cdiv

    tiles = cdiv(call.m, 128) * cdiv(call.n, 128)
    not_full = call.m <= 2048 and tiles <= 1800 and -call.m % 128 >= 32
    return "triton" if call.m <= 64 or tiles <= 330 or not_full else None


@lru_cache(tuning.KEPT)
def _choose(call: GemmCall) -> Choice:
    measured = tuning.lookup_product(NAME, call.hardware.arch, call.m, call.n, call.k)
    return choose(NAME, BACKENDS, call, measured.backend if measured else _usual(call))


def _product(call: GemmCall, *operands: Any) -> torch.Tensor:
    """By the backend that is chosen for `call`, or, where hipBLASLt has no kernel for the weight, by the next one. One
    number of rows that it lacks decides for the weight."""
    backend = _choose(call).backend
    # Who does not know it refuses it.
    options = {"batch_invariant": True} if call.batch_invariant else {}
    try:
        return backend.run(*operands, **options)
    except RuntimeError as error:
        if backend.name != "torch" or forced(NAME) or not lacks_kernel(error):
            raise
        shape = f"{call.m} x {call.n} x {call.k}"
        _torch_failed[call.device, call.n, call.k] = f"torch._scaled_mm fails with {shape} here: {error}"
    _choose.cache_clear()
    return _product(call, *operands)


def _validate(
    xq: torch.Tensor,
    xscale: torch.Tensor,
    wq: torch.Tensor,
    wscale: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    layout: str,
    batch_invariant: bool,
) -> None:
    for label, codes in (("xq", xq), ("wq", wq)):
        flavour = hardware.detect(codes.device).fp8_dtype
        if codes.dtype == flavour:
            continue
        if codes.dtype not in (fp8.OCP.dtype, fp8.FNUZ.dtype):
            raise TypeError(f"{NAME}: {label} is {codes.dtype}, not E4M3; quantize it with ops.per_token_quant_fp8")
        cure = "convert it with formats.fp8.ocp_to_fnuz" if flavour == fp8.FNUZ.dtype else "quantize it for this device"
        raise TypeError(f"{NAME}: {label} is {codes.dtype}, but {codes.device} computes in {flavour}; {cure}")
    x_shape, w_shape, device = xq.shape, wq.shape, xq.device
    if not x_shape or len(w_shape) != 2 or x_shape[-1] != w_shape[1]:
        raise ValueError(
            f"{NAME}: xq {tuple(x_shape)} and wq {tuple(w_shape)} do not fit: [..., K] and [N, K] are needed"
        )
    if xscale.dtype != torch.float32 or wscale.dtype != torch.float32:
        raise TypeError(f"{NAME}: scales are fp32, not {xscale.dtype} and {wscale.dtype}")
    if xscale.shape != (*x_shape[:-1], 1) or wscale.shape != (w_shape[0], 1):
        raise ValueError(
            f"{NAME}: xscale {tuple(xscale.shape)} and wscale {tuple(wscale.shape)} must be "
            f"{(*x_shape[:-1], 1)} and {(w_shape[0], 1)}"
        )
    if bias is not None and (bias.shape != w_shape[:1] or bias.dtype not in HALF_OR_SINGLE):
        raise ValueError(
            f"{NAME}: bias must be bf16, fp16 or fp32 of shape {tuple(w_shape[:1])}, "
            f"not {bias.dtype} of shape {tuple(bias.shape)}"
        )
    if out_dtype not in HALF_OR_SINGLE:
        raise TypeError(f"{NAME}: out_dtype is {out_dtype}, not bf16, fp16 or fp32")
    for label, tensor in (("xscale", xscale), ("wq", wq), ("wscale", wscale), ("bias", bias)):
        if tensor is not None and tensor.device != device:
            raise ValueError(f"{NAME}: {label} is on {tensor.device}, xq on {device}; move them to one device")
    if layout not in LAYOUTS:
        raise ValueError(f"{NAME}: layout {layout!r} is not one of {', '.join(LAYOUTS)}")
    if layout == ROW and wq.stride(1) != 1 and wq.numel() > 0 and w_shape[1] > 1:
        raise ValueError(f"{NAME}: wq must have contiguous rows; it has strides {wq.stride()}")


def _aligned(*tensors: torch.Tensor) -> bool:
    return not any(tensor.data_ptr() % 16 for tensor in tensors)


def _implementation(
    xq: torch.Tensor,
    xscale: torch.Tensor,
    wq: torch.Tensor,
    wscale: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    layout: str,
    batch_invariant: bool,
) -> torch.Tensor:
    rows, (n, k) = rows_of(xq), wq.shape
    m = rows.shape[0]
    if not (m and n and k):
        out = xq.new_zeros((*xq.shape[:-1], n), dtype=out_dtype)
        return out if bias is None else out + bias.to(out_dtype)
    xscale, wscale = rows_of(xscale).contiguous(), wscale.contiguous()
    bias = None if bias is None else bias.contiguous()
    aligned = not wq.stride(0) % 16 and _aligned(rows, xscale, wq, wscale) and (bias is None or _aligned(bias))
    bias_dtype = None if bias is None else bias.dtype
    call = GemmCall(xq.device, m, n, k, out_dtype, bias_dtype, layout, aligned, batch_invariant)
    return rows_as(xq, _product(call, rows, xscale, wq, wscale, bias, out_dtype))


_operator = register(
    "ptpc_gemm(Tensor xq, Tensor xscale, Tensor wq, Tensor wscale, Tensor? bias, ScalarType out_dtype, str layout, "
    "bool batch_invariant) -> Tensor",
    _validate,
    _implementation,
    lambda xq, xscale, wq, wscale, bias, out_dtype, *rest: xq.new_empty((*xq.shape[:-1], wq.shape[0]), dtype=out_dtype),
)


def prepare_ptpc_weight(
    wq: torch.Tensor, out_dtype: torch.dtype = torch.bfloat16, *, batch_invariant: bool = False
) -> tuple[torch.Tensor, str]:
    """wq [N, K] in the layout that the best GEMM of its device reads, and the layout's name for `ptpc_gemm`.

    Call it once a weight, at load. The layout is "row" (wq itself) everywhere but on ROCm with a working aiter,
    and where another backend is forced. `out_dtype` is that of the products: with fp32, which aiter does not have, rows
    stay, and they serve every other too; what was prepared for bf16 or fp16 serves those two. `batch_invariant`
    products need rows, too.

    Raises:
        ValueError: wq has another number of dimensions; experts' weights need no preparation.
    """
    if wq.dim() != 2:
        raise ValueError(f"{NAME}: a weight is [N, K]; got {tuple(wq.shape)}")
    unusable = (
        _aiter.refusal_of_dtype(out_dtype)
        or _aiter.refusal(wq.device)
        or _aiter.refusal_of_shape(*wq.shape, dtype=wq.dtype)
    )
    if batch_invariant or forced(NAME) not in (None, "aiter") or unusable:
        return wq, ROW
    return _aiter.shuffle_weight(wq), _aiter.LAYOUT


def ptpc_gemm(
    xq: torch.Tensor,
    xscale: torch.Tensor,
    wq: torch.Tensor,
    wscale: torch.Tensor,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    layout: str = ROW,
    *,
    batch_invariant: bool = False,
) -> torch.Tensor:
    """(xq . wq^T) * xscale * wscale^T + bias, accumulated in fp32: [..., N] in `out_dtype` (bf16, fp16 or fp32).

    xq [..., K] and wq [N, K] are E4M3 codes of the device's flavour, xscale [..., 1] and wscale [N, 1] fp32, bias [N].
    Any number of rows, none included, and any N and K. `layout` is what `prepare_ptpc_weight`, told of `out_dtype`,
    returned with wq. With `batch_invariant` a row's bits do not depend on the rows beside it.
    On Hopper the matrix units add FP8 products with fewer bits than fp32 ("fast accumulation"), in every backend.

    Raises:
        TypeError: the dtype of codes, scales or result, or an FP8 flavour that the device does not compute in.
        ValueError: shapes, strides or devices do not fit, a bias of another dtype, or an unknown layout.
    """
    return _operator(xq, xscale, wq, wscale, bias, out_dtype, layout, batch_invariant)


def ptpc_linear(
    x: torch.Tensor,
    wq: torch.Tensor,
    wscale: torch.Tensor,
    bias: torch.Tensor | None = None,
    layout: str = ROW,
    *,
    batch_invariant: bool = False,
) -> torch.Tensor:
    """x . (wq * wscale)^T + bias [..., N], in x's dtype, with x [..., K] quantized per token on the way.

    Arguments and errors are those of `per_token_quant_fp8` and `ptpc_gemm`.
    """
    xq, xscale = per_token_quant_fp8(x)
    return ptpc_gemm(xq, xscale, wq, wscale, bias, x.dtype, layout, batch_invariant=batch_invariant)

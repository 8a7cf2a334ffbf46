# SPDX-License-Identifier: Apache-2.0
"""An NVFP4 weight as the kernels of its device read it: arranged once, at load."""

from dataclasses import dataclass
from types import ModuleType
from typing import Self

import torch

from llm_quant_rocm import backends, hardware
from llm_quant_rocm.formats import nvfp4, nvfp4_mfma, nvfp4_wgmma
from llm_quant_rocm.formats.nvfp4_packing import Parts

ROW = "row"
# A fused layer has a global scale for each of its shards: three in q, k, v.
MAX_RUNS = 8


def _row_parts(n: int, k: int) -> Parts:
    return (torch.uint8, (n, k // 2)), (torch.float8_e4m3fn, (n, k // nvfp4.BLOCK))


# How the kernels of an architecture want weights arranged. Others have none, and the reference reads rows.
PACKINGS: dict[str, ModuleType] = {
    "sm_90": nvfp4_wgmma,
    "gfx90a": nvfp4_mfma,
    "gfx942": nvfp4_mfma,
    "gfx950": nvfp4_mfma,
}
# Those that the vendor may multiply too, after they have been expanded: where `kernels` have `gemm_expanded`.
EXPANDED = (nvfp4_mfma,)
# layout: (dtype, shape) of the codes and of the scales of a weight [N, K], leading dimensions left out.
LAYOUTS = {ROW: _row_parts} | {name: packing.parts for packing in PACKINGS.values() for name in packing.LAYOUTS}


@dataclass(frozen=True, eq=False)
class PreparedNvFp4Weight:
    """A weight [..., N, K] in a layout of the kernels. Leading dimensions are experts.

    Attributes:
        codes: the E2M1 codes. In layout "row", uint8 [..., N, K/2].
        scales: the block scales. In layout "row", float8_e4m3fn [..., N, K/16].
        global_scale: fp32 [..., N], a multiplier for every row, in the layout's order of rows.
        layout: how codes and scales are arranged.
        n, k: the weight's rows and columns.
        runs: fp64 [MAX_RUNS, 2] on the CPU, for products to which the host gives a global scale: numbers of
            neighbouring rows under one global scale, and that scale; zeros after the last, and nothing but zeros where
            MAX_RUNS are too few. None where the kernels do without. It is a tensor because engines overwrite the
            tensors of a layer when they load weights anew, and because numbers would make another graph of every
            layer that torch.compile sees.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    global_scale: torch.Tensor
    layout: str
    n: int
    k: int
    runs: torch.Tensor | None = None

    @classmethod
    def in_rows(cls, weight: nvfp4.NvFp4Weight) -> Self:
        """The weight as it stands in a checkpoint: no copy of contiguous tensors."""
        return cls(
            weight.codes.contiguous(),
            weight.scales.contiguous(),
            weight.global_scale.contiguous(),
            ROW,
            weight.n,
            weight.k,
        )


def prepare_nvfp4_weight(weight: nvfp4.NvFp4Weight, *, gate_up: bool = False) -> PreparedNvFp4Weight:
    """`weight` in the layout that the kernels of its device read best. Call it once a weight, at load.

    The layout is "row" (the same tensors) where no kernel wants another. `gate_up` tells that the weight is the w13 of
    `nvfp4_moe`, whose kernels may want rows of gate and up side by side.
    """
    operator = "nvfp4_gemm" if weight.codes.dim() == 2 else "nvfp4_moe"
    arch = hardware.detect(weight.codes.device).arch
    packing = PACKINGS.get(arch)
    if packing is None or backends.missing("triton") or backends.forced(operator) == "reference":
        return PreparedNvFp4Weight.in_rows(weight)
    codes, scales, global_scale = weight.codes, weight.scales, weight.global_scale
    if gate_up:
        order = packing.gate_up_order(weight.n, codes.device)
        codes, global_scale = codes[..., order, :], global_scale[..., order]
        scales = scales.view(torch.uint8)[..., order, :].view(scales.dtype)
    layout = packing.layout(arch, gate_up)
    words, scale_bytes = packing.pack(codes, scales, layout)
    runs = _runs(global_scale) if packing in EXPANDED and global_scale.dim() == 1 else None
    return PreparedNvFp4Weight(words, scale_bytes, global_scale.contiguous(), layout, weight.n, weight.k, runs)


def _runs(global_scale: torch.Tensor) -> torch.Tensor:
    """`PreparedNvFp4Weight.runs` of global scales [N]."""
    runs = torch.zeros((MAX_RUNS, 2), dtype=torch.float64, device="cpu")
    scales, counts = torch.unique_consecutive(global_scale, return_counts=True)
    if len(scales) <= MAX_RUNS:
        runs[: len(scales)] = torch.stack([counts.double(), scales.double()], dim=1)
    return runs


def runs_of(weight: PreparedNvFp4Weight) -> list[tuple[int, float]]:
    """(rows, global scale) of the weight's runs, in order; none where the host does not know them.

    Raises:
        ValueError: they have another number of rows than the weight.
    """
    # Engines may have moved the tensor to the GPU with the layer it belongs to; to read it there would wait.
    if weight.runs is None or not weight.runs.is_cpu:
        return []
    runs = [(int(count), scale) for count, scale in weight.runs.tolist() if count]
    if runs and sum(count for count, _ in runs) != weight.n:
        raise ValueError(f"runs {runs} do not have the weight's {weight.n} rows; make it with ops.prepare_nvfp4_weight")
    return runs


def rows_of_weight(weight: PreparedNvFp4Weight) -> nvfp4.NvFp4Weight:
    """The weight in layout "row" as the reference takes it."""
    return nvfp4.NvFp4Weight(weight.codes, weight.scales, weight.global_scale)


def not_rows(layout: str) -> str | None:
    """Why code that reads layout "row" cannot read `layout`."""
    return None if layout == ROW else f"the weight was arranged for another kernel ({layout})"


def not_for_kernels(arch: str, layout: str, gate_up: bool = False) -> str | None:
    """Why the kernels of `arch` cannot read `layout`."""
    if arch not in PACKINGS:
        return f"{arch} has no kernel for NVFP4"
    wanted = PACKINGS[arch].layout(arch, gate_up)
    if layout == wanted:
        return backends.missing("triton")
    return f"the kernels of {arch} read layout {wanted}, not {layout}: arrange it there, with ops.prepare_nvfp4_weight"


def not_expanded(arch: str, layout: str) -> str | None:
    """Why `layout` cannot be expanded on `arch` for the vendor's product."""
    if reason := not_for_kernels(arch, layout):
        return reason
    return None if PACKINGS[arch] in EXPANDED else f"the kernels of {arch} are for any number of rows"


def check_weight(operator: str, label: str, weight: PreparedNvFp4Weight, leading: tuple[int, ...]) -> None:
    """Raises unless the tensors of `weight` are those of a weight [*leading, N, K] in its layout.

    Raises:
        TypeError: a dtype.
        ValueError: an unknown layout, a K that is no multiple of 16, shapes, strides or devices.
    """
    layout, n, k = weight.layout, weight.n, weight.k
    if layout not in LAYOUTS:
        raise ValueError(f"{operator}: {label}: layout {layout!r} is not one of {', '.join(LAYOUTS)}")
    if k % nvfp4.BLOCK:
        raise ValueError(
            f"{operator}: {label} has {k} columns, no multiple of {nvfp4.BLOCK}; keep this layer in 16 bits"
        )
    codes, scales = LAYOUTS[layout](n, k)
    device = weight.codes.device
    expected = (
        ("codes", weight.codes, *codes),
        ("scales", weight.scales, *scales),
        ("global_scale", weight.global_scale, torch.float32, (n,)),
    )
    for part, tensor, dtype, matrix in expected:
        shape = (*leading, *matrix)
        if tensor.dtype != dtype:
            raise TypeError(f"{operator}: {label}.{part} is {tensor.dtype}, not {dtype}; make it with formats.nvfp4")
        if tensor.shape != shape:
            raise ValueError(f"{operator}: {label}.{part} has shape {tuple(tensor.shape)}, not {shape}")
        if not tensor.is_contiguous():
            raise ValueError(f"{operator}: {label}.{part} is not contiguous; make it with ops.prepare_nvfp4_weight")
        if tensor.device != device:
            raise ValueError(
                f"{operator}: {label}.{part} is on {tensor.device}, {label}.codes on {device}; move them to one device"
            )
    if weight.runs is not None and (weight.runs.dtype != torch.float64 or weight.runs.shape != (MAX_RUNS, 2)):
        raise ValueError(
            f"{operator}: {label}.runs is {weight.runs.dtype} {tuple(weight.runs.shape)}, not float64 {(MAX_RUNS, 2)}; "
            "make it with ops.prepare_nvfp4_weight"
        )

# SPDX-License-Identifier: Apache-2.0
"""An NVFP4 weight as the kernels of its device read it: arranged once, at load."""

from dataclasses import dataclass
from typing import Self

import torch

from llm_quant_rocm.formats import nvfp4
from llm_quant_rocm.ops._register import check

ROW = "row"
LAYOUTS = (ROW,)


@dataclass(frozen=True, eq=False)
class PreparedNvFp4Weight:
    """A weight [..., N, K] in a layout of the kernels. Leading dimensions are experts.

    Attributes:
        codes: the E2M1 codes. In layout "row", uint8 [..., N, K/2].
        scales: the block scales. In layout "row", float8_e4m3fn [..., N, K/16].
        global_scale: fp32 [..., N], a multiplier for every row, in every layout.
        layout: how codes and scales are arranged.
        n, k: the weight's rows and columns.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    global_scale: torch.Tensor
    layout: str
    n: int
    k: int

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


def prepare_nvfp4_weight(weight: nvfp4.NvFp4Weight) -> PreparedNvFp4Weight:
    """`weight` in the layout that the kernels of its device read best. Call it once a weight, at load.

    The layout is "row" (the same tensors) where no kernel wants another.
    """
    return PreparedNvFp4Weight.in_rows(weight)


def rows_of_weight(weight: PreparedNvFp4Weight) -> nvfp4.NvFp4Weight:
    """The weight in layout "row" as the reference takes it."""
    return nvfp4.NvFp4Weight(weight.codes, weight.scales, weight.global_scale)


def not_rows(layout: str) -> str | None:
    """Why code that reads layout "row" cannot read `layout`."""
    return None if layout == ROW else f"the weight was arranged for another kernel ({layout})"


def check_weight(operator: str, label: str, weight: PreparedNvFp4Weight, leading: tuple[int, ...]) -> None:
    """Raises unless the tensors of `weight` are those of a weight [*leading, N, K] in its layout.

    Raises:
        TypeError: a dtype.
        ValueError: an unknown layout, a K that is no multiple of 16, shapes, strides or devices.
    """
    layout, n, k = weight.layout, weight.n, weight.k
    check(
        layout in LAYOUTS,
        ValueError,
        lambda: f"{operator}: {label}: layout {layout!r} is not one of {', '.join(LAYOUTS)}",
    )
    check(
        k % nvfp4.BLOCK == 0,
        ValueError,
        lambda: f"{operator}: {label} has {k} columns, no multiple of {nvfp4.BLOCK}; keep this layer in 16 bits",
    )
    expected = {
        "codes": (weight.codes, torch.uint8, (*leading, n, k // 2)),
        "scales": (weight.scales, torch.float8_e4m3fn, (*leading, n, k // nvfp4.BLOCK)),
        "global_scale": (weight.global_scale, torch.float32, (*leading, n)),
    }
    for part, (tensor, dtype, shape) in expected.items():
        if tensor.dtype != dtype:
            raise TypeError(f"{operator}: {label}.{part} is {tensor.dtype}, not {dtype}; make it with formats.nvfp4")
        if tensor.shape != shape:
            raise ValueError(f"{operator}: {label}.{part} has shape {tuple(tensor.shape)}, not {shape}")
        if not tensor.is_contiguous():
            raise ValueError(f"{operator}: {label}.{part} is not contiguous; make it with ops.prepare_nvfp4_weight")
        if tensor.device != weight.codes.device:
            raise ValueError(
                f"{operator}: {label}.{part} is on {tensor.device}, {label}.codes on {weight.codes.device}; "
                "move them to one device"
            )

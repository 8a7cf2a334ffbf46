# SPDX-License-Identifier: Apache-2.0
"""What becomes of one weight: PTPC FP8, or NVFP4."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

import torch

from llm_quant_rocm.checkpoint.layouts import Layout, PtpcWeight
from llm_quant_rocm.checkpoint.reader import TensorInfo
from llm_quant_rocm.formats import fp8, nvfp4

SIXTEEN_BIT = ("BF16", "F16", "F32")


class Scheme(Protocol):
    """How weights are quantized."""

    def check(self, name: str, tensor: TensorInfo) -> None:
        """Raises ValueError or TypeError for a weight that the scheme cannot hold, by its shape and dtype alone."""

    def nbytes(self, tensor: TensorInfo) -> int:
        """The bytes of a quantized weight, but for some scalars."""

    def quantize(self, name: str, w: torch.Tensor) -> tuple[dict[str, torch.Tensor], float]:
        """The tensors of weight `name`, by the last part of their names, and its relative error."""


def relative_error(w: torch.Tensor, values: Iterable[tuple[slice, torch.Tensor]]) -> float:
    """||values - w|| / ||w|| over w [N, K], `values` given in slices of rows; 0 where both are all zeros."""
    difference = whole = 0.0
    for rows, found in values:
        exact = w[rows].float()
        # Squares of fp32 overflow where the values do not.
        difference += float((found - exact).double().square().sum())
        whole += float(exact.double().square().sum())
    return (difference / whole) ** 0.5 if whole else 0.0


def _check_dtype(name: str, tensor: TensorInfo) -> None:
    if tensor.dtype not in SIXTEEN_BIT:
        raise TypeError(
            f"{name} is {tensor.dtype}; weights are quantized from {', '.join(SIXTEEN_BIT)}: start from the 16-bit "
            "checkpoint, or keep this layer with ignore"
        )


class Ptpc:
    """FP8 with one scale a row: the bytes of vLLM's `fp8_per_channel` (formats/fp8.py)."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout

    def check(self, name: str, tensor: TensorInfo) -> None:
        _check_dtype(name, tensor)

    def nbytes(self, tensor: TensorInfo) -> int:
        n, k = tensor.shape
        return n * k + 4 * n

    def quantize(self, name: str, w: torch.Tensor) -> tuple[dict[str, torch.Tensor], float]:
        codes, scale = fp8.quantize_rows(w, fp8.OCP)
        if not bool(scale.isfinite().all()):
            raise ValueError(f"{name} holds NaN or infinity: mend the checkpoint, or keep this layer with ignore")
        chunks = ((rows, fp8.dequantize(codes[rows], scale[rows])) for rows in nvfp4.row_slices(*w.shape))
        return self._layout.weight(PtpcWeight(codes, scale)), relative_error(w, chunks)


class NvFp4:
    """NVFP4 (formats/nvfp4.py).

    Args:
        search: take the block scales that leave the least squared error.
        siblings: the names of the weights that share one global scale with the one of the given name, itself included.
        read: a weight by its name.
        input_amax: by module, the largest magnitude of its input, for W4A4; None for W4A16.
    """

    def __init__(
        self,
        layout: Layout,
        search: bool,
        siblings: Callable[[str], Sequence[str]],
        read: Callable[[str], torch.Tensor],
        input_amax: Mapping[str, float] | None,
    ) -> None:
        self._layout = layout
        self._search = search
        self._siblings = siblings
        self._read = read
        self._input_amax = input_amax
        self._amax: dict[str, torch.Tensor] = {}

    def check(self, name: str, tensor: TensorInfo) -> None:
        _check_dtype(name, tensor)
        if tensor.shape[-1] % nvfp4.BLOCK:
            raise ValueError(
                f"{name} has {tensor.shape[-1]} columns, no multiple of {nvfp4.BLOCK}: NVFP4 scales blocks of "
                f"{nvfp4.BLOCK}; keep this layer with ignore, or take the scheme ptpc_fp8"
            )

    def nbytes(self, tensor: TensorInfo) -> int:
        n, k = tensor.shape
        return n * k // 2 + n * k // nvfp4.BLOCK

    def quantize(self, name: str, w: torch.Tensor) -> tuple[dict[str, torch.Tensor], float]:
        together, shared = self._siblings(name), None
        if len(together) > 1:
            amax = torch.stack([self._amax_of(other, w if other == name else None) for other in together]).amax(0)
            shared = nvfp4.global_scale_of(amax).to(w.device)
        weight = nvfp4.quantize(w, shared, name, search=self._search)
        tensors = self._layout.weight(weight)
        if self._input_amax is not None and self._layout.input is not None:
            input_amax = self._input_amax[name.removesuffix(".weight")]
            tensors |= self._layout.input(torch.tensor(input_amax / nvfp4.RANGE, dtype=torch.float32, device="cpu"))
        return tensors, relative_error(w, weight.chunks())

    def _amax_of(self, name: str, w: torch.Tensor | None) -> torch.Tensor:
        """Of a weight, on the CPU; read again only where it was not seen yet."""
        if name not in self._amax:
            self._amax[name] = nvfp4.amax_of(self._read(name) if w is None else w, name).cpu()
        return self._amax[name]

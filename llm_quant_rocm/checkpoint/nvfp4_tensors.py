# SPDX-License-Identifier: Apache-2.0
"""The tensors of an NVFP4 layer: as checkpoints name them, and as a served layer keeps them."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from llm_quant_rocm import ops
from llm_quant_rocm.formats.nvfp4 import BLOCK, NvFp4Weight
from llm_quant_rocm.ops import PreparedNvFp4Weight

# 1.0 in E4M3.
_ONE = 0x38


@dataclass(frozen=True)
class TensorNames:
    """What a checkpoint format calls the tensors of a layer, and what they mean.

    Attributes:
        codes, scales, global_scale, input_scale: the tensors' names.
        weight: makes an NvFp4Weight of codes, block scales and a global scale.
        encoding_scale: makes the scale that activations are encoded with (2688 / amax) of `input_scale`.
    """

    codes: str
    scales: str
    global_scale: str
    input_scale: str
    weight: Callable[..., NvFp4Weight]
    encoding_scale: Callable[[torch.Tensor], torch.Tensor]


MODELOPT = TensorNames(
    "weight", "weight_scale", "weight_scale_2", "input_scale", NvFp4Weight.from_modelopt, torch.reciprocal
)
COMPRESSED_TENSORS = TensorNames(
    "weight_packed",
    "weight_scale",
    "weight_global_scale",
    "input_global_scale",
    NvFp4Weight.from_compressed_tensors,
    torch.Tensor.clone,
)


@dataclass(frozen=True)
class Piece:
    """A part of a layer's weight that was one weight in the checkpoint.

    Attributes:
        name: the checkpoint's name of it, ending in ".weight".
        where: its index in the layer's weight: (rows,), or (expert, rows).
        global_scale: its global scale, in the checkpoint's convention.
    """

    name: str
    where: tuple[int | slice, ...]
    global_scale: torch.Tensor


def refuse_ragged(name: str, k: int, whole: int) -> None:
    """ValueError unless a rank's `k` of the `whole` input features of layer `name` are whole blocks."""
    if whole % BLOCK:
        raise ValueError(
            f"{name} has {whole} input features, no multiple of {BLOCK}, so it cannot be NVFP4: the checkpoint's "
            "ignore list should name it"
        )
    if k % BLOCK:
        raise ValueError(
            f"{name} has {k} of {whole} input features on each of {whole // k} ranks, no multiple of {BLOCK}: serve "
            "with a smaller --tensor-parallel-size"
        )


def assemble(names: TensorNames, codes: torch.Tensor, scales: torch.Tensor, pieces: Iterable[Piece]) -> NvFp4Weight:
    """The weight with `codes` [..., N, K/2] and `scales` [..., N, K/16], each piece under its own global scale.

    Raises:
        TypeError, ValueError: a piece is broken; the message names its tensor.
    """
    pieces = list(pieces)
    global_scale = torch.empty(codes.shape[:-1], dtype=torch.float32, device=codes.device)
    for piece in pieces:
        global_scale[piece.where] = piece.global_scale
    try:
        return names.weight(codes, scales, global_scale)
    except (TypeError, ValueError):
        # Which piece? To ask of each, with hundreds of experts a layer, would wait for the GPU thousands of times.
        for piece in pieces:
            names.weight(codes[piece.where], scales[piece.where], piece.global_scale, name=piece.name)
        raise


def dummy(codes: torch.Tensor, scales: torch.Tensor) -> NvFp4Weight:
    """A weight of random codes in these tensors, for the load format "dummy", which leaves codes as they are."""
    codes.random_(0, 256)
    scales.view(torch.uint8).fill_(_ONE)
    return NvFp4Weight(codes, scales, torch.full(codes.shape[:-1], 2.0**-12, dtype=torch.float32, device=codes.device))


def keep(layer: torch.nn.Module, weight: NvFp4Weight, stem: str = "", *, in_rows: bool = False) -> None:
    """Give `layer` the prepared `weight` as `STEMweight`, `STEMweight_scale` and `STEMweight_global_scale`, and
    `STEMweight_runs` where it has runs; with `in_rows` as it stands, whatever the kernels want.

    The first three are the names by which other parts of engines look for a layer's weight and its device. The codes
    are kept as bytes in whatever layout: MLA attention converts its input to the dtype of `weight` unless that is
    uint8.
    """
    if in_rows:
        prepared = PreparedNvFp4Weight.in_rows(weight)
    else:
        prepared = ops.prepare_nvfp4_weight(weight, gate_up=stem == "w13_")
    tensors = {
        "weight": prepared.codes.view(torch.uint8),
        "weight_scale": prepared.scales,
        "weight_global_scale": prepared.global_scale,
    }
    if prepared.runs is not None:  # a parameter too: vLLM overwrites these when it loads weights anew
        tensors["weight_runs"] = prepared.runs
    for name, tensor in tensors.items():
        setattr(layer, stem + name, torch.nn.Parameter(tensor, requires_grad=False))
    setattr(layer, f"{stem}nvfp4", (prepared.codes.dtype, prepared.layout, prepared.n, prepared.k))


def kept(layer: Any, stem: str = "") -> PreparedNvFp4Weight:
    """What `keep` gave the layer."""
    dtype, layout, n, k = getattr(layer, f"{stem}nvfp4")
    return PreparedNvFp4Weight(
        getattr(layer, f"{stem}weight").view(dtype),
        getattr(layer, f"{stem}weight_scale"),
        getattr(layer, f"{stem}weight_global_scale"),
        layout,
        n,
        k,
        getattr(layer, f"{stem}weight_runs", None),
    )


def input_global_scale(names: TensorNames, name: str, scales: Sequence[torch.Tensor]) -> torch.Tensor:
    """The scale that a layer's input is encoded with, fp32: of its shards' `scales` the one under which none saturates.

    Shards share their input, so calibration gives them one scale. `name` is the layer's.

    Raises:
        ValueError: there are none, or one is not positive and finite.
    """
    if not scales:
        raise ValueError(
            f"{name}.{names.input_scale} is missing from the checkpoint, and activations in NVFP4 need it: the "
            "checkpoint is for 16-bit activations; serve it with them"
        )
    encoding = torch.stack([names.encoding_scale(scale) for scale in scales])
    if not bool((encoding.isfinite() & (encoding > 0)).all()):
        raise ValueError(
            f"{name}.{names.input_scale} is not positive and finite: the layer was not calibrated; serve it with "
            "16-bit activations"
        )
    return encoding.min()

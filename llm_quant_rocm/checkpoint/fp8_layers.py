# SPDX-License-Identifier: Apache-2.0
"""A linear layer that an NVFP4 checkpoint of mixed precision keeps in FP8, as engines' methods drive it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from llm_quant_rocm import ops
from llm_quant_rocm.checkpoint.fp8_tensors import with_row_scales
from llm_quant_rocm.checkpoint.linear_tensors import EngineLayers, LinearTensors


class Fp8Linear:
    """ModelOpt's FP8 (E4M3, one weight scale and one input scale a tensor), served by the PTPC path.

    The weight's values stay as they are: each row gets the scale of its shard, where engines round the shards of a
    fused layer again to give them one scale. Inputs get a scale a token instead of the checkpoint's one for all, which
    rounds no worse and needs no calibration.

    The served layer holds `weight` [N, K] E4M3, in the layout `ptpc_layout`, and `weight_scale` [N, 1] fp32.

    Args:
        prefix: the engine's name of the layer.
        is_dummy: the engine fills the tensors by itself, with what they need not mean anything, until it reloads them.
        batch_invariant: a row's bits must not depend on the rows beside it.
    """

    def __init__(self, prefix: str, *, is_dummy: bool, batch_invariant: bool = False) -> None:
        self._prefix, self._is_dummy, self._batch_invariant = prefix, is_dummy, batch_invariant

    def declare(
        self,
        layer: torch.nn.Module,
        k: int,
        sizes: Sequence[int],
        whole: tuple[int, int],
        loader: Callable[..., Any],
        fused: Mapping[str, Sequence[str]],
        engine: EngineLayers,
    ) -> None:
        """The parameters of `layer`: this rank's `k` input features and `sizes` of its shards, of `whole` (N, K).

        `loader`, `fused` and `engine` as `LinearTensors` takes them.
        """
        n, whole_k = whole
        self.checkpoint = LinearTensors(layer, self._prefix, fused, sizes, n, loader, engine)
        self.checkpoint.add_matrix("weight", torch.float8_e4m3fn, k, whole_k)
        self.checkpoint.add_scalars("weight_scale")
        self.checkpoint.add_optional_scalars("input_scale")

    def finish(self, layer: Any) -> None:
        """Turns what was loaded into what `ops.ptpc_linear` reads.

        Raises:
            ValueError: a tensor is missing; the message names it.
        """
        codes, shard_scales = self.checkpoint.matrix("weight"), layer.weight_scale.data
        if self._is_dummy and self.checkpoint.is_empty:
            shard_scales.fill_(1.0)
        else:
            self.checkpoint.refuse_missing()
        codes, scale = with_row_scales(codes, shard_scales, self.checkpoint.pieces())
        self.checkpoint.forget()
        codes, layer.ptpc_layout = ops.prepare_ptpc_weight(codes, batch_invariant=self._batch_invariant)
        for name in ("weight", "weight_scale", "input_scale"):
            delattr(layer, name)
        layer.weight = torch.nn.Parameter(codes, requires_grad=False)
        layer.weight_scale = torch.nn.Parameter(scale, requires_grad=False)

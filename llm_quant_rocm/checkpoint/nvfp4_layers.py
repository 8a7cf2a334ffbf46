# SPDX-License-Identifier: Apache-2.0
"""Layers of NVFP4 checkpoints from their tensors to their products. An engine's methods say which, where and when."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from llm_quant_rocm import ops
from llm_quant_rocm.checkpoint.expert_tensors import STEMS, ExpertNames, ExpertTensors
from llm_quant_rocm.checkpoint.linear_tensors import UNQUANTIZED, EngineLayers, LinearTensors
from llm_quant_rocm.checkpoint.nvfp4_kinds import Options
from llm_quant_rocm.checkpoint.nvfp4_tensors import (
    Piece,
    TensorNames,
    assemble,
    dummy,
    input_global_scale,
    keep,
    kept,
    refuse_ragged,
)
from llm_quant_rocm.formats.nvfp4 import BLOCK, NvFp4Weight, fake_quantize_activation
from llm_quant_rocm.ops.nvfp4_weight import rows_of_weight

_HALF = (torch.bfloat16, torch.float16)


class NvFp4Linear:
    """One linear layer, or an output head that the checkpoint quantizes.

    The served layer holds what `nvfp4_tensors.keep` gives it: a prepared weight [N, K] with a global scale a row, where
    N and K are this rank's share. `input_global_scale` is there with activations="nvfp4" only.

    Args:
        names: what the checkpoint calls the layer's tensors.
        prefix: the engine's name of the layer.
        is_dummy: the engine fills the tensors by itself, with what they need not mean anything, until it reloads them.
    """

    def __init__(
        self, names: TensorNames, prefix: str, options: Options, *, is_dummy: bool, batch_invariant: bool = False
    ) -> None:
        self._names, self._prefix, self._options = names, prefix, options
        self._is_dummy, self._batch_invariant = is_dummy, batch_invariant

    def declare(
        self,
        layer: torch.nn.Module,
        k: int,
        sizes: Sequence[int],
        whole: tuple[int, int],
        loader: Callable[..., Any],
        fused: Mapping[str, Sequence[str]],
        engine: EngineLayers,
        on_complete: Callable[[], None] = lambda: None,
    ) -> None:
        """The parameters of `layer`: this rank's `k` input features and `sizes` of its shards, of `whole` (N, K).

        `loader`, `fused`, `engine` and `on_complete` as `LinearTensors` takes them.
        """
        n, whole_k = whole
        refuse_ragged(self._prefix, k, whole_k)
        names = self._names
        self.checkpoint = LinearTensors(layer, self._prefix, fused, sizes, n, loader, engine, on_complete)
        self.checkpoint.add_matrix(names.codes, torch.uint8, k // 2, whole_k // 2)
        self.checkpoint.add_matrix(names.scales, torch.float8_e4m3fn, k // BLOCK, whole_k // BLOCK)
        self.checkpoint.add_scalars(names.global_scale)
        self._input_scales = self.checkpoint.add_optional_scalars(names.input_scale)
        if names.codes != UNQUANTIZED:
            self.checkpoint.add_refused(UNQUANTIZED)

    def weight(self, layer: torch.nn.Module) -> NvFp4Weight:
        """The loaded weight, whose parameters are dropped.

        Raises:
            TypeError, ValueError: a tensor is broken or missing; the message names it.
        """
        names = self._names
        codes, scales = self.checkpoint.matrix(names.codes), self.checkpoint.matrix(names.scales)
        global_scale = getattr(layer, names.global_scale).data
        if self._is_dummy and self.checkpoint.is_empty:
            weight = dummy(codes, scales)
        else:
            self.checkpoint.refuse_missing()
            pieces = zip(self.checkpoint.pieces(), global_scale, strict=True)
            weight = assemble(names, codes, scales, (Piece(name, (rows,), scale) for (name, rows), scale in pieces))
        dropped = [names.codes, names.scales, names.global_scale, names.input_scale]
        for name in [*dropped, UNQUANTIZED] if names.codes != UNQUANTIZED else dropped:
            delattr(layer, name)
        return weight

    def finish(self, layer: torch.nn.Module) -> None:
        """Turns what was loaded into what `product` reads. Errors as of `weight`."""
        is_dummy = self._is_dummy and self.checkpoint.is_empty
        weight = self.weight(layer)
        keep(layer, weight)
        if self._options.activations == "nvfp4":
            one = torch.ones((), dtype=torch.float32, device=weight.codes.device)
            scales = [one] if is_dummy else list(self._input_scales.values())
            scale = input_global_scale(self._names, self._prefix, scales).to(weight.codes.device)
            layer.input_global_scale = torch.nn.Parameter(scale, requires_grad=False)
        self.checkpoint.forget()

    def product(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x [..., K] by the weight, [..., N]."""
        if x.dtype not in _HALF:
            # Of a head that the engine computes in fp32.
            bias = None if bias is None else bias.bfloat16()
            return self.product(layer, x.bfloat16(), bias).to(x.dtype)
        if self._options.activations == "nvfp4":
            x = fake_quantize_activation(x, layer.input_global_scale)
        return ops.nvfp4_gemm(
            x, kept(layer), bias, prefill=self._options.prefill, batch_invariant=self._batch_invariant
        )


class NvFp4Experts:
    """The routed experts of one layer.

    The served layer holds what `nvfp4_tensors.keep` gives it: prepared weights w13 [E, 2I, H] (gate rows, then up rows)
    and w2 [E, H, I] with a global scale a row. E and I are this rank's share. `w13_input_global_scale` and
    `w2_input_global_scale` [E] are there with activations="nvfp4" only.

    Args as for `NvFp4Linear`.
    """

    def __init__(
        self, names: TensorNames, prefix: str, options: Options, *, is_dummy: bool, batch_invariant: bool = False
    ) -> None:
        self._names, self._prefix = names, prefix
        self._is_dummy, self._batch_invariant = is_dummy, batch_invariant
        self._w4a4 = options.activations == "nvfp4"

    def declare(
        self,
        layer: torch.nn.Module,
        experts: ExpertNames,
        count: int,
        hidden: int,
        inner: tuple[int, int],
        loader: Callable[..., Any],
        attributes: dict[str, Any],
    ) -> None:
        """The parameters of `layer`: `count` experts of `hidden` and `inner` (this rank's, and all ranks') features.

        `loader` and `attributes` as `ExpertTensors` takes them.
        """
        mine, whole = inner
        refuse_ragged(experts.name(0, "w1"), hidden, hidden)
        refuse_ragged(experts.name(0, "w2"), mine, whole)
        self.checkpoint = ExpertTensors(layer, self._prefix, experts, self._names, loader, attributes)
        self.checkpoint.add("w13_", count, (2 * mine, hidden), (whole, hidden))
        self.checkpoint.add("w2_", count, (hidden, mine), (hidden, whole))

    def finish(self, layer: torch.nn.Module) -> None:
        """Turns what was loaded into what `product` reads.

        Raises:
            TypeError, ValueError: a tensor is broken or missing; the message names it.
        """
        names = self._names
        is_dummy = self._is_dummy and self.checkpoint.is_empty
        for stem in STEMS:
            codes, scales = (getattr(layer, stem + tensor).data for tensor in (names.codes, names.scales))
            weight = dummy(codes, scales) if is_dummy else assemble(names, codes, scales, self.checkpoint.pieces(stem))
            self.checkpoint.remove(stem)
            keep(layer, weight, stem, in_rows=self._w4a4)
            if self._w4a4:
                count = codes.shape[0]
                if is_dummy:
                    scale = torch.ones(count, dtype=torch.float32, device=codes.device)
                else:
                    scale = self.checkpoint.input_global_scales(stem, count)
                parameter = torch.nn.Parameter(scale.to(codes.device), requires_grad=False)
                setattr(layer, f"{stem}input_global_scale", parameter)
        self.checkpoint.forget()

    def product(
        self,
        layer: Any,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        activation: str,
        apply_router_weight_on_input: bool,
        expert_map: torch.Tensor | None = None,
        padding: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """This rank's share of the routed experts' output, [T, H]. Arguments as for `ops.nvfp4_moe`."""
        options: dict[str, Any] = {
            "activation": activation,
            "apply_router_weight_on_input": apply_router_weight_on_input,
            "expert_map": expert_map,
            "padding": padding,
            "batch_invariant": self._batch_invariant,
        }
        w13, w2 = kept(layer, "w13_"), kept(layer, "w2_")
        if self._w4a4:
            scales = (layer.w13_input_global_scale, layer.w2_input_global_scale)
            weights = (rows_of_weight(w13), rows_of_weight(w2))
            return ops.nvfp4_moe_w4a4(x, *weights, scales, topk_weights, topk_ids, **options)
        return ops.nvfp4_moe(x, w13, w2, topk_weights, topk_ids, **options)

# SPDX-License-Identifier: Apache-2.0
"""Mixture-of-experts layers of `ptpc_fp8`."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.distributed.parallel_state import get_moe_tp_group
from sglang.srt.layers.moe.fused_moe_triton import FusedMoE
from sglang.srt.utils import set_weight_attrs

from llm_quant_rocm import ops
from llm_quant_rocm.checkpoint.arriving import ArrivingWeight
from llm_quant_rocm.checkpoint.linear_tensors import refuse_other_shape
from llm_quant_rocm.checkpoint.online import quantize_weight, refuse_missing, refusing_again, refusing_other_dtypes
from llm_quant_rocm_sglang.engine_layers import batch_invariant, device_type, loads_tensors, moves_experts, once
from llm_quant_rocm_sglang.experts import ExpertsMethod, combined, expert_names, lacking, routing, warm_up

if TYPE_CHECKING:
    from llm_quant_rocm_sglang.ptpc_fp8 import PtpcFp8Config


class PtpcFp8MoEMethod(ExpertsMethod):
    """Serves the routed experts of one layer, which come to life and are quantized as in `PtpcFp8LinearMethod`.

    The served layer holds `w13_weight` [E, 2I, H] (gate rows, then up rows) and `w2_weight` [E, H, I], E4M3, with
    the scales `w13_weight_scale` [E, 2I, 1] and `w2_weight_scale` [E, H, 1], fp32. E and I are this rank's share.

    Raises:
        NotImplementedError: the layer needs something that the operator has not.
    """

    def __init__(self, config: "PtpcFp8Config", layer: FusedMoE, prefix: str) -> None:
        self.config = config
        self.prefix = prefix
        self.batch_invariant = batch_invariant()
        self.arriving: dict[str, ArrivingWeight] = {}
        if lack := lacking(layer):
            raise NotImplementedError(
                f"{prefix}: ptpc_fp8 does not serve experts with {lack}: name {prefix!r} in ignored_layers to leave "
                "them unquantized, or serve with --quantization w8a8_fp8"
            )

    def create_weights(
        self,
        layer: FusedMoE,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        self.names = expert_names(layer, self.prefix)
        self.dtype = params_dtype
        loader, inner = extra_weight_attrs["weight_loader"], intermediate_size_per_partition
        whole = inner * layer.moe_tp_size
        for name, shape, whole_shape in (
            ("w13_weight", (num_experts, 2 * inner, hidden_size), (whole, hidden_size)),
            ("w2_weight", (num_experts, hidden_size, inner), (hidden_size, whole)),
        ):
            self._declare(layer, name, shape, whole_shape, params_dtype, loader)

    def _declare(
        self,
        layer: FusedMoE,
        name: str,
        shape: tuple[int, int, int],
        whole: tuple[int, int],
        dtype: torch.dtype,
        loader: Callable[..., Any],
    ) -> None:
        """One parameter [E, N, K]; `whole` is the shape of one projection in the checkpoint."""
        device = torch.get_default_device()
        shards = ("w1", "w3") if name == "w13_weight" else ("w2",)

        def make(device: torch.device) -> torch.nn.Parameter:
            # SGLang may pad, and fills what the checkpoint has alone.
            return torch.nn.Parameter(torch.zeros(shape, dtype=dtype, device=device), requires_grad=False)

        def name_of_tensor(weight_name: str, shard_id: str, expert_id: int | None = None) -> str:
            return weight_name if expert_id is None else f"{self.names.name(expert_id, shard_id)}.weight"

        # On a CPU SGLang pads experts, and its Grok may have a file for each rank.
        is_known_shape = device_type() != "cpu" and not getattr(layer, "use_presharded_weights", False)

        def arrives(tensor: torch.Tensor, weight_name: str, shard_id: str, expert_id: int | None = None) -> None:
            if is_known_shape and expert_id is not None:  # it shares out one for all experts in ways of its own
                refuse_other_shape(name_of_tensor(weight_name, shard_id, expert_id), tensor.shape, whole)

        def load(
            param: torch.nn.Parameter,
            tensor: torch.Tensor,
            weight_name: str,
            shard_id: str,
            expert_id: int | None = None,
        ) -> Any:
            given = (weight_name, shard_id) if expert_id is None else (weight_name, shard_id, expert_id)
            is_known = expert_id is not None and not moves_experts()
            local = self.names.local(expert_id) if expert_id is not None and is_known else 0
            if local < 0:
                return None
            return self.arriving[name].load(
                lambda weight, tensor: loader(weight, tensor, *given),
                tensor,
                [(local, shard_id)] if is_known else None,
                local,
                name_of_tensor(*given),
            )

        if loads_tensors():
            is_known = not moves_experts()
            self.arriving[name] = ArrivingWeight(
                lambda: make(device),
                [(expert, shard) for expert in range(shape[0]) for shard in shards] if is_known else None,
                lambda weight, amax: self.quantize(layer, name, weight, amax),
                whole[1] if is_known and whole[1] != shape[2] else None,
            )
        weight = make(torch.device("meta") if loads_tensors() else device)
        final = load if loads_tensors() else loader
        set_weight_attrs(weight, {"weight_loader": refusing_other_dtypes(final, name_of_tensor, arrives)})
        layer.register_parameter(name, weight)

    @once
    def process_weights_after_loading(self, layer: FusedMoE) -> None:
        self.config.report()
        for name in ("w13_weight", "w2_weight"):
            if name not in self.arriving:
                self.quantize(layer, name, getattr(layer, name).data)
                continue
            names = [
                f"{self.names.name(self.names.whole(expert), shard)}.weight"
                for expert, shard in self.arriving[name].finish()
            ]
            if not self.arriving[name].is_quantized:
                refuse_missing(names or [f"{self.prefix}.{name}"])
        warm_up(layer, self.product, self.dtype, self.prefix)

    def quantize(self, layer: FusedMoE, name: str, weight: torch.Tensor, amax: torch.Tensor | None = None) -> None:
        """Puts the parameter `name` in FP8 in its place. `amax` as `quantize_weight` takes it."""
        group = get_moe_tp_group().device_group if name == "w2_weight" and layer.moe_tp_size > 1 else None
        name_of_row = partial(self.names.of_row, name, weight.shape[1])
        codes, scale = quantize_weight(weight, f"{self.prefix}.{name}", name_of_row, group, device_type(), amax)
        parameter = torch.nn.Parameter(codes, requires_grad=False)
        set_weight_attrs(parameter, {"weight_loader": refusing_again(f"{self.prefix}.{name}")})
        setattr(layer, name, parameter)
        setattr(layer, f"{name}_scale", torch.nn.Parameter(scale, requires_grad=False))

    def apply(self, layer: FusedMoE, dispatch_output: Any) -> Any:
        """This rank's share of the routed experts' output. The model runs shared experts itself."""
        x = dispatch_output.hidden_states
        return combined(layer, self.product(layer, x, **routing(layer, dispatch_output)))

    def product(self, layer: FusedMoE, x: torch.Tensor, **routing: Any) -> torch.Tensor:
        """The routed experts' output [T, H]; `routing` are arguments of `ops.ptpc_moe`."""
        w13, w2 = (layer.w13_weight, layer.w13_weight_scale), (layer.w2_weight, layer.w2_weight_scale)
        return ops.ptpc_moe(x, *w13, *w2, batch_invariant=self.batch_invariant, **routing)

# SPDX-License-Identifier: Apache-2.0
"""Mixture-of-experts layers of `ptpc_fp8`."""

from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.distributed.parallel_state import get_moe_tp_group
from sglang.srt.layers.moe.fused_moe_triton import FusedMoE
from sglang.srt.layers.quantization.base_config import FusedMoEMethodBase
from sglang.srt.utils import set_weight_attrs

from llm_quant_rocm import ops
from llm_quant_rocm.checkpoint.online import quantize_weight, refusing_other_dtypes
from llm_quant_rocm_sglang.engine_layers import device_type
from llm_quant_rocm_sglang.experts import combined, expert_names, lacking, routing

if TYPE_CHECKING:
    from llm_quant_rocm_sglang.ptpc_fp8 import PtpcFp8Config


class PtpcFp8MoEMethod(FusedMoEMethodBase):
    """Serves the routed experts of one layer, which are loaded in the checkpoint's precision and then quantized.

    The served layer holds `w13_weight` [E, 2I, H] (gate rows, then up rows) and `w2_weight` [E, H, I], E4M3, with
    the scales `w13_weight_scale` [E, 2I, 1] and `w2_weight_scale` [E, H, 1], fp32. E and I are this rank's share.

    Raises:
        NotImplementedError: the layer needs something that the operator has not.
    """

    runner = None  # which SGLang reads: ours are no kernels of its runners

    def __init__(self, config: "PtpcFp8Config", layer: FusedMoE, prefix: str) -> None:
        self.config = config
        self.prefix = prefix
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

        def name_of_tensor(weight_name: str, shard_id: str, expert_id: int) -> str:
            return f"{self.names.name(expert_id, shard_id)}.weight"

        loader = refusing_other_dtypes(extra_weight_attrs["weight_loader"], name_of_tensor)
        shapes = {
            "w13_weight": (num_experts, 2 * intermediate_size_per_partition, hidden_size),
            "w2_weight": (num_experts, hidden_size, intermediate_size_per_partition),
        }
        for name, shape in shapes.items():
            # SGLang may pad, and fills what the checkpoint has alone.
            weight = torch.nn.Parameter(torch.zeros(shape, dtype=params_dtype), requires_grad=False)
            set_weight_attrs(weight, {"weight_loader": loader})
            layer.register_parameter(name, weight)

    def create_moe_runner(self, layer: FusedMoE, moe_runner_config: Any) -> None:
        """None is made: our operator runs."""

    def process_weights_after_loading(self, layer: FusedMoE) -> None:
        self.config.report()
        w2_group = get_moe_tp_group().device_group if layer.moe_tp_size > 1 else None
        for name, group in (("w13_weight", None), ("w2_weight", w2_group)):
            weight = getattr(layer, name).data
            rows = weight.shape[1]

            def name_of_row(row: int, name: str = name, rows: int = rows) -> str:
                expert, row = divmod(row, rows)
                shard = "w2" if name == "w2_weight" else "w1" if row < rows // 2 else "w3"
                return f"{self.names.name(self.names.whole(expert), shard)}.weight"

            codes, scale = quantize_weight(weight, f"{self.prefix}.{name}", name_of_row, group, device_type())
            setattr(layer, name, torch.nn.Parameter(codes, requires_grad=False))
            setattr(layer, f"{name}_scale", torch.nn.Parameter(scale, requires_grad=False))

    def apply(self, layer: FusedMoE, dispatch_output: Any) -> Any:
        """This rank's share of the routed experts' output. The model runs shared experts itself."""
        output = ops.ptpc_moe(
            dispatch_output.hidden_states,
            layer.w13_weight,
            layer.w13_weight_scale,
            layer.w2_weight,
            layer.w2_weight_scale,
            **routing(layer, dispatch_output),
        )
        return combined(layer, output)

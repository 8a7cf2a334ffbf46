# SPDX-License-Identifier: Apache-2.0
"""Mixture-of-experts layers of `ptpc_fp8`."""

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed import get_ep_group
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.model_loader.reload.layerwise import initialize_online_processing
from vllm.model_executor.utils import replace_parameter, set_weight_attrs
from vllm.platforms import current_platform

from llm_quant_rocm import ops
from llm_quant_rocm.checkpoint.linear_tensors import refuse_other_shape
from llm_quant_rocm.checkpoint.online import quantize_weight, refuse_missing, refusing_other_dtypes
from llm_quant_rocm.checkpoint.whole_rows import WholeRows
from llm_quant_rocm_vllm.engine_layers import refuse_offloading
from llm_quant_rocm_vllm.experts import ExpertsMethod, expert_names

if TYPE_CHECKING:
    from llm_quant_rocm_vllm.ptpc_fp8 import PtpcFp8Config


class PtpcFp8MoEMethod(ExpertsMethod):
    """Serves the routed experts of one layer, which come to life and are quantized as in `PtpcFp8LinearMethod`.

    The served layer holds `w13_weight` [E, 2I, H] (gate rows, then up rows) and `w2_weight` [E, H, I], E4M3, with
    the scales `w13_weight_scale` [E, 2I, 1] and `w2_weight_scale` [E, H, 1], fp32. E and I are this rank's share.

    Raises:
        NotImplementedError: the layer needs something that the operator has not.
    """

    uses_meta_device = True
    name = "ptpc_fp8"
    otherwise = (
        "add {prefix!r} to ignored_layers to leave them unquantized, or serve with --quantization fp8_per_channel"
    )

    def __init__(self, config: "PtpcFp8Config", layer: RoutedExperts, prefix: str) -> None:
        super().__init__(layer, prefix)
        refuse_offloading(self.vllm_config, f"{prefix}.w13_weight", f"{prefix}.w2_weight")
        self.config = config
        # Of w2, where it is sharded.
        self.whole_rows: WholeRows | None = None

    def create_weights(
        self,
        layer: RoutedExperts,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        self.names = expert_names(layer, self.prefix)

        def name_of_tensor(weight_name: str, shard_id: str, expert_id: int, return_success: bool = False) -> str:
            return f"{self.names.name(expert_id, shard_id)}.weight"

        def rows_of_tensor(
            tensor: torch.Tensor, weight_name: str, shard_id: str, expert_id: int, return_success: bool = False
        ) -> int | slice:
            # Where experts are sharded, each rank has all; one tensor may, too.
            return slice(None) if tensor.dim() == 3 else expert_id

        self.arrived: set[tuple[str, int | None]] = set()
        whole = intermediate_size_per_partition * self.moe.tp_size

        def arrives(
            tensor: torch.Tensor, weight_name: str, shard_id: str, expert_id: int, return_success: bool = False
        ) -> None:
            if tensor.dim() == 2:  # vLLM and its models share out one for all experts in ways of their own
                shape = (hidden_size, whole) if shard_id == "w2" else (whole, hidden_size)
                refuse_other_shape(name_of_tensor(weight_name, shard_id, expert_id), tensor.shape, shape)
            self.arrived.add((shard_id, None if tensor.dim() == 3 else expert_id))

        loader = extra_weight_attrs["weight_loader"]
        w2_loader = loader
        if self.moe.tp_size > 1:
            self.whole_rows = WholeRows(whole)
            w2_loader = self.whole_rows.watching(loader, rows_of_tensor)
        loaders = {
            "w13_weight": refusing_other_dtypes(loader, name_of_tensor, arrives),
            "w2_weight": refusing_other_dtypes(w2_loader, name_of_tensor, arrives),
        }
        shapes = {
            "w13_weight": (num_experts, 2 * intermediate_size_per_partition, hidden_size),
            "w2_weight": (num_experts, hidden_size, intermediate_size_per_partition),
        }
        for name, shape in shapes.items():
            weight = torch.nn.Parameter(torch.empty(shape, dtype=params_dtype, device="meta"), requires_grad=False)
            set_weight_attrs(weight, {**extra_weight_attrs, "weight_loader": loaders[name]})
            layer.register_parameter(name, weight)
        initialize_online_processing(layer)

    def prepare(self, layer: RoutedExperts) -> None:
        self.config.report()
        self.refuse_missing(layer)
        # vLLM shards experts over data, prefill-context and tensor parallel ranks together: its expert group.
        w2_amax = self.whole_rows.take() if self.whole_rows else None
        w2_group = get_ep_group().device_group if self.whole_rows else None
        for name, group, amax in (("w13_weight", None, None), ("w2_weight", w2_group, w2_amax)):
            weight = getattr(layer, name)
            name_of_row = partial(self.names.of_row, name, weight.shape[1])
            codes, scale = quantize_weight(
                weight, f"{self.prefix}.{name}", name_of_row, group, current_platform.device_type, amax
            )
            replace_parameter(layer, name, codes)
            replace_parameter(layer, f"{name}_scale", scale)

    def refuse_missing(self, layer: RoutedExperts) -> None:
        """ValueError where a tensor of one of this rank's experts never arrived."""
        if self.arrived or not self.is_dummy:
            experts = map(self.names.whole, range(layer.w13_weight.shape[0]))
            refuse_missing(
                f"{self.names.name(expert, shard)}.weight"
                for expert in experts
                for shard in ("w1", "w2", "w3")
                if self.arrived.isdisjoint({(shard, expert), (shard, None)})  # None: all experts in one tensor
            )
        self.arrived.clear()

    def compute(
        self, layer: RoutedExperts, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, **options: Any
    ) -> torch.Tensor:
        w13, w2 = (layer.w13_weight, layer.w13_weight_scale), (layer.w2_weight, layer.w2_weight_scale)
        return ops.ptpc_moe(x, *w13, *w2, weights, ids, batch_invariant=self.batch_invariant, **options)

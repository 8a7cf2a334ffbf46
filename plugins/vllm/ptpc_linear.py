# SPDX-License-Identifier: Apache-2.0
"""Linear layers of `ptpc_fp8`."""

from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
from vllm import envs
from vllm.distributed import get_tp_group
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.model_loader.reload.layerwise import initialize_online_processing
from vllm.model_executor.utils import replace_parameter, set_weight_attrs
from vllm.platforms import current_platform

from llm_quant_rocm import ops
from llm_quant_rocm.checkpoint.layer_names import ShardNames, shard_numbers
from llm_quant_rocm.checkpoint.linear_tensors import WholeRowCounts, refuse_other_shape
from llm_quant_rocm.checkpoint.online import quantize_weight, refuse_missing, refusing_other_dtypes
from llm_quant_rocm.checkpoint.whole_rows import WholeRows
from llm_quant_rocm_vllm import compile_key, fusion
from llm_quant_rocm_vllm.engine_layers import ENGINE, Loader, Weight, refuse_offloading
from llm_quant_rocm_vllm.linear import LinearMethod

if TYPE_CHECKING:
    from llm_quant_rocm_vllm.ptpc_fp8 import PtpcFp8Config

# Step3 copies q, k and v into a part of the weight, which has no memory yet, where others call its loader.
_MISSING = (
    "fetch or export the checkpoint again, or, if the weight is there and the model copies it without its loader, name "
    "the layer in ignored_layers"
)


class PtpcFp8LinearMethod(LinearMethod):
    """Serves one linear layer. Its weight is declared on the meta device and comes to life, in the checkpoint's
    precision, only when the checkpoint's last piece of it arrives; it is then quantized and dropped.

    The served layer holds `weight` [N, K] E4M3, in the layout `ptpc_layout`, and `weight_scale` [N, 1] fp32, where
    N and K are this rank's share.
    """

    uses_meta_device = True

    def __init__(self, config: "PtpcFp8Config", prefix: str) -> None:
        super().__init__(prefix)
        refuse_offloading(self.vllm_config, f"{prefix}.weight")
        self.config = config
        self.batch_invariant = envs.VLLM_BATCH_INVARIANT
        # Where the input is sharded.
        self.whole_rows: WholeRows | None = None
        # Where the engine's loader copies.
        self.row_counts: WholeRowCounts | None = None
        fusion.enable(self.vllm_config)

    def declare(self, layer: LinearBase, shape: tuple[int, int], loader: Loader) -> None:
        rows, columns = layer.output_size_per_partition, layer.input_size_per_partition
        self.copy = loader
        self.row_counts = WholeRowCounts(layer, layer.logical_widths, shape[0], ENGINE)
        if columns != shape[1]:
            self.whole_rows = WholeRows(shape[1])
            self.copy = self.whole_rows.watching(self.copy, lambda tensor, *args, **kwargs: slice(None))

        @wraps(self.copy)  # vLLM binds arguments by the loader's signature
        def load(*args: Any, **kwargs: Any) -> Any:
            return self.copy(*args, **kwargs)

        self.names = ShardNames(self.prefix, self.config.packed_modules_mapping, layer.logical_widths)
        self.shards, self.arrived = range(len(layer.logical_widths)), set[int]()

        def arrives(tensor: torch.Tensor, shard: str | int | tuple[int, ...] | None = None) -> None:
            rows = self.row_counts.of(shard) if self.row_counts else None
            if rows is not None:
                refuse_other_shape(self.names.of_shard(shard), tensor.shape, (rows, shape[1]))
            self.arrived.update(shard_numbers(shard, len(self.shards)))

        weight = Weight(
            data=torch.empty(rows, columns, dtype=layer.orig_dtype, device="meta"),
            input_dim=1,
            output_dim=0,
            weight_loader=refusing_other_dtypes(load, self.names.of_shard, arrives),
            on_other_loader=self.use_loader,
        )
        layer.register_parameter("weight", weight)
        initialize_online_processing(layer)

    def use_loader(self, loader: Loader) -> None:
        """Have a model's own loader copy the checkpoint's tensors into the weight, of shapes that it alone knows."""
        self.copy, self.row_counts = loader, None

    def prepare(self, layer: LinearBase) -> None:
        self.config.report()
        self.refuse_missing()
        amax = self.whole_rows.take() if self.whole_rows else None
        group = get_tp_group().device_group if self.whole_rows else None
        codes, scale = quantize_weight(
            layer.weight, f"{self.prefix}.weight", self.names.of_row, group, current_platform.device_type, amax
        )
        codes, layer.ptpc_layout = ops.prepare_ptpc_weight(codes, batch_invariant=self.batch_invariant)
        compile_key.extend(self.vllm_config, f"{layer.ptpc_layout} but {self.config.layers.ignored}")
        # A plain one: from 0.33 on vLLM's replace_parameter keeps the object, and a `Weight` keeps its loader.
        weight = torch.nn.Parameter(codes, requires_grad=False)
        set_weight_attrs(weight, {"weight_loader": layer.weight.weight_loader})
        layer.weight = weight
        replace_parameter(layer, "weight_scale", scale)
        # DeepSeek's fused_qkv_a_proj would multiply by the weight itself: it was in BF16 when that was decided.
        if hasattr(layer, "_use_min_latency_gemm"):
            layer._use_min_latency_gemm = False

    def refuse_missing(self) -> None:
        """ValueError where a shard never arrived: vLLM counts on checkpoints that are quantized already, only."""
        if self.arrived or not self.is_dummy:
            missing = (self.names.of_shard(shard) for shard in self.shards if shard not in self.arrived)
            refuse_missing(missing, _MISSING)
        self.arrived.clear()

    def apply(self, layer: LinearBase, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return ops.ptpc_linear(
            x, layer.weight, layer.weight_scale, bias, layer.ptpc_layout, batch_invariant=self.batch_invariant
        )

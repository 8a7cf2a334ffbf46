# SPDX-License-Identifier: Apache-2.0
"""Linear layers of `ptpc_fp8`."""

from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.linear import LinearBase
from sglang.srt.layers.quantization.base_config import LinearMethodBase

from llm_quant_rocm import ops
from llm_quant_rocm.checkpoint.arriving import ArrivingWeight
from llm_quant_rocm.checkpoint.layer_names import ShardNames, shard_numbers
from llm_quant_rocm.checkpoint.linear_tensors import WholeRowCounts, refuse_other_shape
from llm_quant_rocm.checkpoint.online import quantize_weight, refuse_missing, refusing_again, refusing_other_dtypes
from llm_quant_rocm_sglang import fusion
from llm_quant_rocm_sglang.engine_layers import (
    ENGINE,
    Loader,
    Weight,
    batch_invariant,
    device_type,
    group_of,
    hide_codes,
    is_in_transformers,
    loads_tensors,
    once,
    warm_up,
)

if TYPE_CHECKING:
    from llm_quant_rocm_sglang.ptpc_fp8 import PtpcFp8Config


class PtpcFp8LinearMethod(LinearMethodBase):
    """Serves one linear layer. Its weight is declared on the meta device and comes to life, in the checkpoint's
    precision, when the first piece of it arrives; with the last it is quantized and dropped.

    The served layer holds `weight` [N, K] E4M3, in the layout `ptpc_layout`, and `weight_scale` [N, 1] fp32, where
    N and K are this rank's share.
    """

    def __init__(self, config: "PtpcFp8Config", prefix: str) -> None:
        self.config = config
        self.prefix = prefix
        self.batch_invariant = batch_invariant()
        self.arriving: ArrivingWeight | None = None

    def create_weights(
        self,
        layer: LinearBase,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        layer.logical_widths = output_partition_sizes
        self.dtype, self.columns = params_dtype, input_size_per_partition
        self.ranks = input_size // input_size_per_partition
        self.names = ShardNames(self.prefix, self.config.packed_modules_mapping, output_partition_sizes)
        shape, loader = (sum(output_partition_sizes), input_size_per_partition), extra_weight_attrs["weight_loader"]
        self.copy: Loader = loader
        # On a CPU SGLang pads layers, and fills what the checkpoint has.
        self.row_counts: WholeRowCounts | None = None
        if device_type() != "cpu":
            self.row_counts = WholeRowCounts(layer, output_partition_sizes, output_size, ENGINE)
        device, count = torch.get_default_device(), len(output_partition_sizes)

        def make(data: torch.Tensor, loader: Loader) -> Weight:
            return Weight(data=data, input_dim=1, output_dim=0, weight_loader=loader, on_other_loader=self.use_loader)

        def arrives(tensor: torch.Tensor, shard: str | int | tuple[int, ...] | None = None) -> None:
            rows = self.row_counts.of(shard) if self.row_counts else None
            if rows is not None:
                refuse_other_shape(self.names.of_shard(shard), tensor.shape, (rows, input_size))

        def load(param: torch.nn.Parameter, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            assert self.arriving is not None
            if param is not weight:  # by a model's own loader, which left it to the one that it found here
                return loader(param, tensor, *args, **kwargs)
            shard = next(iter((*args, *kwargs.values())), None)
            return self.arriving.load(
                lambda weight, tensor: self.copy(weight, tensor, *args, **kwargs),
                tensor,
                shard_numbers(shard, count),
                slice(None),
                self.names.of_shard(shard),
            )

        if loads_tensors():
            self.arriving = ArrivingWeight(
                lambda: make(torch.empty(shape, dtype=params_dtype, device=device), loader),
                range(count),
                lambda weight, amax: self.quantize(layer, weight, amax),
                input_size if self.ranks > 1 else None,
            )
            data = torch.empty(shape, dtype=params_dtype, device="meta")
            if is_in_transformers(layer):
                data = torch.zeros(1, dtype=params_dtype, device=device).expand(shape)  # of one value in memory
            weight = make(data, refusing_other_dtypes(load, self.names.of_shard, arrives))
        else:
            # What SGLang stored (--load-format presharded) it copies over what has been quantized by then: whatever is
            # in memory may be NaN.
            data = torch.zeros(shape, dtype=params_dtype, device=device)
            weight = make(data, refusing_other_dtypes(loader, self.names.of_shard, arrives))
        layer.register_parameter("weight", weight)

    def use_loader(self, loader: Loader) -> None:
        """Have a model's own loader copy the checkpoint's tensors into the weight, of shapes that it alone knows."""
        self.copy, self.row_counts = loader, None

    def quantize(self, layer: LinearBase, weight: torch.Tensor, amax: torch.Tensor | None = None) -> None:
        """Puts `weight` in FP8 in its place. `amax` as `quantize_weight` takes it."""
        group = group_of(layer, self.ranks) if self.ranks > 1 else None
        name = f"{self.prefix}.weight"
        codes, scale = quantize_weight(weight, name, self.names.of_row, group, device_type(), amax)
        codes, layer.ptpc_layout = ops.prepare_ptpc_weight(codes, batch_invariant=self.batch_invariant)
        layer.weight = torch.nn.Parameter(codes, requires_grad=False)
        self.codes = hide_codes(layer)
        layer.weight.weight_loader = refusing_again(name)
        layer.weight_scale = torch.nn.Parameter(scale, requires_grad=False)

    @once
    def process_weights_after_loading(self, layer: LinearBase) -> None:
        self.config.report()
        if self.arriving is None:
            self.quantize(layer, layer.weight.data)
        else:
            refuse_missing(self.names.of_shard(number) for number in self.arriving.finish())
        warm_up(layer, self)

    def apply(self, layer: LinearBase, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        weight = (layer.weight.view(self.codes), layer.weight_scale, bias, layer.ptpc_layout)
        return fusion.ptpc_linear(x, *weight, self.batch_invariant)

# SPDX-License-Identifier: Apache-2.0
"""Mixture-of-experts layers of NVFP4 checkpoints."""

from collections.abc import Callable, Iterator
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
from vllm import envs
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase, FusedMoeWeightScaleSupported, RoutedExperts
from vllm.model_executor.utils import set_weight_attrs

from llm_quant_rocm import ops
from llm_quant_rocm.formats.nvfp4 import BLOCK
from llm_quant_rocm_vllm.experts import expert_map, expert_name, global_expert, lacking, local_expert
from llm_quant_rocm_vllm.linear_tensors import UNQUANTIZED, unquantized
from llm_quant_rocm_vllm.nvfp4_tensors import (
    Piece,
    assemble,
    dummy,
    input_global_scale,
    keep,
    kept,
    kept_rows,
    refuse_ragged,
)

if TYPE_CHECKING:
    from llm_quant_rocm_vllm.nvfp4 import NvFp4Config

_STEMS = {"w13_": ("w1", "w3"), "w2_": ("w2",)}


class NvFp4MoEMethod(FusedMoEMethodBase):
    """Serves the routed experts of one layer.

    The served layer holds what `nvfp4_tensors.keep` gives it: prepared weights w13 [E, 2I, H] (gate rows, then up rows)
    and w2 [E, H, I] with a global scale a row. E and I are this rank's share. `w13_input_global_scale` and
    `w2_input_global_scale` [E] are there with activations="nvfp4" only.

    Raises:
        NotImplementedError: the layer needs something that the operator has not.
        ValueError: activations="nvfp4" in a model that is to be compiled.
    """

    def __init__(self, config: "NvFp4Config", layer: RoutedExperts, prefix: str) -> None:
        super().__init__(layer.moe_config)
        self.config = config
        self.prefix = prefix
        self.is_dummy = get_current_vllm_config().load_config.load_format == "dummy"
        self.w4a4 = config.options.activations == "nvfp4"
        self._arrived: set[tuple[str, int, str]] = set()
        self._input_scales: dict[tuple[int, str], torch.Tensor] = {}
        lack = lacking(layer.moe_config) or ("VLLM_BATCH_INVARIANT=1" if envs.VLLM_BATCH_INVARIANT else None)
        if lack:
            raise NotImplementedError(
                f"{prefix}: nvfp4_triton does not serve experts with {lack}: leave the checkpoint to vLLM with "
                "LLM_QUANT_ROCM_NVFP4=0"
            )
        if self.w4a4 and not get_current_vllm_config().model_config.enforce_eager:
            raise ValueError(f"{prefix}: experts with activations in NVFP4 cannot be compiled: add --enforce-eager")

    def create_weights(
        self,
        layer: RoutedExperts,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        hidden, inner = hidden_size, intermediate_size_per_partition
        whole_inner = inner * self.moe.tp_size
        refuse_ragged(f"{self.prefix}.*.{layer.ckpt_gate_proj_name}", hidden, hidden)
        refuse_ragged(f"{self.prefix}.*.{layer.ckpt_down_proj_name}", inner, whole_inner)
        names = self.config.tensors
        loader = extra_weight_attrs.pop("weight_loader")
        shapes = {"w13_": ((2 * inner, hidden), (whole_inner, hidden)), "w2_": ((hidden, inner), (hidden, whole_inner))}
        for stem, ((rows, k), (whole_rows, whole_k)) in shapes.items():
            for tensor, dtype, pack in ((names.codes, torch.uint8, 2), (names.scales, torch.float8_e4m3fn, BLOCK)):
                parameter = torch.nn.Parameter(
                    torch.empty(num_experts, rows, k // pack, dtype=dtype), requires_grad=False
                )
                load = self._matrix_loader(layer, loader, tensor, dtype, (whole_rows, whole_k // pack))
                attributes = {**extra_weight_attrs, "weight_loader": load}
                if tensor == names.scales:
                    attributes["quant_method"] = FusedMoeWeightScaleSupported.GROUP.value
                set_weight_attrs(parameter, attributes)
                layer.register_parameter(stem + tensor, parameter)
            scalars = torch.nn.Parameter(
                torch.full((num_experts, len(_STEMS[stem])), torch.nan, dtype=torch.float32), requires_grad=False
            )
            set_weight_attrs(scalars, {"weight_loader": self._scalar_loader(layer, names.global_scale)})
            layer.register_parameter(stem + names.global_scale, scalars)
            loaders = {names.input_scale: self._input_scale_loader(layer)}
            if names.codes != UNQUANTIZED:
                loaders[UNQUANTIZED] = self._matrix_loader(layer, loader, UNQUANTIZED, torch.uint8, (0, 0))
            for tensor, load in loaders.items():
                # Empty, as vLLM insists on the checkpoint's having every other parameter.
                placeholder = torch.nn.Parameter(torch.empty(0), requires_grad=False)
                set_weight_attrs(placeholder, {"weight_loader": load})
                layer.register_parameter(stem + tensor, placeholder)

    def maybe_roundup_sizes(
        self, hidden_size: int, intermediate_size_per_partition: int, *args: Any, **kwargs: Any
    ) -> tuple[int, int]:
        """The sizes as they are: the operator takes any."""
        return hidden_size, intermediate_size_per_partition

    def process_weights_after_loading(self, layer: RoutedExperts) -> None:
        # vLLM sets this mark back when it reloads weights.
        if getattr(layer, "_already_called_process_weights_after_loading", False):
            return
        self.config.report()
        names = self.config.tensors
        for stem in _STEMS:
            codes, scales = (getattr(layer, stem + tensor).data for tensor in (names.codes, names.scales))
            if self.is_dummy:
                weight = dummy(codes, scales)
            else:
                weight = assemble(names, codes, scales, self._pieces(layer, stem))
            for tensor in (names.codes, names.scales, names.global_scale, names.input_scale):
                delattr(layer, stem + tensor)
            keep(layer, weight, stem, in_rows=self.w4a4)
            if self.w4a4:
                scales = self._input_global_scales(layer, stem).to(codes.device)
                setattr(layer, f"{stem}input_global_scale", torch.nn.Parameter(scales, requires_grad=False))
        layer._already_called_process_weights_after_loading = True

    def get_fused_moe_quant_config(self, layer: RoutedExperts) -> None:
        """None: it would describe the layer to vLLM's kernels, and ours serves it."""
        return

    def apply(
        self,
        layer: RoutedExperts,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: Any,
        shared_experts_input: torch.Tensor | None,
    ) -> torch.Tensor:
        """This rank's share of the routed experts' output. vLLM runs the shared experts itself."""
        options = {
            "activation": self.moe.activation.value,
            "apply_router_weight_on_input": layer.apply_router_weight_on_input,
            "expert_map": expert_map(layer),
        }
        if self.w4a4:
            scales = (layer.w13_input_global_scale, layer.w2_input_global_scale)
            weights = (kept_rows(layer, "w13_"), kept_rows(layer, "w2_"))
            return ops.nvfp4_moe_w4a4(x, *weights, scales, topk_weights, topk_ids, **options)
        return ops.nvfp4_moe(x, kept(layer, "w13_"), kept(layer, "w2_"), topk_weights, topk_ids, **options)

    def _matrix_loader(
        self,
        layer: RoutedExperts,
        loader: Callable[..., Any],
        tensor: str,
        dtype: torch.dtype,
        shape: tuple[int, int],
    ) -> Callable[..., Any]:
        """vLLM's `loader`, refusing what it would convert, cut or load in part."""

        @wraps(loader)  # vLLM binds arguments by the loader's signature
        def load(
            param: torch.nn.Parameter,
            loaded_weight: torch.Tensor,
            weight_name: str,
            shard_id: str,
            expert_id: int,
            return_success: bool = False,
        ) -> Any:
            name = f"{expert_name(layer, self.prefix, expert_id, shard_id)}.{tensor}"
            if loaded_weight.dim() == 3:
                raise NotImplementedError(
                    f"{self.prefix} has one tensor for all experts in the checkpoint (shape "
                    f"{tuple(loaded_weight.shape)}), and nvfp4_triton reads one for each: leave the checkpoint to vLLM "
                    "with LLM_QUANT_ROCM_NVFP4=0"
                )
            if loaded_weight.dtype != dtype:
                raise TypeError(unquantized(name, loaded_weight.dtype, dtype))
            if tuple(loaded_weight.shape) != shape:
                raise ValueError(
                    f"{name} has shape {tuple(loaded_weight.shape)} in the checkpoint; the model's configuration needs "
                    f"{shape}: the checkpoint is broken, or made for another model"
                )
            self._arrived.add((tensor, expert_id, shard_id))
            return loader(param, loaded_weight, weight_name, shard_id, expert_id, return_success)

        return load

    def _scalar_loader(self, layer: RoutedExperts, tensor: str) -> Callable[..., Any]:
        """Loads one value for each expert and shard into a parameter [E, shards]."""

        def load(
            param: torch.nn.Parameter,
            loaded_weight: torch.Tensor,
            weight_name: str,
            shard_id: str,
            expert_id: int,
            return_success: bool = False,
        ) -> bool | None:
            value = self._one_value(layer, tensor, loaded_weight, shard_id, expert_id)
            self._arrived.add((tensor, expert_id, shard_id))
            expert = local_expert(layer, expert_id)
            if expert >= 0:
                param.data[expert, int(shard_id == "w3")] = value.to(param.device)
            return expert >= 0 if return_success else None

        return load

    def _input_scale_loader(self, layer: RoutedExperts) -> Callable[..., Any]:
        """Remembers one value for each expert and shard, which a checkpoint may lack."""

        def load(
            param: torch.nn.Parameter,
            loaded_weight: torch.Tensor,
            weight_name: str,
            shard_id: str,
            expert_id: int,
            return_success: bool = False,
        ) -> bool | None:
            tensor = self.config.tensors.input_scale
            self._input_scales[expert_id, shard_id] = self._one_value(layer, tensor, loaded_weight, shard_id, expert_id)
            return True if return_success else None

        return load

    def _one_value(
        self, layer: RoutedExperts, tensor: str, value: torch.Tensor, shard: str, expert: int
    ) -> torch.Tensor:
        """A copy of the checkpoint's `value`, fp32 []."""
        if value.numel() != 1:
            name = f"{expert_name(layer, self.prefix, expert, shard)}.{tensor}"
            raise ValueError(f"{name} has shape {tuple(value.shape)}; it is one value")
        return value.float().reshape(()).clone()

    def _input_global_scales(self, layer: RoutedExperts, stem: str) -> torch.Tensor:
        """The scales, fp32 [E], that the inputs of `stem` are encoded with."""
        count = getattr(layer, f"{stem}weight_global_scale").shape[0]
        if self.is_dummy:
            return torch.ones(count)
        scales = []
        for expert in range(count):
            number = global_expert(layer, expert)
            found = [
                self._input_scales[number, shard] for shard in _STEMS[stem] if (number, shard) in self._input_scales
            ]
            name = expert_name(layer, self.prefix, number, _STEMS[stem][0])
            scales.append(input_global_scale(self.config.tensors, name, found))
        return torch.stack(scales)

    def _pieces(self, layer: RoutedExperts, stem: str) -> Iterator[Piece]:
        """The weights of `stem` as the checkpoint has them; ValueError where a tensor of one never arrived."""
        names = self.config.tensors
        global_scale = getattr(layer, stem + names.global_scale).data
        shards = _STEMS[stem]
        rows = getattr(layer, stem + names.codes).shape[1] // len(shards)
        for expert in range(global_scale.shape[0]):
            number = global_expert(layer, expert)
            for index, shard in enumerate(shards):
                name = expert_name(layer, self.prefix, number, shard)
                for tensor in (names.codes, names.scales, names.global_scale):
                    if (tensor, number, shard) not in self._arrived:
                        raise ValueError(
                            f"{name}.{tensor} is missing from the checkpoint: fetch or export the checkpoint again"
                        )
                yield Piece(
                    f"{name}.weight", (expert, slice(index * rows, (index + 1) * rows)), global_scale[expert, index]
                )

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
from llm_quant_rocm_vllm.nvfp4_tensors import Piece, assemble, dummy, keep, kept, refuse_ragged

if TYPE_CHECKING:
    from llm_quant_rocm_vllm.nvfp4 import NvFp4Config

_STEMS = {"w13_": ("w1", "w3"), "w2_": ("w2",)}


class NvFp4MoEMethod(FusedMoEMethodBase):
    """Serves the routed experts of one layer.

    The served layer holds what `nvfp4_tensors.keep` gives it: prepared weights w13 [E, 2I, H] (gate rows, then up rows)
    and w2 [E, H, I] with a global scale a row. E and I are this rank's share.

    Raises:
        NotImplementedError: the layer needs something that the operator has not.
    """

    def __init__(self, config: "NvFp4Config", layer: RoutedExperts, prefix: str) -> None:
        super().__init__(layer.moe_config)
        self.config = config
        self.prefix = prefix
        self.is_dummy = get_current_vllm_config().load_config.load_format == "dummy"
        self._arrived: set[tuple[str, int, str]] = set()
        if lack := lacking(layer.moe_config) or self._lacking():
            raise NotImplementedError(
                f"{prefix}: nvfp4_triton does not serve experts with {lack}: leave the checkpoint to vLLM with "
                "LLM_QUANT_ROCM_NVFP4=0"
            )

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
            # Empty, as vLLM insists on the checkpoint's having every other parameter.
            ignored = torch.nn.Parameter(torch.empty(0), requires_grad=False)
            set_weight_attrs(ignored, {"weight_loader": _ignore})
            layer.register_parameter(stem + names.input_scale, ignored)

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
            keep(layer, weight, stem)
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
        return ops.nvfp4_moe(
            x,
            kept(layer, "w13_"),
            kept(layer, "w2_"),
            topk_weights,
            topk_ids,
            activation=self.moe.activation.value,
            apply_router_weight_on_input=layer.apply_router_weight_on_input,
            expert_map=expert_map(layer),
        )

    def _lacking(self) -> str | None:
        if envs.VLLM_BATCH_INVARIANT:
            return "VLLM_BATCH_INVARIANT=1"
        return "activations in NVFP4" if self.config.options.activations == "nvfp4" else None

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
            if loaded_weight.dtype != dtype:
                raise TypeError(
                    f"{name} is {loaded_weight.dtype} in the checkpoint, where its quantization_config promises "
                    f"{dtype}: if the experts are not quantized, the ignore list should name them"
                )
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
            if loaded_weight.numel() != 1:
                name = f"{expert_name(layer, self.prefix, expert_id, shard_id)}.{tensor}"
                raise ValueError(f"{name} has shape {tuple(loaded_weight.shape)}; it is one value")
            self._arrived.add((tensor, expert_id, shard_id))
            expert = local_expert(layer, expert_id)
            if expert >= 0:
                param.data[expert, int(shard_id == "w3")] = loaded_weight.float().reshape(()).to(param.device)
            return expert >= 0 if return_success else None

        return load

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


def _ignore(
    param: torch.nn.Parameter,
    loaded_weight: torch.Tensor,
    weight_name: str,
    shard_id: str,
    expert_id: int,
    return_success: bool = False,
) -> bool | None:
    """Loads nothing: activations stay in 16 bits."""
    return True if return_success else None

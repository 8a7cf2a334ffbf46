# SPDX-License-Identifier: Apache-2.0
"""What the methods for mixture-of-experts layers share."""

import torch
from vllm.model_executor.layers.fused_moe import FusedMoEConfig, RoutedExperts

from llm_quant_rocm.checkpoint.expert_tensors import ExpertNames

_ACTIVATIONS = ("silu", "gelu", "gelu_tanh")


def lacking(moe: FusedMoEConfig) -> str | None:
    """What our operators lack to serve experts of this configuration, or None."""
    if moe.activation.value not in _ACTIVATIONS:
        return f"the activation {moe.activation.value}"
    if moe.swiglu_limit is not None:
        return "a clamped SwiGLU (swiglu_limit)"
    if moe.has_bias:
        return "biases"
    if moe.is_lora_enabled:
        return "LoRA adapters"
    if moe.moe_parallel_config.use_all2all_kernels:
        return "expert parallelism over data-parallel ranks (--enable-expert-parallel with --data-parallel-size)"
    return None


def expert_names(layer: RoutedExperts, prefix: str) -> ExpertNames:
    """Which experts `layer` has on this rank, and the checkpoint's names of them."""
    return ExpertNames(
        name=lambda expert, shard: expert_name(layer, prefix, expert, shard),
        local=lambda expert: local_expert(layer, expert),
        whole=lambda expert: global_expert(layer, expert),
    )


def expert_name(layer: RoutedExperts, prefix: str, expert: int, shard: str) -> str:
    """The checkpoint's name of the projection `shard` ("w1", "w2" or "w3") of expert number `expert`."""
    projection = {
        "w1": layer.ckpt_gate_proj_name,
        "w2": layer.ckpt_down_proj_name,
        "w3": layer.ckpt_up_proj_name,
    }[shard]
    return f"{prefix}.{expert}.{projection}"


def local_expert(layer: RoutedExperts, expert: int) -> int:
    """This rank's number of the checkpoint's expert number `expert`, or -1."""
    return expert if layer._expert_map is None else int(layer._expert_map[expert])


def global_expert(layer: RoutedExperts, expert: int) -> int:
    """The checkpoint's number of this rank's expert number `expert`."""
    return expert if layer._expert_map is None else int((layer._expert_map == expert).nonzero()[0])


def expert_map(layer: RoutedExperts) -> torch.Tensor | None:
    """`local_expert` of every expert, or None where all are here.

    The property `expert_map` is a 0/1 mask instead where aiter's kernels are switched on.
    """
    return layer._expert_map

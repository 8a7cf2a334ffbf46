# SPDX-License-Identifier: Apache-2.0
"""What the methods for mixture-of-experts layers share."""

from typing import Any

import torch
from sglang.srt.layers.moe.fused_moe_triton import FusedMoE
from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput
from sglang.srt.layers.moe.topk import TopKOutputChecker
from sglang.srt.layers.moe.utils import get_moe_a2a_backend, get_moe_runner_backend
from sglang.srt.utils import is_cuda

from llm_quant_rocm.checkpoint.expert_tensors import ExpertNames
from llm_quant_rocm_sglang.engine_layers import batch_invariant

_ACTIVATIONS = ("silu", "gelu")
# SGLang does not tell a layer what the checkpoint calls its projections; almost all call them so.
_PROJECTIONS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


def lacking(layer: FusedMoE) -> str | None:
    """What our operators lack to serve these experts, or None."""
    config = layer.moe_runner_config
    if config.activation not in _ACTIVATIONS or not config.is_gated:
        return f"the activation {config.activation}{'' if config.is_gated else ' without a gate'}"
    if any(getattr(config, name, None) is not None for name in ("gemm1_alpha", "gemm1_clamp_limit", "swiglu_limit")):
        return "a clamped SwiGLU"
    if layer.with_bias:
        return "biases"
    if batch_invariant():
        return "--enable-deterministic-inference"
    if config.no_combine:
        return "outputs that are not combined"
    if not get_moe_a2a_backend().is_none():
        return "--moe-a2a-backend"
    backend = get_moe_runner_backend()
    if not (backend.is_auto() or backend.is_triton()):
        return "a --moe-runner-backend other than auto and triton"
    return None


def expert_names(layer: FusedMoE, prefix: str) -> ExpertNames:
    """Which experts `layer` has on this rank, and the checkpoint's names of them."""
    here = layer.num_local_experts
    numbers = [layer._map_global_expert_id_to_local_expert_id(expert) for expert in range(layer.num_experts)]
    whole = {local: expert for expert, local in enumerate(numbers) if 0 <= local < here}
    return ExpertNames(
        name=lambda expert, shard: f"{prefix}.{expert}.{_PROJECTIONS[shard]}",
        local=lambda expert: numbers[expert],
        whole=lambda expert: whole[expert],
    )


def routing(layer: FusedMoE, dispatched: Any) -> dict[str, Any]:
    """What our operators need to know of a batch's tokens: their experts by this rank's numbers, or -1.

    Raises:
        NotImplementedError: SGLang leaves the choice of experts to a kernel of its own.
    """
    if not TopKOutputChecker.format_is_standard(dispatched.topk_output):
        raise NotImplementedError(
            "experts are chosen by a kernel of another method: serve with --moe-runner-backend auto"
        )
    return {
        "topk_weights": dispatched.topk_output.topk_weights,
        "topk_ids": dispatched.topk_output.topk_ids,
        "activation": layer.moe_runner_config.activation,
        "apply_router_weight_on_input": layer.moe_runner_config.apply_router_weight_on_input,
    }


def combined(layer: FusedMoE, output: torch.Tensor) -> StandardCombineInput:
    """`output` [T, H] as SGLang's models expect it. On CUDA they leave the routed scaling factor to the experts."""
    factor = layer.moe_runner_config.routed_scaling_factor
    if is_cuda() and factor not in (None, 1.0):
        output *= factor
    return StandardCombineInput(hidden_states=output)

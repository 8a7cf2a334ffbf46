# SPDX-License-Identifier: Apache-2.0
"""What the methods for mixture-of-experts layers share."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from sglang.srt import runtime_context
from sglang.srt.layers.moe.fused_moe_triton import FusedMoE
from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput
from sglang.srt.layers.moe.topk import TopKOutputChecker
from sglang.srt.layers.moe.utils import get_moe_a2a_backend, get_moe_runner_backend
from sglang.srt.layers.quantization.base_config import FusedMoEMethodBase
from sglang.srt.utils import get_bool_env_var, is_cuda, is_hip

from llm_quant_rocm.checkpoint.expert_tensors import ExpertNames
from llm_quant_rocm.checkpoint.warm_layers import warm_experts
from llm_quant_rocm_sglang.engine_layers import most_rows, on_gpu

_ACTIVATIONS = ("silu", "gelu")
# SGLang does not tell a layer what the checkpoint calls its projections; almost all call them so.
_PROJECTIONS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}

# Models that leave the routed scaling factor to the experts on every platform. DeepSeek's and GLM's multiply by it
# themselves where there is no CUDA.
_LEAVE_THE_FACTOR = ("Bailing", "KimiLinear", "LLaDA2")


class ExpertsMethod(FusedMoEMethodBase):
    """Serves routed experts by one of our operators, which is no kernel of SGLang's runners.

    Attributes:
        prefix: SGLang's name of the layer.
        runner: SGLang reads it.
    """

    prefix: str
    runner = None

    def create_moe_runner(self, layer: FusedMoE, moe_runner_config: Any) -> None:
        """None is made: our operator runs."""

    def get_triton_quant_info(self, layer: FusedMoE) -> Any:
        """Asked for by adapters, which have SGLang's own kernels compute the experts between theirs.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            f"{self.prefix}: LoRA adapters of routed experts are not served over quantized ones: serve adapters of "
            "attention alone (--lora-target-modules), or the checkpoint in 16 bits"
        )


def lacking(layer: FusedMoE) -> str | None:
    """What our operators lack to serve these experts, or None."""
    config = layer.moe_runner_config
    if config.activation not in _ACTIVATIONS or not config.is_gated:
        return f"the activation {config.activation}{'' if config.is_gated else ' without a gate'}"
    if any(getattr(config, name, None) is not None for name in ("gemm1_alpha", "gemm1_clamp_limit", "swiglu_limit")):
        return "a clamped SwiGLU"
    if layer.with_bias:
        return "biases"
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
        **_computing(layer),
    }


def _computing(layer: FusedMoE) -> dict[str, Any]:
    config = layer.moe_runner_config
    return {
        "activation": config.activation,
        "apply_router_weight_on_input": config.apply_router_weight_on_input,
    }


def warm_up(layer: FusedMoE, product: Callable[..., object], dtype: torch.dtype, prefix: str) -> None:
    """Has the kernels compiled by which `product`, of x and what `routing` says, will serve the experts, on a GPU."""

    def call(x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor) -> None:
        product(layer, x, topk_weights=topk_weights, topk_ids=topk_ids, **_computing(layer))

    if on_gpu(layer):
        warm_experts(layer, call, dtype, layer.hidden_size, layer.top_k, most_rows(), prefix)


def combined(layer: FusedMoE, output: torch.Tensor) -> StandardCombineInput:
    """`output` [T, H] as SGLang's models expect it: times the routed scaling factor where they leave that to us."""
    factor = layer.moe_runner_config.routed_scaling_factor
    if factor not in (None, 1.0) and _is_left_to_experts():
        output *= factor
    return StandardCombineInput(hidden_states=output)


@cache
def _is_left_to_experts() -> bool:
    """Whether the model leaves the routed scaling factor to the experts, as all do on CUDA. AITER, which chooses
    experts on ROCm where it is switched on, has it in their weights."""
    if is_cuda() or (is_hip() and get_bool_env_var("SGLANG_USE_AITER")):
        return is_cuda()
    config = getattr(runtime_context, "process_model_config", lambda: None)()
    names = getattr(getattr(config, "hf_config", None), "architectures", None) or ()
    return any(name.startswith(_LEAVE_THE_FACTOR) for name in names)

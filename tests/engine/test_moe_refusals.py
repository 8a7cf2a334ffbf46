# SPDX-License-Identifier: Apache-2.0
"""What the operator lacks to serve some experts is named before any weight is read."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from vllm.config.lora import LoRAConfig

from llm_quant_rocm import ops
from llm_quant_rocm.checkpoint import nvfp4_layers, warm_layers
from llm_quant_rocm.checkpoint.nvfp4_kinds import Options
from llm_quant_rocm.checkpoint.nvfp4_tensors import MODELOPT
from llm_quant_rocm_vllm import experts as experts_of_vllm
from llm_quant_rocm_vllm import padding, ptpc_moe
from llm_quant_rocm_vllm.experts import lacking
from llm_quant_rocm_vllm.nvfp4_moe import NvFp4MoEMethod
from llm_quant_rocm_vllm.ptpc_moe import PtpcFp8MoEMethod


def experts(**changes: Any) -> Any:
    """As much of vLLM's FusedMoEConfig as decides whether we serve it."""
    facts = {
        "activation": SimpleNamespace(value="silu"),
        "swiglu_limit": None,
        "has_bias": False,
        "is_lora_enabled": False,
        "moe_parallel_config": SimpleNamespace(use_all2all_kernels=False, enable_eplb=False),
    }
    return SimpleNamespace(**(facts | changes))


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_ordinary_experts_lack_nothing(activation: str) -> None:
    assert lacking(experts(activation=SimpleNamespace(value=activation)), "mlp.experts") is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"activation": SimpleNamespace(value="swigluoai")}, "the activation swigluoai"),
        ({"swiglu_limit": 7.0}, "swiglu_limit"),
        ({"has_bias": True}, "biases"),
        ({"moe_parallel_config": SimpleNamespace(use_all2all_kernels=True)}, "--enable-expert-parallel"),
        ({"moe_parallel_config": SimpleNamespace(use_all2all_kernels=False, enable_eplb=True)}, "--enable-eplb"),
    ],
)
def test_what_is_lacking_is_named(change: dict[str, Any], words: str) -> None:
    assert words in lacking(experts(**change), "mlp.experts")


@pytest.mark.parametrize(
    ("targets", "lacks"),
    [
        (None, True),
        (["q_proj", "experts"], True),
        (["model.layers.1.mlp.experts"], True),
        (["q_proj", "o_proj"], False),
        (["model.layers.0.mlp.experts"], False),
    ],
)
def test_adapters_of_other_layers_are_served(
    targets: list[str] | None, lacks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM says of all experts that adapters are enabled, and gives them to those that --lora-target-modules names."""
    engine = SimpleNamespace(lora_config=LoRAConfig(target_modules=targets))
    monkeypatch.setattr(experts_of_vllm, "get_current_vllm_config", lambda: engine)
    lack = lacking(experts(is_lora_enabled=True), "model.layers.1.mlp.experts")
    assert ("LoRA adapters" in lack) if lacks else lack is None


@pytest.mark.parametrize("wish", ["0", "1"])
def test_a_wish_for_batch_invariance_reaches_the_operators(wish: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", wish)
    engine = SimpleNamespace(
        load_config=SimpleNamespace(load_format="auto"), model_config=SimpleNamespace(enforce_eager=True)
    )
    monkeypatch.setattr(experts_of_vllm, "get_current_vllm_config", lambda: engine)
    monkeypatch.setattr(padding, "is_to_find", lambda config: False)
    monkeypatch.setattr(ptpc_moe, "refuse_offloading", lambda *given: None)
    monkeypatch.setattr(nvfp4_layers, "kept", lambda layer, stem: None)
    seen = []
    for operator in ("ptpc_moe", "nvfp4_moe"):
        monkeypatch.setattr(ops, operator, lambda *given, **options: seen.append(options["batch_invariant"]))
    layer: Any = MagicMock(moe_config=experts())
    config: Any = SimpleNamespace(tensors=MODELOPT, options=Options())
    x, nothing = torch.zeros(1, 8), torch.zeros(0)
    options = {"activation": "silu", "apply_router_weight_on_input": False}
    for method in (PtpcFp8MoEMethod(config, layer, "mlp.experts"), NvFp4MoEMethod(config, layer, "mlp.experts")):
        method.compute(layer, x, nothing, nothing, **options)
    assert seen == 2 * [wish == "1"]


@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize("activations", ["16bit", "nvfp4"])
def test_rounded_activations_are_not_compiled(activations: str, eager: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = SimpleNamespace(
        load_config=SimpleNamespace(load_format="auto"), model_config=SimpleNamespace(enforce_eager=eager)
    )
    monkeypatch.setattr(experts_of_vllm, "get_current_vllm_config", lambda: engine)
    monkeypatch.setattr(padding, "is_to_find", lambda config: False)
    config: Any = SimpleNamespace(tensors=MODELOPT, options=Options(activations))
    layer: Any = SimpleNamespace(moe_config=experts())
    refused = activations == "nvfp4" and not eager
    with pytest.raises(ValueError, match="cannot be compiled: add --enforce-eager") if refused else nullcontext():
        NvFp4MoEMethod(config, layer, "mlp.experts")


@pytest.mark.parametrize("chosen", ["sharded_state", "runai_streamer_sharded"])
def test_what_vllm_stored_is_not_read(chosen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = SimpleNamespace(load_config=SimpleNamespace(load_format=chosen))
    monkeypatch.setattr(experts_of_vllm, "get_current_vllm_config", lambda: engine)
    config: Any = SimpleNamespace(tensors=MODELOPT, options=Options())
    with pytest.raises(ValueError, match=f"--load-format {chosen} cannot read layers"):
        NvFp4MoEMethod(config, SimpleNamespace(moe_config=experts()), "mlp.experts")  # type: ignore[arg-type]


@pytest.mark.parametrize("to_find", [True, False])
@pytest.mark.parametrize("on_input", [True, False])
def test_what_the_operator_is_told_of_a_call(on_input: bool, to_find: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where aiter's kernels are switched on, vLLM's property of the map is a mask of 0 and 1."""
    monkeypatch.setattr(padding, "places", lambda tokens: f"of {tokens}")
    method: Any = object.__new__(NvFp4MoEMethod)
    method.moe, method._padding_is_to_find = experts(activation=SimpleNamespace(value="gelu")), to_find
    method.compute = lambda layer, x, weights, ids, **options: options
    whole, mask = torch.tensor([-1, -1, 0, 1]), torch.tensor([0, 0, 1, 1])
    layer: Any = SimpleNamespace(_expert_map=whole, expert_map=mask, apply_router_weight_on_input=on_input)
    assert method.apply(layer, torch.ones(3, 4), None, None, None, None) == {
        "activation": "gelu",
        "apply_router_weight_on_input": on_input,
        "expert_map": whole,
        "padding": "of 3" if to_find else None,
    }


@pytest.mark.parametrize("to_find", [True, False])
def test_what_serves_experts_is_compiled_with_and_without_padding(
    to_find: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For the tokens of all data-parallel ranks."""
    computed = []

    def warm_up(call: Any, most_rows: int, device: torch.device, kind: Any, name: str) -> None:
        assert (most_rows, name) == (2 * 512, "mlp.experts")
        call(3)

    def compute(layer: Any, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, **options: Any) -> None:
        assert x.shape == (3, 64) and x.dtype == torch.bfloat16 and weights.shape == ids.shape == (3, 4)
        computed.append(options["padding"])

    monkeypatch.setattr(warm_layers, "warm_up", warm_up)
    method: Any = object.__new__(NvFp4MoEMethod)
    method.moe = experts(
        activation=SimpleNamespace(value="silu"), in_dtype=torch.bfloat16, hidden_dim=64, experts_per_token=4, dp_size=2
    )
    method.prefix, method.compute, method._padding_is_to_find = "mlp.experts", compute, to_find
    method.vllm_config = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_batched_tokens=512))
    layer: Any = torch.nn.Linear(1, 1)
    layer._expert_map, layer.apply_router_weight_on_input = None, False
    method.warm_up(layer)
    assert [padding is not None for padding in computed] == [False, True][: 1 + to_find]

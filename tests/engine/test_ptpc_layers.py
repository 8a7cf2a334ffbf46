# SPDX-License-Identifier: Apache-2.0
"""Linear layers of `ptpc_fp8` from their checkpoint tensors on; without an engine."""

import re
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from vllm.config import ModelConfig, VllmConfig, set_current_vllm_config
from vllm.model_executor import parameter
from vllm.model_executor.layers import linear
from vllm.model_executor.models import deepseek_v2
from vllm.model_executor.utils import set_weight_attrs

from llm_quant_rocm import __version__, ops
from llm_quant_rocm.checkpoint import warm_layers
from llm_quant_rocm.checkpoint.whole_rows import WholeRows
from llm_quant_rocm.formats import fp8
from llm_quant_rocm_vllm import engine_layers, ptpc_linear, ptpc_moe
from llm_quant_rocm_vllm.ptpc_fp8 import PtpcFp8Config
from llm_quant_rocm_vllm.ptpc_linear import PtpcFp8LinearMethod
from llm_quant_rocm_vllm.ptpc_moe import PtpcFp8MoEMethod

N, K = 48, 32
PREFIX = "model.layers.0.mixer.in_proj"


@pytest.fixture(autouse=True)
def config(monkeypatch: pytest.MonkeyPatch) -> Iterator[VllmConfig]:
    """vLLM's, of one rank."""
    monkeypatch.setattr(parameter, "get_tensor_model_parallel_rank", lambda: 0)
    monkeypatch.setattr(parameter, "get_tensor_model_parallel_world_size", lambda: 1)
    with set_current_vllm_config(made := VllmConfig()):
        yield made


def declared(ignored: list[str] | None = None) -> Any:
    """A layer whose weight is declared; vLLM's loader copies."""
    layer: Any = torch.nn.Module()
    layer.quant_method = PtpcFp8LinearMethod(PtpcFp8Config(ignored), PREFIX)

    def copy(param: torch.nn.Parameter, loaded_weight: torch.Tensor) -> None:
        param.data.copy_(loaded_weight)

    layer.quant_method.create_weights(layer, K, [N], K, N, torch.bfloat16, weight_loader=copy)
    return layer


@pytest.mark.parametrize("wish", ["0", "1"])
def test_a_wish_for_batch_invariance_reaches_the_operators(wish: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", wish)
    seen = []
    monkeypatch.setattr(ops, "ptpc_linear", lambda *operands, **options: seen.append(options["batch_invariant"]))
    prepare = ops.prepare_ptpc_weight
    monkeypatch.setattr(
        ops,
        "prepare_ptpc_weight",
        lambda codes, batch_invariant: seen.append(batch_invariant) or prepare(codes, batch_invariant=batch_invariant),
    )
    layer = declared()
    load(layer, torch.randn(N, K).bfloat16())
    layer.quant_method.process_weights_after_loading(layer)
    layer.quant_method.apply(layer, torch.randn(3, K).bfloat16())
    assert seen == 2 * [wish == "1"]


def load(layer: Any, tensor: torch.Tensor) -> None:
    layer.weight.weight_loader(layer.weight, tensor)


def backwards(param: torch.Tensor, loaded_weight: torch.Tensor) -> None:
    """A model's own loader."""
    param.data[:] = loaded_weight.flip(0)


def set_it(weight: Any) -> None:
    weight.weight_loader = backwards


def replace_it(weight: Any) -> None:
    del weight.weight_loader
    set_weight_attrs(weight, {"weight_loader": backwards})


@pytest.mark.parametrize("change", [None, set_it, replace_it], ids=["vLLM's", "set", "replaced"])
def test_whoever_loads_a_weight_it_is_quantized(change: Any) -> None:
    """Mamba-2 sets a loader of its own, where all ranks have its groups."""
    layer, tensor = declared(), torch.randn(N, K, generator=torch.Generator().manual_seed(0))
    if change:
        change(layer.weight)
    with pytest.raises(TypeError, match=rf"^{PREFIX}\.weight is torch\.int8 in the checkpoint"):
        load(layer, tensor.to(torch.int8))
    layer = declared()
    if change:
        change(layer.weight)
    load(layer, tensor)
    codes, scale = fp8.quantize_rows((tensor.flip(0) if change else tensor).bfloat16(), fp8.OCP)
    assert torch.equal(layer.weight.view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(layer.weight_scale, scale)


def test_a_weight_is_quantized_once() -> None:
    """vLLM asks again at the end of the load."""
    layer = declared()
    load(layer, torch.ones(N, K))
    weight = layer.weight
    layer.quant_method.process_weights_after_loading(layer)
    assert layer.weight is weight


def test_what_refuses_a_trainers_weights_is_no_loader_of_the_methods(monkeypatch: pytest.MonkeyPatch) -> None:
    """From 0.33 on vLLM's replace_parameter keeps the object, so that what refuses a trainer's tensors was taken for a
    model's own loader, and refused what vLLM reloads."""

    def replace_as_in_033(layer: Any, name: str, tensor: torch.Tensor) -> None:
        if hasattr(layer, name):
            getattr(layer, name).data = tensor
        else:
            setattr(layer, name, tensor)

    monkeypatch.setattr(ptpc_linear, "replace_parameter", replace_as_in_033)
    layer = declared()
    copy = layer.quant_method.copy
    load(layer, torch.ones(N, K))
    layer.quant_method.process_weights_after_loading(layer)
    with pytest.raises(ValueError, match=rf"^{PREFIX}\.weight was prepared for its kernels"):
        load(layer, torch.ones(N, K))
    assert layer.quant_method.copy is copy


def test_what_serves_a_layer_is_compiled_on_a_gpu(config: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """For as many tokens as vLLM schedules."""
    warmed = []

    def warm_up(call: Any, most_rows: int, device: torch.device, kind: Any, name: str) -> None:
        assert call(3).shape == (3, N) and call(3).dtype == torch.bfloat16
        assert (most_rows, device.type, name) == (config.scheduler_config.max_num_batched_tokens, "cpu", PREFIX)
        warmed.append(kind)

    monkeypatch.setattr(warm_layers, "warm_up", warm_up)
    monkeypatch.setattr(engine_layers, "current_platform", SimpleNamespace(is_cuda_alike=lambda: True))
    load(declared(), torch.ones(N, K))
    assert len(warmed) == 1


def test_a_weight_that_nobody_loads_is_missing() -> None:
    """Whatever it holds: memory as it was."""
    layer = declared()
    layer.weight = torch.nn.Parameter(torch.zeros(N, K, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match=rf"^{PREFIX}\.weight is missing from the checkpoint"):
        layer.quant_method.process_weights_after_loading(layer)


def test_a_weight_that_a_model_copies_without_its_loader() -> None:
    """As Step3 does with the shards of its qkv_proj. It was said to be missing, which it is not."""
    layer = declared()
    layer.weight.narrow(0, 0, N).copy_(torch.ones(N, K))
    with pytest.raises(ValueError, match=rf"^{PREFIX}\.weight is missing from .* name the layer in ignored_layers$"):
        layer.quant_method.process_weights_after_loading(layer)


def test_half_of_what_is_reloaded_over_dummies() -> None:
    layer: Any = torch.nn.Module()
    layer.quant_method = PtpcFp8LinearMethod(PtpcFp8Config(), PREFIX)
    layer.quant_method.create_weights(layer, K, [N, N], K, 2 * N, torch.bfloat16, weight_loader=MagicMock())
    layer.quant_method.is_dummy = True
    layer.quant_method.refuse_missing()
    layer.quant_method.arrived.add(0)
    with pytest.raises(ValueError, match=rf"^{PREFIX}\.weight is missing from the checkpoint"):
        layer.quant_method.refuse_missing()


@pytest.mark.parametrize(
    ("shards", "named", "missing"),
    [
        ((0, 1, 2), True, "in_proj_z"),
        (3, True, "in_proj_qkv"),
        (None, True, None),
        ((0, 1, 2), False, "in_proj_qkvz"),
    ],
)
def test_one_of_two_weights_with_four_shards(
    shards: Any, named: bool, missing: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Qwen3.5's linear attention: q, k and v come in one. Phi-3 has all shards in one; models need not name them."""
    monkeypatch.setattr(ptpc_linear, "initialize_online_processing", lambda layer: None)
    config = PtpcFp8Config()
    config.packed_modules_mapping = {"in_proj_qkvz": ["in_proj_qkv", "in_proj_z"]} if named else {}
    layer: Any = torch.nn.Module()
    layer.quant_method = PtpcFp8LinearMethod(config, "in_proj_qkvz")
    layer.quant_method.create_weights(layer, K, [N] * 4, K, 4 * N, torch.bfloat16, weight_loader=MagicMock())
    layer.weight.weight_loader(layer.weight, torch.zeros(N, K), shards)
    with pytest.raises(ValueError, match=rf"^{missing}\.weight is missing") if missing else nullcontext():
        layer.quant_method.refuse_missing()


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_tensors_of_another_shape(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM would cut one that is too long, and end at one that is too short without its name: Phi-3's q, k and v in one
    tensor, and tensors of one shard or layer each. Of four ranks two have the same heads of k and v."""
    for module in (linear, parameter):
        monkeypatch.setattr(module, "get_tensor_model_parallel_rank", lambda: ranks - 1)
        monkeypatch.setattr(module, "get_tensor_model_parallel_world_size", lambda: ranks)
    config = PtpcFp8Config()
    config.packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}

    def qkv_layer() -> Any:
        return linear.QKVParallelLinear(64, 16, 4, 2, bias=False, quant_config=config, prefix="self_attn.qkv_proj")

    qkv = qkv_layer()
    down: Any = linear.RowParallelLinear(64, 32, bias=False, quant_config=config, prefix="mlp.down_proj")
    for layer, name, rows, shard in (
        (qkv, "self_attn.qkv_proj", 128, ()),
        (qkv, "self_attn.k_proj", 32, ("k",)),
        (down, "mlp.down_proj", 32, ()),
    ):
        for shape in ((rows - 16, 64), (rows + 16, 64), (rows, 48), (rows, 80)):
            sentence = re.escape(f"{name}.weight has shape {shape} in the checkpoint; the model's configuration needs")
            with pytest.raises(ValueError, match=rf"^{sentence} \({rows}, 64\)"):
                layer.weight.weight_loader(layer.weight, torch.zeros(shape), *shard)
    q, k, v = (torch.randn(16 * heads, 64) for heads in (4, 2, 2))
    qkv = qkv_layer()  # vLLM keeps what it was given, refused or not
    qkv.weight.weight_loader(qkv.weight, torch.cat([q, k, v]))
    mine = torch.cat([whole.chunk(min(ranks, len(whole) // 16))[-1] for whole in (q, k, v)])
    codes, scale = fp8.quantize_rows(mine.to(qkv.orig_dtype), fp8.OCP)
    assert torch.equal(qkv.weight.view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(qkv.weight_scale, scale)


@pytest.mark.parametrize(("shard", "name", "needed"), [("w1", "gate", "(64, 32)"), ("w2", "down", "(32, 64)")])
def test_an_expert_of_another_shape(shard: str, name: str, needed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM would leave the rest of one that is too short as memory was. Here two ranks have 32 features each."""
    monkeypatch.setattr(ptpc_moe, "initialize_online_processing", lambda layer: None)
    method: Any = object.__new__(PtpcFp8MoEMethod)
    method.prefix, method.moe = "experts", SimpleNamespace(tp_size=2)
    layer: Any = torch.nn.Module()
    layer.ckpt_gate_proj_name, layer.ckpt_down_proj_name, layer.ckpt_up_proj_name = "gate", "down", "up"
    method.create_weights(layer, 2, K, 32, torch.bfloat16, weight_loader=MagicMock())
    weight = layer.w2_weight if shard == "w2" else layer.w13_weight
    sentence = re.escape(
        f"experts.1.{name}.weight has shape (48, 48) in the checkpoint; the model's configuration needs"
    )
    with pytest.raises(ValueError, match=f"^{sentence} {re.escape(needed)}"):
        weight.weight_loader(weight, torch.zeros(48, 48), "", shard, 1)


@pytest.mark.parametrize(("arrived", "missing"), [("w1 w3", "down"), ("w2 w3", "gate"), ("w1 w2 w3", None)])
@pytest.mark.parametrize("stacked", [True, False], ids=["all experts in one", "expert by expert"])
def test_a_projection_of_the_experts_is_missing(
    arrived: str, missing: str | None, stacked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Llama 4 has each projection of all experts in one tensor, which says nothing of the others."""
    monkeypatch.setattr(ptpc_moe, "initialize_online_processing", lambda layer: None)
    method: Any = object.__new__(PtpcFp8MoEMethod)
    method.prefix, method.moe, method.is_dummy = "experts", SimpleNamespace(tp_size=1), False
    layer: Any = torch.nn.Module()
    layer.ckpt_gate_proj_name, layer.ckpt_down_proj_name, layer.ckpt_up_proj_name = "gate", "down", "up"
    layer._expert_map = None
    method.create_weights(layer, 2, K, K, torch.bfloat16, weight_loader=MagicMock())
    for shard in arrived.split():
        weight = layer.w2_weight if shard == "w2" else layer.w13_weight
        for expert in (0,) if stacked else (0, 1):
            weight.weight_loader(weight, torch.zeros(2, K, K) if stacked else torch.zeros(K, K), "", shard, expert)
    with pytest.raises(ValueError, match=rf"^experts\.0\.{missing}\.weight is missing") if missing else nullcontext():
        method.refuse_missing(layer)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The ranks among which the scales of each weight are agreed upon, or None, and what is known of its rows."""
    found: list[Any] = []

    def quantize(weight: torch.Tensor, name: str, name_of_row: Any, group: Any, device: str, amax: Any) -> Any:
        found.append((group, amax is not None))
        return fp8.quantize_rows(weight, fp8.OCP)

    for module, get in ((ptpc_linear, "get_tp_group"), (ptpc_moe, "get_ep_group")):
        monkeypatch.setattr(module, "quantize_weight", quantize)
        monkeypatch.setattr(module, get, lambda: SimpleNamespace(device_group="ranks"))
    return found


@pytest.mark.parametrize(("columns", "seen"), [(2 * K, True), (K, False)], ids=["whole", "cut before"])
def test_ranks_share_the_rows_of_a_layer_whose_input_is_cut(columns: int, seen: bool, asked: list[Any]) -> None:
    layer: Any = torch.nn.Module()
    layer.quant_method = PtpcFp8LinearMethod(PtpcFp8Config(), PREFIX)

    def copy(param: torch.nn.Parameter, loaded_weight: torch.Tensor) -> None:
        param.data.copy_(loaded_weight[:, :K])

    layer.quant_method.create_weights(layer, K, [N], 2 * K, N, torch.bfloat16, weight_loader=copy)
    load(layer, torch.ones(N, columns))
    load(declared(), torch.ones(N, K))
    assert asked == [("ranks", seen), (None, False)]


def test_ranks_share_the_rows_of_w2_alone(asked: list[Any]) -> None:
    method: Any = object.__new__(PtpcFp8MoEMethod)
    method.config, method.names, method.prefix, method.refuse_missing = MagicMock(), MagicMock(), "experts", MagicMock()
    for method.whole_rows in (WholeRows(32), None):
        layer: Any = torch.nn.Module()
        layer.w13_weight, layer.w2_weight = (torch.nn.Parameter(torch.ones(2, 32, 16)) for _ in range(2))
        method.prepare(layer)
    assert asked == [(None, False), ("ranks", False), (None, False), (None, False)]


def test_compiled_models_are_known_by_how_layers_compute(config: VllmConfig) -> None:
    """vLLM keeps their graphs, in which that is constants."""
    config.model_config = object.__new__(ModelConfig)  # which vLLM has, and hashes
    config.model_config.compute_hash = lambda: "model"
    before = config.compute_hash()
    load(declared(), torch.ones(N, K))
    after = config.compute_hash()
    assert after != before
    assert __version__ in config.additional_config["llm_quant_rocm"], "another version may compute in another way"
    load(declared(), torch.zeros(N, K))
    assert config.compute_hash() == after
    load(declared(["o_proj"]), torch.zeros(N, K))
    assert config.compute_hash() != after, "layers that are left compute in another way"


def test_parts_of_models_share_what_they_are_known_by(config: VllmConfig) -> None:
    """Qwen3-VL's language model is compiled with a copy of vLLM's configuration, made before it has layers."""
    PtpcFp8Config().get_quant_method(torch.nn.Module(), "visual.pos")
    copy = VllmConfig(additional_config=config.additional_config)
    assert copy.additional_config is not config.additional_config
    load(declared(), torch.ones(N, K))
    assert copy.additional_config == config.additional_config != {}


def test_deepseeks_own_product_is_not_for_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM decides on it when the layer is made, whose weight then is in BF16."""
    hopper = SimpleNamespace(
        is_cuda=lambda: True, is_device_capability=lambda wanted: wanted == 90, is_device_capability_family=bool
    )
    monkeypatch.setattr(deepseek_v2, "current_platform", hopper)
    monkeypatch.setattr(deepseek_v2.MergedColumnParallelLinear, "__init__", made)
    layer = deepseek_v2.DeepSeekV2FusedQkvAProjLinear(7168, [1536, 576], PtpcFp8Config(), "fused_qkv_a_proj")
    assert layer._use_min_latency_gemm, "vLLM has changed how it decides: look at it again"
    layer.weight.weight_loader(layer.weight, torch.zeros(2112, 7168))
    assert layer.weight.dtype == torch.float8_e4m3fn and not layer._use_min_latency_gemm


def made(layer: Any, k: int, sizes: list[int], quant_config: PtpcFp8Config, prefix: str, **options: Any) -> None:
    """As much of vLLM's constructor as makes the weight."""
    torch.nn.Module.__init__(layer)
    layer.quant_method = PtpcFp8LinearMethod(quant_config, prefix)

    def copy(param: torch.nn.Parameter, loaded_weight: torch.Tensor) -> None:
        param.data.copy_(loaded_weight)

    layer.quant_method.create_weights(layer, k, [sum(sizes)], k, sum(sizes), torch.bfloat16, weight_loader=copy)

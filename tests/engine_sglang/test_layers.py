# SPDX-License-Identifier: Apache-2.0
"""What SGLang's layers and options come to, before any weight is read."""

from collections.abc import Callable
from contextlib import nullcontext
from pkgutil import resolve_name
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from conftest import DEMO, share
from sglang.srt.configs.load_config import LoadFormat
from sglang.srt.layers.linear import LinearBase, QKVParallelLinear, ReplicatedLinear
from sglang.srt.layers.moe import MoeRunnerConfig
from sglang.srt.layers.moe.fused_moe_triton import FusedMoE
from sglang.srt.layers.moe.topk import BypassedTopKOutput, StandardTopKOutput
from sglang.srt.layers.moe.utils import MoeA2ABackend, MoeRunnerBackend
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead
from sglang.srt.lora.layers import FusedMoEWithLoRA
from sglang.srt.models.utils import WeightsMapper
from sglang.srt.server_args import prepare_server_args

from llm_quant_rocm.formats import fp8, nvfp4
from llm_quant_rocm_sglang import communicator, engine_layers, experts, fp8_linear, nvfp4_linear, nvfp4_moe
from llm_quant_rocm_sglang.fp8_linear import Fp8LinearMethod
from llm_quant_rocm_sglang.nvfp4 import NvFp4Config
from llm_quant_rocm_sglang.ptpc_fp8 import PtpcFp8Config
from llm_quant_rocm_sglang.ptpc_linear import PtpcFp8LinearMethod
from llm_quant_rocm_sglang.ptpc_moe import PtpcFp8MoEMethod


def routed(**changes: Any) -> Any:
    """As much of SGLang's FusedMoE as decides whether we serve it."""
    facts = {"activation": "silu", "is_gated": True, "no_combine": False, "routed_scaling_factor": None}
    config = SimpleNamespace(**(facts | {name: value for name, value in changes.items() if name != "with_bias"}))
    return SimpleNamespace(moe_runner_config=config, with_bias=changes.get("with_bias", False))


@pytest.fixture(autouse=True)
def backends(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's defaults."""
    monkeypatch.setattr(experts, "get_moe_a2a_backend", lambda: MoeA2ABackend.NONE)
    monkeypatch.setattr(experts, "get_moe_runner_backend", lambda: MoeRunnerBackend.AUTO)


@pytest.mark.parametrize("activation", ["silu", "gelu"])
@pytest.mark.parametrize("backend", [MoeRunnerBackend.AUTO, MoeRunnerBackend.TRITON], ids=lambda one: one.value)
def test_ordinary_experts_lack_nothing(
    activation: str, backend: MoeRunnerBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(experts, "get_moe_runner_backend", lambda: backend)
    assert experts.lacking(routed(activation=activation)) is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"activation": "relu2"}, "the activation relu2"),
        ({"is_gated": False}, "the activation silu without a gate"),
        ({"gemm1_alpha": 1.7}, "a clamped SwiGLU"),
        ({"gemm1_clamp_limit": 7.0}, "a clamped SwiGLU"),
        ({"swiglu_limit": 7.0}, "a clamped SwiGLU"),
        ({"with_bias": True}, "biases"),
        ({"no_combine": True}, "outputs that are not combined"),
    ],
    ids=["activation", "gate", "alpha", "clamp", "limit", "bias", "combine"],
)
def test_what_is_lacking_is_named(change: dict[str, Any], words: str) -> None:
    assert experts.lacking(routed(**change)) == words


def test_kernels_that_the_user_asks_for_are_not_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts, "get_moe_runner_backend", lambda: MoeRunnerBackend.FLASHINFER_TRTLLM)
    assert experts.lacking(routed()) == "a --moe-runner-backend other than auto and triton"
    monkeypatch.setattr(experts, "get_moe_a2a_backend", lambda: MoeA2ABackend.DEEPEP)
    assert experts.lacking(routed()) == "--moe-a2a-backend"


@pytest.mark.parametrize("factor", [None, 1.0, 2.5])
@pytest.mark.parametrize("model", ["DeepseekV3ForCausalLM", "BailingMoeV2ForCausalLM"])
@pytest.mark.parametrize("platform", ["cuda", "aiter", "rocm", "cpu"])
def test_the_routed_scaling_factor(
    platform: str, model: str, factor: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it is left to the experts: everywhere by some models, on CUDA by all; AITER's weights have it."""
    config = SimpleNamespace(hf_config=SimpleNamespace(architectures=[model]))
    monkeypatch.setattr(experts.runtime_context, "process_model_config", lambda: config, raising=False)
    monkeypatch.setattr(experts, "is_cuda", lambda: platform == "cuda")
    monkeypatch.setattr(experts, "is_hip", lambda: platform in ("aiter", "rocm"))
    monkeypatch.setenv("SGLANG_USE_AITER", str(int(platform == "aiter")))
    experts._is_left_to_experts.cache_clear()
    found = experts.combined(routed(routed_scaling_factor=factor), torch.ones(2, 4))
    experts._is_left_to_experts.cache_clear()
    is_ours = platform == "cuda" or (platform != "aiter" and model.startswith("Bailing"))
    assert (found.hidden_states == (factor or 1.0 if is_ours else 1.0)).all()


@pytest.mark.parametrize(("shared", "fused"), [("NVFP4", 1), ("FP8", 1), (None, 1), (None, 0)])
def test_shared_experts_among_the_routed_ones(shared: str | None, fused: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang puts them there for GLM-4.5 whatever their precision is."""
    monkeypatch.setattr(nvfp4_moe, "is_dummy", lambda: True)
    config = NvFp4Config.from_config(_W4A16)
    monkeypatch.setattr(type(config), "algorithm", lambda self, layer, prefix: shared)
    layer = routed()
    layer.num_fused_shared_experts = fused
    method = nvfp4_moe.NvFp4MoEMethod(config, layer, "model.layers.1.mlp.experts")
    refuse = pytest.raises(
        ValueError, match=r"mlp\.shared_experts\.gate_up_proj is not NVFP4, and SGLang makes it one of"
    )
    with refuse if fused and shared != "NVFP4" else nullcontext():
        method._refuse_others_among_experts(layer)


@pytest.mark.parametrize("before", [False, True], ids=["weighted after", "weighted before"])
@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_how_tokens_go_to_experts(activation: str, before: bool) -> None:
    layer = routed(activation=activation, apply_router_weight_on_input=before)
    weights, ids = torch.rand(4, 2), torch.randint(8, (4, 2))
    found = experts.routing(layer, SimpleNamespace(topk_output=StandardTopKOutput(weights, ids, torch.rand(4, 8))))
    assert found.pop("topk_weights") is weights
    assert found.pop("topk_ids") is ids
    assert found == {"activation": activation, "apply_router_weight_on_input": before}


def test_experts_that_a_kernel_is_to_choose_are_refused() -> None:
    left = BypassedTopKOutput(torch.rand(4, 16), torch.rand(4, 8), MagicMock())
    with pytest.raises(NotImplementedError, match="serve with --moe-runner-backend auto"):
        experts.routing(routed(apply_router_weight_on_input=False), SimpleNamespace(topk_output=left))


def test_the_names_of_experts_that_are_shared_out() -> None:
    """Of eight experts the second of two ranks has the last four."""
    layer = object.__new__(FusedMoE)
    facts = {"_expert_storage_rank": 1, "_num_local_routed": 4, "_num_global_routed": 8, "_has_fused_shared": False}
    vars(layer).update(facts, num_experts=8, num_local_experts=4)
    names = experts.expert_names(layer, "model.layers.0.mlp.experts")
    assert [names.local(expert) for expert in range(8)] == [-1, -1, -1, -1, 0, 1, 2, 3]
    assert [names.whole(expert) for expert in range(4)] == [4, 5, 6, 7]
    assert names.name(5, "w3") == "model.layers.0.mlp.experts.5.up_proj"


def test_the_ranks_that_share_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of tensor parallelism, those of attention, or those that the layer names."""
    groups = {size: SimpleNamespace(world_size=size, device_group=f"of {size}") for size in (2, 4, 8)}
    monkeypatch.setattr(engine_layers.parallel_state, "get_tp_group", lambda: groups[8])
    monkeypatch.setattr(engine_layers.parallel_state, "get_attn_tp_group", lambda: groups[2])
    layer = SimpleNamespace()
    assert [engine_layers.group_of(layer, ranks) for ranks in (8, 2)] == ["of 8", "of 2"]
    with pytest.raises(ValueError, match="sharded over 4 ranks, and no group"):
        engine_layers.group_of(layer, 4)
    assert engine_layers.group_of(SimpleNamespace(tp_group=groups[4]), 4) == "of 4"


@pytest.mark.parametrize(
    ("change", "loads"),
    [
        ({}, True),
        ({"load_format": "safetensors"}, True),
        ({"load_format": LoadFormat.AUTO}, True),
        ({"load_format": "runai_streamer"}, True),
        ({"load_format": "dummy"}, False),
        ({"load_format": "sharded_state"}, False),
        ({"load_format": LoadFormat.PRESHARDED}, False),
        ({"speculative_draft_load_format": "dummy"}, False),
        ({"cpu_offload_gb": 1}, False),
        ({"offload_group_size": 1}, False),
        ({"weight_cache_mode": "shm"}, False),
        ({"startup_weight_load_mode": "overlap"}, False),
    ],
    ids=["auto", "file", "enum", "stream", "dummy", "shards", "stored", "draft", "moved", "group", "cache", "overlap"],
)
def test_who_fills_the_parameters(change: dict[str, Any], loads: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = SimpleNamespace(**({"load_format": "auto", "cpu_offload_gb": 0} | change))
    monkeypatch.setattr(engine_layers, "get_server_args", lambda: arguments)
    assert engine_layers.loads_tensors() is loads
    is_stored = change.get("load_format") in ("sharded_state", "presharded")
    with pytest.raises(ValueError, match="cannot read layers") if is_stored else nullcontext():
        assert engine_layers.is_dummy() is (change.get("load_format") == "dummy")


@pytest.mark.parametrize("layers", [engine_layers.loads_tensors, engine_layers.is_dummy])
def test_another_servers_parameters_are_refused(layers: Callable[[], bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang copies them into those of a model whose layers nobody prepares."""
    arguments = SimpleNamespace(load_format=LoadFormat.REMOTE_INSTANCE, cpu_offload_gb=0)
    monkeypatch.setattr(engine_layers, "get_server_args", lambda: arguments)
    with pytest.raises(ValueError, match="^--load-format remote_instance cannot read layers that "):
        layers()


def test_what_sglang_decides_of_its_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """It keeps that beside them, for this flag and by itself for some models."""
    given = [f"--model-path={DEMO}", "--device=cpu", "--attention-backend=torch_native", "--tp-size=2"]
    arguments = prepare_server_args([*given, "--enable-flashinfer-allreduce-fusion"])
    getattr(arguments, "resolve_once", lambda: None)()  # 0.5.17 has done so
    monkeypatch.setattr(engine_layers, "get_server_args", lambda: arguments)
    assert engine_layers.server_arguments().flashinfer_allreduce_fusion_backend == "auto"


@pytest.mark.parametrize(
    ("change", "moves"),
    [
        ({}, False),
        ({"enable_eplb": True}, True),
        ({"ep_num_redundant_experts": 2}, True),
        ({"init_expert_location": "experts.json"}, True),
    ],
    ids=["trivial", "balanced", "redundant", "file"],
)
def test_who_moves_experts(change: dict[str, Any], moves: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = {"enable_eplb": False, "ep_num_redundant_experts": 0, "init_expert_location": "trivial"}
    monkeypatch.setattr(engine_layers, "get_server_args", lambda: SimpleNamespace(**(usual | change)))
    assert engine_layers.moves_experts() is moves


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("self_attn.qkv_proj", PtpcFp8LinearMethod),
        ("self_attn.kv_b_proj", UnquantizedLinearMethod),
        ("self_attn.o_proj", UnquantizedLinearMethod),
        ("mlp.gate", UnquantizedLinearMethod),
        ("mlp.gate_up_proj", UnquantizedLinearMethod),
    ],
    ids=["plain", "absorbed", "ignored", "router", "shards ignored"],
)
def test_which_layers_ptpc_quantizes(name: str, kind: type) -> None:
    config = PtpcFp8Config(["o_proj", "gate_proj", "up_proj"])
    assert type(config.get_quant_method(object.__new__(LinearBase), f"model.layers.0.{name}")) is kind


def test_experts_may_be_ignored() -> None:
    config, layer = PtpcFp8Config(["model.layers.0.mlp.experts"]), object.__new__(FusedMoE)
    vars(layer).update(vars(routed()))
    assert config.get_quant_method(layer, "model.layers.0.mlp.experts") is None
    assert isinstance(config.get_quant_method(layer, "model.layers.1.mlp.experts"), PtpcFp8MoEMethod)


def test_ignored_layers_by_the_checkpoints_names() -> None:
    """SGLang's models that are parts of others call layers otherwise."""
    config = PtpcFp8Config(["language_model.model.layers.0.mlp", r"re:.*o_proj"])
    config.apply_weight_name_mapper(WeightsMapper(orig_to_new_prefix={"language_model.model.": "model."}))
    assert config.layers.ignored == ["language_model.model.layers.0.mlp", "model.layers.0.mlp", r"re:.*o_proj"]


@pytest.mark.parametrize(
    "config",
    [
        lambda fused: PtpcFp8Config.from_config({"quant_method": "ptpc_fp8", "packed_modules_mapping": fused}),
        lambda fused: NvFp4Config.from_config({**_W4A16, "packed_modules_mapping": fused}),
    ],
    ids=["ptpc", "nvfp4"],
)
def test_what_models_fuse_is_added_to_what_all_do(config: Callable[[dict[str, list[str]]], Any]) -> None:
    """SGLang's own method would put it in the place of what is known."""
    made = config({"in_proj": ["in_proj_a", "in_proj_b"]})
    made.update_packed_modules_mapping({"fused_qkv_a_proj_with_mqa": ["q_a_proj", "kv_a_proj_with_mqa"]})
    assert set(made.packed_modules_mapping) >= {"qkv_proj", "gate_up_proj", "in_proj", "fused_qkv_a_proj_with_mqa"}
    assert config({"gate_up_proj": ["w1", "w3"]}).packed_modules_mapping["gate_up_proj"] == ["w1", "w3"]


@pytest.mark.parametrize("last", ["weight", "weight_scale", "weight_scale_2", None], ids=str)
@pytest.mark.parametrize(("name", "is_absorbed"), [("kv_b_proj", True), ("o_proj", False)])
def test_what_mla_absorbs_is_decoded(
    name: str, is_absorbed: bool, last: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before weights are processed: by then SGLang's model has taken the weight apart. `last` is the last tensor."""
    monkeypatch.setattr(nvfp4_linear, "is_dummy", lambda: last is None)
    config = NvFp4Config.from_config({"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": []})
    method, layer = nvfp4_linear.NvFp4LinearMethod(config, f"model.layers.0.self_attn.{name}"), torch.nn.Module()
    weight = nvfp4.quantize(torch.randn(32, 64, generator=torch.Generator().manual_seed(0)))

    def copy(param: torch.nn.Parameter, loaded_weight: torch.Tensor) -> None:
        param.data.copy_(loaded_weight)

    method.create_weights(layer, 64, [32], 64, 32, torch.bfloat16, weight_loader=copy)
    tensors = {"weight": weight.codes, "weight_scale": weight.scales, "weight_scale_2": weight.global_scale[0]}
    if last is None:
        layer.weight.data.copy_(weight.codes)
    else:
        for part in sorted(tensors, key=lambda part: part == last):
            parameter = getattr(layer, part)
            parameter.weight_loader(parameter, tensors[part])
        assert (layer.weight.dtype == torch.bfloat16) is is_absorbed
    method.process_weights_after_loading(layer)
    method.process_weights_after_loading(layer)  # which /end_weight_update has it do again
    assert (layer.weight.dtype == torch.bfloat16) is is_absorbed
    assert f"{name} was prepared for its kernels" in layer._derived_weight_cache_error
    if last is None:
        return
    with pytest.raises(
        ValueError, match=rf"\.{name}\.weight was prepared for its kernels when .*: start the server again"
    ):
        layer.weight.weight_loader(layer.weight, weight.codes)
    assert not is_absorbed or torch.equal(layer.weight, weight.dequantize(torch.bfloat16))
    x, bias = torch.randn(3, 64).bfloat16(), torch.randn(32).bfloat16()
    expected = torch.nn.functional.linear(x.float(), weight.dequantize(torch.float32), bias.float())
    torch.testing.assert_close(method.apply(layer, x, bias).float(), expected, rtol=1e-2, atol=0.1)


@pytest.mark.parametrize("hip", [None, "7.1"])
def test_codes_on_rocm_are_no_uint8(hip: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's MLA takes those for MXFP4 there."""
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(nvfp4_linear, "is_dummy", lambda: False)
    method = nvfp4_linear.NvFp4LinearMethod(NvFp4Config.from_config(_W4A16), "model.layers.0.self_attn.o_proj")
    layer, weight = torch.nn.Module(), nvfp4.quantize(torch.randn(32, 64))
    monkeypatch.setattr(method.linear, "weight", lambda layer: weight)
    monkeypatch.setattr(method.linear, "checkpoint", MagicMock(), raising=False)
    method.process_weights_after_loading(layer)
    assert layer.weight.dtype == (torch.int8 if hip else torch.uint8)
    assert torch.equal(
        method.linear.product(layer, torch.eye(64).bfloat16(), None).t(), weight.dequantize(torch.bfloat16)
    )


@pytest.mark.parametrize("hip", [None, "7.1"])
def test_fp8_codes_on_rocm_are_no_e4m3(hip: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang 0.5.17's MLA takes those for block-scaled ones on gfx950, and gives the layer activations to match."""
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(fp8_linear, "is_dummy", lambda: False)
    method = fp8_linear.Fp8LinearMethod(NvFp4Config.from_config(_W4A16), "model.layers.0.self_attn.q_b_proj")
    layer = torch.nn.Module()
    codes, scale = fp8.quantize_rows(torch.randn(32, 64), fp8.OCP)

    def finish(layer: torch.nn.Module) -> None:
        layer.weight, layer.weight_scale = (torch.nn.Parameter(t, requires_grad=False) for t in (codes, scale))
        layer.ptpc_layout = "row"  # type: ignore[assignment]

    monkeypatch.setattr(method.linear, "finish", finish)
    method.process_weights_after_loading(layer)
    monkeypatch.delattr(method.linear, "finish")
    method.process_weights_after_loading(layer)
    assert layer.weight.dtype == (torch.int8 if hip else torch.float8_e4m3fn)
    found = method.apply(layer, torch.eye(64).bfloat16()).t()
    torch.testing.assert_close(found, fp8.dequantize(codes, scale).bfloat16())


@pytest.mark.parametrize("loaded", [True, False], ids=["loaded", "dummy"])
@pytest.mark.parametrize("is_fp8", [True, False], ids=["fp8", "nvfp4"])
@pytest.mark.parametrize(
    "block", ["deepseek_v2.DeepseekV2DecoderLayer", "glm4_moe_lite.Glm4MoeLiteDecoderLayer"], ids=["deepseek", "glm"]
)
def test_what_mla_is_asked_while_it_is_built(
    block: str, is_fp8: bool, loaded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On gfx950 SGLang asks this layer, before a tensor is loaded, in which codes a norm is to give it x."""
    monkeypatch.setattr(torch.version, "hip", "7.1")
    for module in ("deepseek_v2", "deepseek_common.utils"):
        monkeypatch.setattr(f"sglang.srt.models.{module}._is_gfx95_supported", True)
    for module in (fp8_linear, nvfp4_linear):
        monkeypatch.setattr(module, "is_dummy", lambda: not loaded)
    config = NvFp4Config.from_config(_W4A16)
    monkeypatch.setattr(type(config), "algorithm", lambda self, layer, prefix: "FP8" if is_fp8 else "NVFP4")
    name = "model.layers.0.self_attn.fused_qkv_a_proj_with_mqa"
    layer = ReplicatedLinear(64, 32, bias=False, params_dtype=torch.bfloat16, quant_config=config, prefix=name)
    asked = resolve_name(f"sglang.srt.models.{block}._detect_gfx95_quant_format")
    assert asked(SimpleNamespace(self_attn=SimpleNamespace(fused_qkv_a_proj_with_mqa=layer))) == ""

    values = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))
    if is_fp8:
        codes = (values / 4).to(torch.float8_e4m3fn)
        tensors, expected = {"weight": codes, "weight_scale": torch.tensor(0.5)}, codes.float() * 0.5
    else:
        weight = nvfp4.quantize(values)
        tensors = {"weight": weight.codes, "weight_scale": weight.scales, "weight_scale_2": weight.global_scale[0]}
        expected = weight.dequantize(torch.float32)
    for part, tensor in tensors.items() if loaded else ():
        parameter = getattr(layer, part)
        parameter.weight_loader(parameter, tensor)
    layer.quant_method.process_weights_after_loading(layer)
    found, _ = layer(torch.eye(64).bfloat16())
    assert bool(found.isfinite().all())
    if loaded:
        torch.testing.assert_close(found.t(), expected.bfloat16())


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "split"])
def test_a_models_own_loader(fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Qwen3-Next sets one that copies what its checkpoint fuses, and leaves shards to the one that it found."""
    monkeypatch.setattr(nvfp4_linear, "is_dummy", lambda: False)
    method = nvfp4_linear.NvFp4LinearMethod(NvFp4Config.from_config(_W4A16), "model.layers.0.linear_attn.in_proj_ba")
    method.config.packed_modules_mapping["in_proj_ba"] = ["in_proj_b", "in_proj_a"]
    layer, weight = torch.nn.Module(), nvfp4.quantize(torch.randn(32, 64))

    def engines(param: torch.nn.Parameter, loaded_weight: torch.Tensor, shard: int) -> None:
        param.data[shard * 16 : shard * 16 + 16] = loaded_weight

    method.create_weights(layer, 64, [16, 16], 64, 32, torch.bfloat16, weight_loader=engines)
    own = layer.weight.weight_loader

    def models(param: torch.nn.Parameter, loaded_weight: torch.Tensor, shard: int | None = None) -> None:
        if shard is None:
            param.data.copy_(loaded_weight)
        else:
            own(param, loaded_weight, shard)

    for name in ("weight", "weight_scale", "input_scale"):
        getattr(layer, name)._weight_loader = models

    def load(name: str, tensor: torch.Tensor, *shard: int) -> None:
        getattr(layer, name).weight_loader(getattr(layer, name), tensor, *shard)

    for shard in (None,) if fused else (1, 0):
        rows, given = slice(None) if shard is None else slice(shard * 16, shard * 16 + 16), () if fused else (shard,)
        load("weight", weight.codes[rows], *given)
        load("weight_scale", weight.scales[rows], *given)
        load("weight_scale_2", weight.global_scale[0], *given)
    with pytest.raises(TypeError, match=r"in_proj_ba\.weight is torch\.bfloat16 in the checkpoint"):
        load("weight", torch.zeros(32, 64, dtype=torch.bfloat16))
    method.process_weights_after_loading(layer)
    assert torch.equal(
        method.linear.product(layer, torch.eye(64).bfloat16(), None).t(), weight.dequantize(torch.bfloat16)
    )


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn])
def test_codes_of_a_layer_that_is_not_described_as_quantized(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang took FP8 for values, and its Llama passes the scales over, so that nonsense was served."""
    config = NvFp4Config.from_config(_W4A16 | {"ignore": ["*self_attn*"]})
    layer: Any = QKVParallelLinear(
        64, 16, 4, 2, bias=False, quant_config=config, prefix="self_attn.qkv_proj", params_dtype=torch.bfloat16,
        **share(monkeypatch, 0, 1),
    )  # fmt: skip
    given = torch.randn(32, 64, dtype=torch.bfloat16)
    layer.weight.weight_loader(layer.weight, given, "k")
    codes = torch.zeros(32, 32 if dtype == torch.uint8 else 64, dtype=dtype)
    words = rf"^self_attn\.k_proj\.weight is {dtype} in the checkpoint, whose quantization_config does not call"
    with pytest.raises(TypeError, match=words):
        layer.weight.weight_loader(layer.weight, codes, "k")
    assert torch.equal(layer.weight[64:96], given)


@pytest.mark.parametrize("kv_ranks", [1, 2, 4])
def test_a_projection_that_is_fused_on_disk(kv_ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Phi-3 has q, k and v in one tensor, of which SGLang would cut off what is too much. Ranks may have the same heads
    of k and v: where there are more ranks than heads, and where they share contexts."""
    monkeypatch.setattr(nvfp4_linear, "is_dummy", lambda: False)
    config = NvFp4Config.from_config(_W4A16)
    codes = torch.arange(128, dtype=torch.uint8)[:, None].expand(128, 32).contiguous()
    q, k, v = codes.split([64, 32, 32])
    for rank in range(4):
        kv_rank = rank * kv_ranks // 4
        layer: Any = QKVParallelLinear(
            64, 16, 4, 2, bias=False, quant_config=config, prefix="self_attn.qkv_proj",
            **share(monkeypatch, rank, 4, kv_rank, kv_ranks),
        )  # fmt: skip
        for rows in (112, 144):
            with pytest.raises(ValueError, match=r"^self_attn\.qkv_proj\.weight has shape .* needs \(128, 32\)"):
                layer.weight.weight_loader(layer.weight, torch.zeros(rows, 32, dtype=torch.uint8))
        layer.weight.weight_loader(layer.weight, codes)
        k_and_v = [whole.chunk(min(kv_ranks, 2))[kv_rank * min(kv_ranks, 2) // kv_ranks] for whole in (k, v)]
        assert torch.equal(layer.weight, torch.cat([q.chunk(4)[rank], *k_and_v]))


@pytest.mark.parametrize(
    ("target", "ignore", "algorithm"),
    [
        ("Linear", [], "W4A16_NVFP4"),
        ("Linear", ["lm_head"], None),
        ("Linear", ["output"], None),
        ("Linear", ["other"], "W4A16_NVFP4"),
        ("re:.*lm_head", [], "W4A16_NVFP4"),
        ("re:.*lm_head", ["lm_head"], None),
        ("re:.*mlp", [], None),
    ],
)
def test_an_output_head_is_what_a_target_means(target: str, ignore: list[str], algorithm: str | None) -> None:
    """It was a Linear to who wrote the checkpoint; who keeps it may not call it as SGLang does."""
    weights = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": 16}
    groups = {"group_0": {"targets": [target], "weights": weights}}
    described = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "config_groups": groups}
    config = NvFp4Config.from_config({**described, "ignore": ignore})
    assert config.algorithm(object.__new__(ParallelLMHead), "lm_head") == algorithm


@pytest.mark.parametrize("given", ["", ".lm_head"])
@pytest.mark.parametrize("kept", [True, False])
def test_an_output_head_that_its_model_gives_no_name(kept: bool, given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Solar and HunYuan do."""
    monkeypatch.setattr(nvfp4_linear, "is_dummy", lambda: False)
    config = NvFp4Config.from_config(_W4A16 | {"ignore": ["lm_head"] * kept})
    served = config.get_quant_method(object.__new__(ParallelLMHead), given)
    assert isinstance(served, nvfp4_linear.NvFp4LinearMethod) is not kept
    assert kept or served.prefix == "lm_head"  # what messages call it


@pytest.mark.parametrize(
    "kind",
    [Fp8LinearMethod, PtpcFp8LinearMethod, PtpcFp8MoEMethod, nvfp4_linear.NvFp4LinearMethod, nvfp4_moe.NvFp4MoEMethod],
)
def test_a_served_layer_is_not_prepared_again(kind: Any) -> None:
    """As SGLang would have it at the end of a session of updates, each of which was refused."""
    layer = torch.nn.Module()
    engine_layers.once(lambda method, layer: None)(SimpleNamespace(prefix="mlp.experts"), layer)
    object.__new__(kind).process_weights_after_loading(layer)  # which has nothing to prepare it with


@pytest.mark.parametrize("kind", [nvfp4_moe.NvFp4MoEMethod, PtpcFp8MoEMethod])
def test_experts_take_no_adapters(kind: type) -> None:
    """SGLang's layer of adapters asks their method what its own kernels need to know."""
    layer: Any = MagicMock(quant_method=object.__new__(kind), runner=None, moe_runner_config=MoeRunnerConfig())
    layer.quant_method.prefix = "model.layers.0.mlp.experts"
    with pytest.raises(ValueError, match=r"^model\.layers\.0\.mlp\.experts: LoRA adapters of routed experts are not"):
        FusedMoEWithLoRA(layer, MagicMock())


def test_a_draft_shares_the_output_head_of_its_target() -> None:
    """As MTP of DeepSeek and GLM, and EAGLE, do: SGLang puts the target's there when the draft is loaded."""
    config = NvFp4Config.from_config(_W4A16 | {"ignore": ["lm_head", "model.layers.61*"]})
    assert config.get_quant_method(object.__new__(ParallelLMHead), "model.shared_head.head") is None
    facts = SimpleNamespace(architectures=["LlamaForCausalLMEagle"], num_hidden_layers=1)
    config = NvFp4Config.from_config(_W4A16 | {"ignore": ["layers.0.mlp.down_proj"], "hf_config": facts})
    assert config.get_quant_method(object.__new__(ParallelLMHead), "lm_head") is None


@pytest.mark.parametrize(
    ("model", "prefix", "kept"),
    [
        ("Qwen3NextForCausalLMMTP", "model.layers.0.mlp", "mtp"),
        ("Qwen3MoeForCausalLMMTP", "model.layers.0.mlp", "mtp.layers.0"),
        ("ExaoneMoEForCausalLMMTP", "model.layers.0.mlp", "mtp"),
        ("Qwen3_5ForCausalLMMTP", "mtp.layers.0.mlp", "mtp"),
        ("Glm4MoeForCausalLMNextN", "model.decoder.mlp", "model.layers.61"),
        ("Glm4MoeLiteForCausalLMNextN", "model.decoder.mlp", "model.layers.61"),
        ("GlmMoeDsaForCausalLMNextN", "model.decoder.mlp", "model.layers.61"),
        ("DeepseekV3ForCausalLMNextN", "model.decoder.mlp", "model.layers.61"),
        ("BailingMoeForCausalLMNextN", "model.decoder.mlp", "model.layers.61"),
        ("BailingMoeForCausalLMNextN", "model.layers.61.mlp", "model.layers.61"),
        ("Ernie4_5_MoeForCausalLMMTP", "model.mtp_block.mlp", "model.mtp_block.0"),
        ("MiMoMTP", "mlp", "model.mtp_layers.0"),
        ("MiMoV2MTP", "model.decoder.mlp", "model.mtp.layers.0"),
        ("LongcatFlashForCausalLMNextN", "mlp", "model.mtp"),
        ("GigaChat35ForCausalLMNextN", "model.decoder.mlp", "model.layers.61"),
        ("HYV3ForCausalLMNextN", "model.decoder.mlp", "model.layers.61"),
        ("HYV3ForCausalLM", ".model.layers.0.mlp", "model.layers.0"),
        ("HYV4ForCausalLMNextN", ".model.decoder.mlp", "model.mtp_layers.0"),
        ("DeepseekV4ForCausalLMNextN", "model.decoder.mlp", "mtp.0"),
        ("GlmOcrForConditionalGenerationNextN", "model.decoder.mlp", "model.language_model.layers.61"),
        ("IQuestQ1MTP", "model.mtp_layer.mtp_model_layer.mlp", "mtp.mtp_model_layer"),
        ("LlamaForCausalLMEagle", "model.layers.0.mlp", "layers.0"),
        ("Qwen2ForCausalLMEagle", "model.layers.0.mlp", "layers.0"),
        ("Qwen3NextForCausalLM", "model.layers.0.mlp", "model.layers.0"),
    ],
)
@pytest.mark.parametrize("mapped", [None, "model.decoder"], ids=["the checkpoint's", "SGLang's"])
def test_lists_speak_of_a_draft_by_the_checkpoints_names(
    model: str, prefix: str, kept: str, mapped: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang calls the layer of some draft models (MTP) as the first one of their targets, or by a name of its own, and
    may put that into lists, as it does for DeepSeek's."""
    for module in (nvfp4_linear, nvfp4_moe):
        monkeypatch.setattr(module, "is_dummy", lambda: False)
    facts = SimpleNamespace(architectures=[model], num_hidden_layers=61)
    linear, routed_layer = object.__new__(LinearBase), object.__new__(FusedMoE)
    vars(routed_layer).update(vars(routed()))
    for ignore, is_kept in ((f"{kept}*", True), ("lm_head", False)):
        config = NvFp4Config.from_config(_W4A16 | {"ignore": [ignore], "hf_config": facts})
        if mapped:
            config.apply_weight_name_mapper(WeightsMapper(orig_to_new_substr={"model.layers.61": mapped}))
        served = config.get_quant_method(linear, f"{prefix}.down_proj")
        assert isinstance(served, UnquantizedLinearMethod if is_kept else nvfp4_linear.NvFp4LinearMethod)
        experts_method = config.get_quant_method(routed_layer, f"{prefix}.experts")
        assert isinstance(experts_method, nvfp4_moe.NvFp4MoEMethod) is not is_kept
        described = {"quant_method": "ptpc_fp8", "ignored_layers": [ignore.removesuffix("*")], "hf_config": facts}
        online = PtpcFp8Config.from_config(described)
        if mapped:
            online.apply_weight_name_mapper(WeightsMapper(orig_to_new_substr={"model.layers.61": mapped}))
        served = online.get_quant_method(linear, f"{prefix}.down_proj")
        assert isinstance(served, UnquantizedLinearMethod if is_kept else PtpcFp8LinearMethod)
        assert (online.get_quant_method(routed_layer, f"{prefix}.experts") is None) is is_kept


@pytest.mark.parametrize("leaves", [("gate_proj", "up_proj", "down_proj"), ("w1", "w2", "w3")])
def test_experts_that_are_listed_one_by_one(leaves: tuple[str, ...]) -> None:
    """As `quantize --ignore` lists them."""
    experts = "model.layers.1.mlp.experts"
    listed = [f"{experts}.{expert}.{leaf}" for expert in range(2) for leaf in leaves]
    config = NvFp4Config.from_config(_W4A16 | {"ignore": listed})
    assert config.get_quant_method(object.__new__(FusedMoE), experts) is None
    assert not config.is_layer_excluded("model.layers.11.mlp.experts")
    assert not NvFp4Config.from_config(_W4A16 | {"ignore": listed[:1]}).is_layer_excluded(experts)


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("DeepseekV3ForCausalLMNextN", "nvfp4_triton"),
        ("Qwen3_5ForCausalLMMTP", "nvfp4_triton"),
        ("Qwen3NextForCausalLM", "nvfp4_triton"),
        ("DeepseekV3ForCausalLM", "modelopt_fp4"),
    ],
)
def test_what_sglangs_models_know_a_checkpoint_by(model: str, name: str) -> None:
    """Some make layers in 16 bits by SGLang's name of ModelOpt's format, whatever the checkpoint's list says."""
    facts = SimpleNamespace(architectures=[model], num_hidden_layers=61)
    assert NvFp4Config.from_config(_W4A16 | {"hf_config": facts}).get_name() == name


def test_mla_has_one_first_layer() -> None:
    """Of which GLM-4.7-Flash's model does not say that it is two of the checkpoint."""
    names = [f"model.layers.1.self_attn.{name}" for name in ("q_a_proj", "kv_a_proj_with_mqa")]
    weights = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": 16}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    described = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "config_groups": groups}
    config = NvFp4Config.from_config({**described, "ignore": names})
    layer = object.__new__(LinearBase)
    assert config.algorithm(layer, "model.layers.1.self_attn.fused_qkv_a_proj_with_mqa") is None
    assert config.algorithm(layer, "model.layers.2.self_attn.fused_qkv_a_proj_with_mqa") == "W4A16_NVFP4"


@pytest.mark.parametrize("kind", [LinearBase, FusedMoE])
@pytest.mark.parametrize(("ignore", "algorithm"), [([], "W4A16_NVFP4"), (["re:.*down_proj"], None)])
def test_one_format_for_all_layers(kind: type, ignore: list[str], algorithm: str | None) -> None:
    """As older versions of llm-compressor say it. Projections of experts are quantized alike, or left to SGLang."""
    weights = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": 16}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    described = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "config_groups": groups}
    config = NvFp4Config.from_config({**described, "ignore": ignore})
    prefix = "model.layers.0.mlp." + ("down_proj" if kind is LinearBase else "experts")
    assert config.algorithm(object.__new__(kind), prefix) == algorithm


@pytest.mark.parametrize(("wish", "words"), [("1", "--enable-deterministic-inference is set"), ("0", None)])
def test_determinism_leaves_the_all_reduce_to_sglang(
    wish: str, words: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_ENABLE_DETERMINISTIC_INFERENCE", wish)
    monkeypatch.setenv(communicator.QUANTIZATION, "FP4")
    monkeypatch.setattr(communicator, "connect", connect := MagicMock(return_value=None))
    monkeypatch.setattr(communicator, "better_left_to", lambda *given: None)
    monkeypatch.setattr(communicator, "members", MagicMock())
    communicator.attach(MagicMock(), SimpleNamespace(world_size=2, unique_name="tp:0", qr_comm=None))
    _, _, refuse, _ = connect.call_args.args
    reason = refuse(MagicMock())
    assert (reason is None) if words is None else reason.startswith(words)


_W4A16 = {"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4", "group_size": 16, "ignore": []}


@pytest.mark.parametrize("wish", ["1", "0"])
def test_determinism_reaches_the_layers(wish: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dense layers then do not depend on the batch; what cannot do without is refused."""
    asked = wish == "1"
    monkeypatch.setenv("SGLANG_ENABLE_DETERMINISTIC_INFERENCE", wish)
    monkeypatch.setattr(nvfp4_linear, "is_dummy", lambda: False)
    monkeypatch.setattr(fp8_linear, "is_dummy", lambda: False)
    monkeypatch.setattr(nvfp4_moe, "is_dummy", lambda: False)
    config = NvFp4Config.from_config(_W4A16)
    for module, name, method, given in (
        (nvfp4_linear, "NvFp4Linear", nvfp4_linear.NvFp4LinearMethod, ()),
        (fp8_linear, "Fp8Linear", Fp8LinearMethod, ()),
        (nvfp4_moe, "NvFp4Experts", nvfp4_moe.NvFp4MoEMethod, (routed(),)),
    ):
        monkeypatch.setattr(module, name, served := MagicMock())
        method(config, *given, "model.layers.0.mlp.down_proj")
        assert served.call_args.kwargs["batch_invariant"] is asked
    assert PtpcFp8MoEMethod(PtpcFp8Config(), routed(), "model.layers.0.mlp.experts").batch_invariant is asked
    monkeypatch.setenv("LLM_QUANT_ROCM_NVFP4_PREFILL", "fp8")
    words = "PREFILL=fp8 chooses between FP8 and exact products by batch size"
    with pytest.raises(ValueError, match=words) if asked else nullcontext():
        NvFp4Config.from_config(_W4A16)

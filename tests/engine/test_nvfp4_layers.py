# SPDX-License-Identifier: Apache-2.0
"""What served layers hold and do, and which layers are refused; without an engine."""

import gc
import inspect
import weakref
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor import parameter
from vllm.model_executor.layers import linear
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.model_loader.reload.meta import get_numel_loaded
from vllm.model_executor.model_loader.reload.utils import get_layer_size
from vllm.model_executor.models import utils
from vllm.utils.torch_utils import set_default_torch_dtype

from llm_quant_rocm import ops
from llm_quant_rocm.checkpoint.expert_tensors import ExpertTensors
from llm_quant_rocm.checkpoint.nvfp4_tensors import MODELOPT as TENSORS
from llm_quant_rocm.checkpoint.nvfp4_tensors import keep, kept
from llm_quant_rocm.formats import nvfp4
from llm_quant_rocm_vllm import fusion
from llm_quant_rocm_vllm.experts import expert_names
from llm_quant_rocm_vllm.fp8_linear import Fp8LinearMethod
from llm_quant_rocm_vllm.nvfp4 import NvFp4Config
from llm_quant_rocm_vllm.nvfp4_linear import NvFp4LinearMethod

MODELOPT = {
    "quant_method": "modelopt",
    "quant_algo": "NVFP4",
    "ignore": ["lm_head", "*q_a_proj", "*kv_a_proj_with_mqa"],
}
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "nvfp4-pack-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
            "format": "nvfp4-pack-quantized",
        }
    },
}
FUSED = {"fused_qkv_a_proj": ["q_a_proj", "kv_a_proj_with_mqa"], "gate_up_proj": ["gate_proj", "up_proj"]}
N, K = 96, 128


def weight(rows: int = N, columns: int = K) -> nvfp4.NvFp4Weight:
    return nvfp4.quantize(torch.randn(rows, columns, generator=torch.Generator().manual_seed(1)))


def method(prefix: str, **settings: Any) -> NvFp4LinearMethod:
    with set_current_vllm_config(VllmConfig()):
        return NvFp4LinearMethod(NvFp4Config.from_config(MODELOPT | settings), prefix)


def linear_layer() -> LinearBase:
    """Enough of one to be recognized."""
    return LinearBase.__new__(LinearBase)


@pytest.mark.parametrize("layout", ["modelopt", "compressed-tensors"])
@pytest.mark.parametrize("names", [("weight",), ("weight", "weight_scale", "input_scale")], ids="+".join)
def test_a_models_own_loader_of_rows(names: tuple[str, ...], layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mamba-2 sets one where all ranks have its groups: of what it knows for the weight and for scales of its rows."""
    monkeypatch.setattr(parameter, "get_tensor_model_parallel_rank", lambda: 0)
    monkeypatch.setattr(parameter, "get_tensor_model_parallel_world_size", lambda: 1)

    def twice(param: torch.Tensor, loaded_weight: torch.Tensor) -> None:
        for half in param.data.view(2, *loaded_weight.shape):
            half.copy_(loaded_weight)

    prefix, given = "model.layers.0.mixer.in_proj", weight()
    if layout == "modelopt":
        served = method(prefix)
        scalars = {"weight_scale_2": given.global_scale[0], "input_scale": torch.tensor(1.0)}
        tensors = {"weight": given.codes, "weight_scale": given.scales, **scalars}
    else:
        with set_current_vllm_config(VllmConfig()):
            served = NvFp4LinearMethod(NvFp4Config.from_config(COMPRESSED), prefix)
        divisor = given.global_scale[:1].reciprocal()
        tensors = {"weight_packed": given.codes, "weight_scale": given.scales, "weight_global_scale": divisor}
    layer = torch.nn.Module()
    served.create_weights(layer, K, [2 * N], K, 2 * N, torch.bfloat16, weight_loader=MagicMock())
    for name in names:
        if hasattr(layer, name):
            getattr(layer, name).weight_loader = twice
    for name, tensor in tensors.items():
        getattr(layer, name).weight_loader(getattr(layer, name), tensor)
    served.process_weights_after_loading(layer)
    half = given.dequantize(torch.bfloat16)
    found = served.apply(layer, torch.eye(K, dtype=torch.bfloat16)).t()
    torch.testing.assert_close(found, torch.cat([half, half]), rtol=2**-8, atol=0)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_projection_that_is_fused_on_disk(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Phi-3 has q, k and v in one tensor. vLLM would cut one that is too long, and end at one that is too short without
    its name. Of four ranks two have the same heads of k and v."""
    q, k, v = (weight(16 * heads, K) for heads in (4, 2, 2))
    for rank in range(ranks):
        for module in (linear, parameter):
            monkeypatch.setattr(module, "get_tensor_model_parallel_rank", lambda rank=rank: rank)
            monkeypatch.setattr(module, "get_tensor_model_parallel_world_size", lambda: ranks)
        with set_current_vllm_config(VllmConfig()):
            layer: Any = linear.QKVParallelLinear(
                K, 16, 4, 2, bias=False, quant_config=NvFp4Config.from_config(MODELOPT), prefix="self_attn.qkv_proj"
            )
        for tensor, dtype in (("weight", torch.uint8), ("weight_scale", torch.float8_e4m3fn)):
            param = getattr(layer, tensor)
            for rows in (112, 144):
                broken = torch.zeros(rows, param.shape[1], dtype=dtype)
                with pytest.raises(ValueError, match=rf"^self_attn\.qkv_proj\.{tensor} has shape .* needs \(128, "):
                    param.weight_loader(param, broken)
        layer.weight.weight_loader(layer.weight, torch.cat([q.codes, k.codes, v.codes]))
        share = [whole.codes.chunk(min(ranks, whole.n // 16)) for whole in (q, k, v)]
        mine = [pieces[rank * len(pieces) // ranks] for pieces in share]
        assert torch.equal(layer.weight, torch.cat(mine))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn])
def test_codes_of_a_layer_that_is_not_described_as_quantized(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM took FP8 for values, and Qwen3-MoE's model passes the scales over, so that nonsense was served."""
    for module in (linear, parameter):
        monkeypatch.setattr(module, "get_tensor_model_parallel_rank", lambda: 0)
        monkeypatch.setattr(module, "get_tensor_model_parallel_world_size", lambda: 1)
    config = NvFp4Config.from_config({**MODELOPT, "ignore": ["*self_attn*"]})
    config.packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    options: Any = {"bias": False, "quant_config": config, "params_dtype": torch.bfloat16}
    with set_current_vllm_config(VllmConfig()):
        qkv: Any = linear.QKVParallelLinear(K, 16, 4, 2, prefix="self_attn.qkv_proj", **options)
        o: Any = linear.RowParallelLinear(64, K, prefix="self_attn.o_proj", **options)
    for layer, rows, columns, shard, name in ((qkv, 32, K, ("k",), "k_proj"), (o, K, 64, (), "o_proj")):
        given = torch.randn(rows, columns, dtype=torch.bfloat16)
        layer.weight.weight_loader(layer.weight, given, *shard)
        codes = torch.zeros(rows, columns // (2 if dtype == torch.uint8 else 1), dtype=dtype)
        words = rf"^self_attn\.{name}\.weight is {dtype} in the checkpoint, whose quantization_config does not call"
        with pytest.raises(TypeError, match=words):
            layer.weight.weight_loader(layer.weight, codes, *shard)
        held = layer.weight[64:96] if shard else layer.weight
        assert torch.equal(held, given)


@pytest.mark.parametrize("kind", [NvFp4LinearMethod, Fp8LinearMethod])
def test_vllm_counts_what_it_reloads(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It serves a layer as soon as it is complete by that count, and keeps the tensors of all others until the end."""
    monkeypatch.setattr(parameter, "get_tensor_model_parallel_rank", lambda: 0)
    monkeypatch.setattr(parameter, "get_tensor_model_parallel_world_size", lambda: 1)
    with set_current_vllm_config(VllmConfig()):
        served = kind(NvFp4Config.from_config(MODELOPT), "model.layers.0.self_attn.o_proj")
    layer = torch.nn.Module()

    def copy(param: torch.Tensor, loaded_weight: torch.Tensor) -> None:
        param.data.copy_(loaded_weight)

    served.create_weights(layer, K, [N, N], K, 2 * N, torch.bfloat16, weight_loader=copy)
    count = 0
    for param in layer.parameters():
        tensor = torch.zeros(param.shape, dtype=param.dtype) if param.dim() == 2 else torch.tensor(1.0)
        if param.numel():
            arguments = inspect.signature(param.weight_loader).bind(param, tensor)
            count += get_numel_loaded(param.weight_loader, arguments)[0]
    assert count == get_layer_size(layer)


@pytest.mark.parametrize("kind", [NvFp4LinearMethod, Fp8LinearMethod])
def test_vllm_has_no_dtype_to_warn_of(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It makes models in their own dtype, and compares it with that of every tensor of a layer that is not fused."""
    monkeypatch.setattr(parameter, "get_tensor_model_parallel_rank", lambda: 0)
    monkeypatch.setattr(parameter, "get_tensor_model_parallel_world_size", lambda: 1)
    monkeypatch.setattr(utils.logger, "warning", warning := MagicMock())
    with set_current_vllm_config(VllmConfig()):
        served = kind(NvFp4Config.from_config(MODELOPT), "o_proj")
    model: Any = torch.nn.Module()
    model.o_proj = torch.nn.Module()
    with set_default_torch_dtype(torch.bfloat16):
        served.create_weights(model.o_proj, K, [N], K, N, torch.bfloat16, weight_loader=lambda param, tensor: None)
    given, one = weight(), torch.tensor(1.0, dtype=torch.float32)
    if kind is NvFp4LinearMethod:
        tensors = {"weight": given.codes, "weight_scale": given.scales, "weight_scale_2": one}
    else:
        tensors = {"weight": torch.zeros(N, K, dtype=torch.float8_e4m3fn), "weight_scale": one}
    tensors["input_scale"] = one
    loaded = utils.AutoWeightsLoader(model).load_weights((f"o_proj.{name}", tensor) for name, tensor in tensors.items())
    assert loaded == {f"o_proj.{name}" for name in tensors}
    warning.assert_not_called()


def test_compiled_models_are_known_by_how_layers_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM keeps their graphs, in which that is constants."""
    hashes = set()
    for settings in ({}, {"prefill": "fp8"}, {"activations": "nvfp4"}):
        served = method("o_proj", **settings)
        monkeypatch.setattr(served.linear, "finish", lambda layer: keep(layer, weight()))
        served.process_weights_after_loading(torch.nn.Module())
        served.vllm_config.model_config = MagicMock()
        served.vllm_config.model_config.compute_hash = lambda: "model"
        hashes.add(served.vllm_config.compute_hash())
    assert len(hashes) == 3


def test_any_layout_is_kept_as_it_was_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels arrange codes in other shapes and dtypes; vLLM's MLA attention wants to see bytes."""
    words = torch.arange(6 * 128, dtype=torch.int32).view(6, 128)
    scales, global_scale = torch.zeros(7, 9, dtype=torch.uint8), torch.ones(N)
    prepared = ops.PreparedNvFp4Weight(words, scales, global_scale, "another", N, K)
    monkeypatch.setattr(ops, "prepare_nvfp4_weight", lambda given, gate_up: prepared)
    layer = torch.nn.Module()
    keep(layer, weight(), "w13_")
    assert layer.w13_weight.dtype == torch.uint8
    assert {name for name, _ in layer.named_parameters()} == {
        f"w13_weight{end}" for end in ("", "_scale", "_global_scale")
    }
    again = kept(layer, "w13_")
    assert (again.layout, again.n, again.k) == ("another", N, K)
    assert again.codes.dtype == torch.int32
    for name in ("codes", "scales", "global_scale"):
        assert torch.equal(getattr(again, name), getattr(prepared, name))
        assert getattr(again, name).data_ptr() == getattr(prepared, name).data_ptr()


def test_runs_are_a_parameter_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """When vLLM loads weights anew it copies parameters into those that it has; a buffer it would leave as it is."""
    given, runs = weight(), torch.tensor([[float(N), 0.5]] + [[0.0, 0.0]] * 7, dtype=torch.float64)
    prepared = ops.PreparedNvFp4Weight(given.codes, given.scales, given.global_scale, "row", N, K, runs)
    monkeypatch.setattr(ops, "prepare_nvfp4_weight", lambda given, gate_up: prepared)
    layer = torch.nn.Module()
    keep(layer, given)
    assert "weight_runs" in dict(layer.named_parameters())
    assert torch.equal(kept(layer).runs, runs) and kept(layer).runs.data_ptr() == runs.data_ptr()
    served = method("model.layers.0.self_attn.o_proj")
    compiled = torch.compile(lambda x: served.apply(layer, x), fullgraph=True, backend="aot_eager")
    x = torch.randn(3, K).bfloat16()
    assert torch.equal(compiled(x), served.apply(layer, x))


def test_the_checkpoints_tensors_are_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    """When the kernels have a layout of their own, no layer holds a weight twice."""

    def arrange(given: nvfp4.NvFp4Weight, gate_up: bool = False) -> ops.PreparedNvFp4Weight:
        return ops.PreparedNvFp4Weight(
            given.codes.clone(), given.scales.clone(), given.global_scale.clone(), "another", given.n, given.k
        )

    monkeypatch.setattr(ops, "prepare_nvfp4_weight", arrange)
    served, layer, given = method("o_proj"), torch.nn.Module(), weight()
    served.linear.checkpoint = SimpleNamespace(
        matrix=lambda name: getattr(layer, name).data,
        refuse_missing=lambda: None,
        pieces=lambda: [("o_proj.weight", slice(0, N))],
        forget=lambda: None,
    )
    tensors = {"weight": given.codes, "weight_scale": given.scales, "weight_scale_2": given.global_scale[:1].clone()}
    for name, tensor in {**tensors, "input_scale": torch.empty(0)}.items():
        layer.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))
    alive = [weakref.ref(tensor.untyped_storage()) for tensor in tensors.values()]
    expected = given.codes.clone()
    del given, tensors, tensor
    served.process_weights_after_loading(layer)
    gc.collect()
    assert [reference() for reference in alive] == [None] * 3
    assert set(layer._parameters) == {"weight", "weight_scale", "weight_global_scale"}
    assert torch.equal(kept(layer).codes, expected)


@pytest.mark.parametrize("settings", [{}, {"activations": "nvfp4"}], ids=["16bit", "nvfp4"])
def test_a_layer_is_one_graph_with_one_operator(settings: dict[str, str]) -> None:
    layer = torch.nn.Module()
    keep(layer, weight())
    layer.input_global_scale = torch.nn.Parameter(torch.tensor(500.0), requires_grad=False)
    served = method("model.layers.0.self_attn.o_proj", **settings)
    calls: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        calls.extend(str(node.target) for node in graph.graph.nodes if str(node.target).startswith("llm_quant_rocm."))
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(lambda x: served.apply(layer, x), fullgraph=True, dynamic=True, backend=backend)
    for rows in (3, 7, 70):
        x = torch.randn(rows, K, generator=torch.Generator().manual_seed(rows)).bfloat16()
        assert torch.equal(compiled(x), served.apply(layer, x))
    assert calls == ["llm_quant_rocm.nvfp4_gemm.default"], "one operator, compiled once for any number of rows"


def test_the_layer_that_mla_reads_is_exact() -> None:
    """It is served an identity matrix, in which FP8 or 4-bit activations would round the weight."""
    layer, given = torch.nn.Module(), weight()
    keep(layer, given)
    identity = torch.eye(K, dtype=torch.bfloat16)
    options = {"prefill": "fp8", "activations": "nvfp4"}
    served = method("model.layers.0.self_attn.kv_b_proj", **options).apply(layer, identity)
    assert torch.equal(served, given.dequantize(torch.bfloat16).t())
    rounded = method("model.layers.0.self_attn.o_proj", prefill="fp8").apply(layer, identity)
    assert not torch.equal(rounded, served)


@pytest.mark.parametrize(
    ("prefix", "excluded"),
    [
        ("model.layers.0.self_attn.fused_qkv_a_proj", True),
        ("model.layers.0.mlp.gate_up_proj", False),
        ("model.layers.0.self_attn.q_a_proj", True),
        ("model.layers.0.self_attn.q_b_proj", False),
        ("lm_head", True),
    ],
)
def test_wildcards_name_the_shards_of_fused_layers(prefix: str, excluded: bool) -> None:
    config = NvFp4Config.from_config(MODELOPT)
    config.packed_modules_mapping = FUSED
    assert config.is_layer_excluded(prefix) is excluded
    with set_current_vllm_config(VllmConfig()):
        served = config.get_quant_method(linear_layer(), prefix)
    assert isinstance(served, UnquantizedLinearMethod if excluded else NvFp4LinearMethod)


def test_half_a_fused_layer_cannot_be_excluded() -> None:
    config = NvFp4Config.from_config(MODELOPT | {"ignore": ["*up_proj"]})
    config.packed_modules_mapping = FUSED
    with pytest.raises(ValueError, match=r"keeps mlp\.up_proj in 16 bits, but not all of mlp\.gate_proj, mlp\.up_proj"):
        config.is_layer_excluded("mlp.gate_up_proj")


def test_an_algorithm_that_nobody_knows_is_refused() -> None:
    """vLLM would load the layer as one in 16 bits."""
    layers = {"model.a": {"quant_algo": "W4A8_AWQ"}, "model.b": {"quant_algo": "NVFP4"}}
    config = NvFp4Config.from_config(
        {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    )
    assert isinstance(config.get_quant_method(linear_layer(), "model.c"), UnquantizedLinearMethod)
    with pytest.raises(ValueError, match=r"^quant_algo W4A8_AWQ of model\.a is known neither to nvfp4_triton"):
        config.get_quant_method(linear_layer(), "model.a")


@pytest.mark.parametrize("wish", ["0", "1"])
def test_a_wish_for_batch_invariance_reaches_the_operator(wish: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", wish)
    layer, given = torch.nn.Module(), []
    keep(layer, weight())
    monkeypatch.setattr(ops, "nvfp4_gemm", lambda *operands, **options: given.append(options["batch_invariant"]))
    method("model.layers.0.self_attn.o_proj").apply(layer, torch.randn(3, K).bfloat16())
    assert given == [wish == "1"]


def test_prefill_in_fp8_is_not_batch_invariant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    NvFp4Config.from_config(MODELOPT).maybe_update_config("absent")
    with pytest.raises(ValueError, match="LLM_QUANT_ROCM_NVFP4_PREFILL=fp8 chooses .* by batch size"):
        NvFp4Config.from_config(MODELOPT | {"prefill": "fp8"}).maybe_update_config("absent")


def test_a_head_that_is_the_embedding_keeps_its_bias() -> None:
    layer, embedding = torch.nn.Module(), torch.nn.Embedding(N, K)
    keep(layer, weight())
    layer.bias = bias = torch.nn.Parameter(torch.zeros(N))
    assert method("lm_head").tie_weights(layer, embedding) is layer
    assert dict(layer.named_parameters()).keys() == {"weight", "bias"}
    assert layer.weight is embedding.weight and layer.bias is bias


@pytest.mark.parametrize("ranks", [1, 2])
def test_who_lets_vllm_fuse(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """FP8 layers begin with a quantization; NVFP4 layers have only an all-reduce before the norm."""
    monkeypatch.setattr(fusion, "enable", enable := MagicMock())
    engine = VllmConfig()
    monkeypatch.setattr(engine.parallel_config, "tensor_parallel_size", ranks)
    config = NvFp4Config.from_config(MODELOPT)
    with set_current_vllm_config(engine):
        NvFp4LinearMethod(config, "model.layers.0.mlp.down_proj")
        assert enable.call_count == ranks - 1
        Fp8LinearMethod(config, "model.layers.0.mlp.down_proj")
        assert enable.call_count == ranks


def fp8_layer(codes: torch.Tensor, scales: torch.Tensor) -> tuple[Fp8LinearMethod, torch.nn.Module]:
    """A layer of FP8 shards a and b, 2 rows each, as loading leaves it."""
    with set_current_vllm_config(VllmConfig()):
        served = Fp8LinearMethod(NvFp4Config.from_config(MODELOPT), "ab")
    served.linear.checkpoint = SimpleNamespace(
        matrix=lambda name: getattr(layer, name).data,
        refuse_missing=lambda: None,
        pieces=lambda: [("a.weight", slice(0, 2)), ("b.weight", slice(2, 4))],
        forget=lambda: None,
    )
    layer = torch.nn.Module()
    for name, tensor in (("weight", codes), ("weight_scale", scales), ("input_scale", torch.empty(0))):
        layer.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))
    return served, layer


def test_fp8_rows_keep_the_scale_of_their_shard() -> None:
    codes = torch.randn(4, 32, generator=torch.Generator().manual_seed(0)).to(torch.float8_e4m3fn)
    served, layer = fp8_layer(codes, torch.tensor([0.5, 4.0]))
    served.process_weights_after_loading(layer)
    expected = codes.float() * torch.tensor([0.5, 0.5, 4.0, 4.0]).unsqueeze(1)
    got = served.apply(layer, torch.eye(32, dtype=torch.bfloat16))
    # 1 / 448 * 448: an identity's row is exact in FP8 but for its scale.
    torch.testing.assert_close(got.float(), expected.t(), rtol=2**-8, atol=0)


@pytest.mark.parametrize("wish", ["0", "1"])
def test_a_wish_for_batch_invariance_reaches_fp8_layers(wish: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", wish)
    served, layer = fp8_layer(torch.ones(4, 32).to(torch.float8_e4m3fn), torch.tensor([0.5, 4.0]))
    seen = []
    monkeypatch.setattr(ops, "ptpc_linear", lambda *operands, **options: seen.append(options["batch_invariant"]))
    monkeypatch.setattr(
        ops,
        "prepare_ptpc_weight",
        lambda codes, batch_invariant: seen.append(batch_invariant) or (codes, "row"),
    )
    served.process_weights_after_loading(layer)
    served.apply(layer, torch.eye(32, dtype=torch.bfloat16))
    assert seen == 2 * [wish == "1"]


@pytest.mark.parametrize(
    ("code", "scale", "words"),
    [
        (1.0, 0.0, "b.weight_scale is 0; a scale is positive and finite"),
        (1.0, float("nan"), "b.weight_scale is nan"),
        (float("nan"), 1.0, "b.weight holds NaN"),
    ],
    ids=["zero", "nan-scale", "nan-code"],
)
def test_broken_fp8_layers_are_named(code: float, scale: float, words: str) -> None:
    codes = torch.ones(4, 32)
    codes[3, 5] = code
    served, layer = fp8_layer(codes.to(torch.float8_e4m3fn), torch.tensor([1.0, scale]))
    with pytest.raises(ValueError, match=words):
        served.process_weights_after_loading(layer)


PROJECTIONS = {"ckpt_gate_proj_name": "gate_proj", "ckpt_down_proj_name": "down_proj", "ckpt_up_proj_name": "up_proj"}


def expert_tensors(**attributes: Any) -> ExpertTensors:
    layer = SimpleNamespace(**PROJECTIONS, **attributes)
    names = expert_names(layer, "model.experts")
    return ExpertTensors(layer, "model.experts", names, TENSORS, lambda *args: None, {})


def test_experts_in_one_tensor_are_refused() -> None:
    load = expert_tensors().matrix_loader("weight", torch.uint8, (96, 64))
    with pytest.raises(NotImplementedError, match=r"^model\.experts has one tensor for all experts"):
        load(None, torch.zeros(8, 96, 64, dtype=torch.uint8), "w13_weight", "w1", 0)


def test_input_scales_of_experts() -> None:
    """Those of this rank's experts (here 2 and 3 of 4), and of gate and up the one under which neither saturates."""
    tensors = expert_tensors(_expert_map=torch.tensor([-1, -1, 0, 1]))
    load = tensors.input_scale_loader()
    for expert in range(4):
        for shard, value in (("w1", 0.25), ("w3", 0.5), ("w2", 2.0)):
            assert load(None, torch.tensor([value * 2**expert]), "input_scale", shard, expert, True) is True
    assert torch.equal(tensors.input_global_scales("w13_", 2), torch.tensor([0.5, 0.25]))
    assert torch.equal(tensors.input_global_scales("w2_", 2), torch.tensor([0.125, 0.0625]))
    with pytest.raises(ValueError, match=r"^model\.experts\.0\.down_proj\.input_scale is missing from the checkpoint"):
        expert_tensors(_expert_map=None).input_global_scales("w2_", 4)
    load(None, torch.tensor(0.0), "input_scale", "w2", 3)
    with pytest.raises(ValueError, match=r"^model\.experts\.3\.down_proj\.input_scale is not positive and finite"):
        tensors.input_global_scales("w2_", 2)
    with pytest.raises(ValueError, match=r"^model\.experts\.1\.up_proj\.input_scale has shape \(2,\); it is one value"):
        load(None, torch.ones(2), "input_scale", "w3", 1)


def test_a_head_in_fp32() -> None:
    """vLLM computes the heads of classifiers so, whatever their weights are."""
    layer, given = torch.nn.Module(), weight()
    keep(layer, given)
    x, bias = torch.randn(3, K), torch.randn(N)
    found = method("score").apply(layer, x, bias)
    assert found.dtype == torch.float32
    expected = method("score").apply(layer, x.bfloat16(), bias.bfloat16())
    assert torch.equal(found, expected.float())

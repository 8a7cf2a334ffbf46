# SPDX-License-Identifier: Apache-2.0
"""One layer of ptpc_fp8 as its tensors arrive, by SGLang's own rules of which expert is where."""

import re
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from conftest import share
from sglang.srt.layers.linear import LinearBase, QKVParallelLinear, RowParallelLinear
from sglang.srt.layers.moe.fused_moe_triton import FusedMoE
from sglang.srt.models.transformers import TransformersForCausalLM, replace_linear_class

from llm_quant_rocm import ops
from llm_quant_rocm.checkpoint import warm_layers
from llm_quant_rocm.formats import fp8
from llm_quant_rocm_sglang import engine_layers, fusion, ptpc_linear, ptpc_moe
from llm_quant_rocm_sglang import experts as experts_of_sglang
from llm_quant_rocm_sglang.ptpc_fp8 import PtpcFp8Config

ATTENTION, EXPERTS = "model.layers.0.self_attn.qkv_proj", "model.layers.0.mlp.experts"
HIDDEN, INNER = 32, 16


@pytest.fixture(autouse=True)
def loading(monkeypatch: pytest.MonkeyPatch) -> None:
    """As SGLang loads by itself."""
    for module in (ptpc_linear, ptpc_moe):
        monkeypatch.setattr(module, "loads_tensors", lambda: True)
        monkeypatch.setattr(module, "device_type", lambda: "cpu")
    monkeypatch.setattr(ptpc_moe, "moves_experts", lambda: False)
    monkeypatch.setattr(ptpc_moe, "lacking", lambda layer: None)


def layer_of(kind: type, **facts: Any) -> Any:
    made = object.__new__(kind)
    torch.nn.Module.__init__(made)
    vars(made).update(facts)
    return made


def linear() -> tuple[Any, ptpc_linear.PtpcFp8LinearMethod]:
    """q, k and v of 16 rows each."""
    layer, method = layer_of(LinearBase), ptpc_linear.PtpcFp8LinearMethod(PtpcFp8Config(), ATTENTION)

    def loader(weight: torch.nn.Parameter, tensor: torch.Tensor, shard: str) -> None:
        weight.data["qkv".index(shard) * 16 :][:16] = tensor

    method.create_weights(layer, HIDDEN, [16, 16, 16], HIDDEN, 48, torch.bfloat16, weight_loader=loader)
    return layer, method


def tensor(rows: int, columns: int) -> torch.Tensor:
    return torch.randn(rows, columns).bfloat16()


@pytest.mark.parametrize("wish", ["0", "1"])
def test_a_wish_for_determinism_reaches_the_operators(wish: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is a norm told to make codes: its own kernel's bits would be others."""
    monkeypatch.setenv("SGLANG_ENABLE_DETERMINISTIC_INFERENCE", wish)
    layer, method = linear()
    for shard in "qkv":
        layer.weight.weight_loader(layer.weight, tensor(16, HIDDEN), shard)
    method.process_weights_after_loading(layer)
    seen = []
    monkeypatch.setattr(ops, "ptpc_linear", lambda *operands, **options: seen.append(options["batch_invariant"]))
    x, norm = tensor(3, HIDDEN), SimpleNamespace(quantizes=False)
    fusion._mark(x, norm)
    method.apply(layer, x)
    assert seen == [wish == "1"]
    assert norm.quantizes == (wish == "0")


@pytest.mark.parametrize("hip", [None, "7.1"])
def test_a_layer_is_quantized_with_its_last_shard(hip: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", hip)
    layer, method = linear()
    shards = {shard: tensor(16, HIDDEN) for shard in "vqk"}
    for shard, values in shards.items():
        assert layer.weight.is_meta
        layer.weight.weight_loader(layer.weight, values, shard)
    codes, scale = fp8.quantize_rows(torch.cat([shards[shard] for shard in "qkv"]), fp8.OCP)
    assert layer.weight.dtype == (torch.int8 if hip else torch.float8_e4m3fn), "to SGLang's models"
    assert torch.equal(layer.weight.view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(layer.weight_scale, scale)
    method.process_weights_after_loading(layer)
    assert layer._derived_weight_cache_error.startswith(f"{ATTENTION} was prepared for its kernels")
    with pytest.raises(
        ValueError, match=f"{ATTENTION}.weight was prepared for its kernels when .*: start the server again"
    ):
        layer.weight.weight_loader(layer.weight, shards["q"], "q")


def test_a_layer_in_a_model_of_transformers() -> None:
    """SGLang puts parameters of its own in the place of those that it finds on the meta device there."""
    prefix = "model.layers.0.mlp.down_proj"
    layer = replace_linear_class(torch.nn.Linear(HIDDEN, 48, bias=False), "replicate", PtpcFp8Config(), prefix=prefix)
    TransformersForCausalLM._init_parameters(MagicMock(), layer)
    assert layer.weight.untyped_storage().nbytes() < 48, "its memory comes with its tensor"
    with pytest.raises(ValueError, match=rf"^{re.escape(prefix)}\.weight is missing"):
        layer.quant_method.process_weights_after_loading(layer)
    values = tensor(48, HIDDEN)
    layer.weight.weight_loader(layer.weight, values)
    layer.quant_method.process_weights_after_loading(layer)
    codes, scale = fp8.quantize_rows(values, fp8.OCP)
    x = tensor(4, HIDDEN)
    assert torch.equal(layer(x), ops.ptpc_linear(x, codes, scale, None, layer.ptpc_layout))


def test_a_layer_that_sglang_fills_once_it_is_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    """As --load-format presharded and sharded_state do, whatever was in the memory of the weight before."""
    monkeypatch.setattr(ptpc_linear, "loads_tensors", lambda: False)
    torch.use_deterministic_algorithms(True)  # memory is filled with NaN
    try:
        layer, method = linear()
    finally:
        torch.use_deterministic_algorithms(False)
    method.process_weights_after_loading(layer)
    codes, scale = fp8.quantize_rows(tensor(48, HIDDEN), fp8.OCP)
    for name, stored in (("weight", codes), ("weight_scale", scale)):
        layer.state_dict()[name].copy_(stored)
    method.process_weights_after_loading(layer)  # which /end_weight_update has it do again
    x = tensor(4, HIDDEN)
    assert torch.equal(method.apply(layer, x), ops.ptpc_linear(x, codes, scale, None, layer.ptpc_layout))


@pytest.mark.parametrize("kv_ranks", [1, 2, 4])
@pytest.mark.parametrize("in_pieces", [True, False], ids=["tensor by tensor", "as SGLang likes"])
def test_tensors_of_another_shape(in_pieces: bool, kv_ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang would cut one that is too long: Phi-3's q, k and v in one tensor, and tensors of one shard or layer each.
    Of four ranks several have the same heads of k and v. On a CPU it pads layers, whose tensors are shorter."""
    monkeypatch.setattr(ptpc_linear, "loads_tensors", lambda: in_pieces)
    monkeypatch.setattr(ptpc_linear, "device_type", lambda: "cuda")
    config, options = PtpcFp8Config(), {"bias": False, "params_dtype": torch.bfloat16}
    config.packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    qkv: Any = QKVParallelLinear(
        64, 16, 4, 2, quant_config=config, prefix="self_attn.qkv_proj",
        **options, **share(monkeypatch, 3, 4, kv_ranks - 1, kv_ranks),
    )  # fmt: skip
    options |= share(monkeypatch, 3, 4)
    down: Any = RowParallelLinear(64, 32, quant_config=config, prefix="mlp.down_proj", **options)
    for layer, name, rows, shard in (
        (qkv, "self_attn.qkv_proj", 128, ()),
        (qkv, "self_attn.k_proj", 32, ("k",)),
        (down, "mlp.down_proj", 32, ()),
    ):
        for shape in ((rows - 16, 64), (rows + 16, 64), (rows, 48), (rows, 80)):
            sentence = re.escape(f"{name}.weight has shape {shape} in the checkpoint; the model's configuration needs")
            with pytest.raises(ValueError, match=rf"^{sentence} \({rows}, 64\)"):
                layer.weight.weight_loader(layer.weight, torch.zeros(shape), *shard)
    monkeypatch.setattr(ptpc_linear, "device_type", lambda: "cpu")
    q, k, v = (tensor(16 * heads, 64) for heads in (4, 2, 2))
    qkv.weight.weight_loader(qkv.weight, torch.cat([q, k, v]))
    if not in_pieces:
        qkv.quant_method.quantize(qkv, qkv.weight.data)
    mine = torch.cat([q.chunk(4)[-1], *(whole.chunk(min(kv_ranks, 2))[-1] for whole in (k, v))])
    codes, scale = fp8.quantize_rows(mine, fp8.OCP)
    assert torch.equal(qkv.weight.view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(qkv.weight_scale, scale)
    padded: Any = RowParallelLinear(64, 32, quant_config=config, prefix="mlp.down_proj", **options)
    padded.weight.weight_loader(padded.weight, torch.zeros(32, 56))


@pytest.mark.parametrize(("own", "presharded"), [(True, False), (False, True)], ids=["own loader", "a file a rank"])
def test_shapes_that_others_know(own: bool, presharded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ptpc_linear, "device_type", lambda: "cuda")
    layer: Any = RowParallelLinear(
        64, 32, bias=False, params_dtype=torch.bfloat16, quant_config=PtpcFp8Config(), prefix="mlp.down_proj",
        use_presharded_weights=presharded, **share(monkeypatch, 1, 2),
    )  # fmt: skip
    if own:
        layer.weight._weight_loader = lambda param, loaded_weight: param.data.copy_(loaded_weight)
    monkeypatch.setattr(layer.quant_method, "quantize", lambda *args: None)
    layer.weight.weight_loader(layer.weight, torch.zeros(32, 32))


def on_a_gpu(monkeypatch: pytest.MonkeyPatch, name: str) -> list[Any]:
    """What is computed with three tokens when a layer `name` is warmed up."""
    computed = []

    def warm_up(call: Any, most_rows: int, device: torch.device, kind: Any, prefix: str) -> None:
        assert (most_rows, prefix) == (256, name)
        computed.append(call(3))

    monkeypatch.setattr(warm_layers, "warm_up", warm_up)
    for module in (engine_layers, experts_of_sglang):
        monkeypatch.setattr(module, "on_gpu", lambda layer: True)
        monkeypatch.setattr(module, "most_rows", lambda: 256)
    return computed


def test_what_serves_a_layer_is_compiled_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    computed, (layer, method) = on_a_gpu(monkeypatch, ATTENTION), linear()
    for shard in "qkv":
        layer.weight.weight_loader(layer.weight, tensor(16, HIDDEN), shard)
    method.process_weights_after_loading(layer)
    assert [product.shape for product in computed] == [(3, 48)]


def test_what_serves_experts_is_compiled_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    computed, (layer, method) = on_a_gpu(monkeypatch, EXPERTS), experts()
    layer.top_k, layer.hidden_size = 2, HIDDEN
    layer.moe_runner_config = SimpleNamespace(activation="silu", apply_router_weight_on_input=False)
    load_experts(layer)
    products = []
    monkeypatch.setattr(method, "product", lambda layer, x, **routing: products.append((x.shape, routing)))
    method.process_weights_after_loading(layer)
    assert len(computed) == 1
    ((shape, routing),) = products
    assert shape == (3, HIDDEN) and routing["topk_ids"].shape == (3, 2) and routing["activation"] == "silu"


def test_a_layer_without_a_shard_is_refused() -> None:
    layer, method = linear()
    for shard in "qv":
        layer.weight.weight_loader(layer.weight, tensor(16, HIDDEN), shard)
    with pytest.raises(ValueError, match=r"^model\.layers\.0\.self_attn\.k_proj\.weight is missing"):
        method.process_weights_after_loading(layer)


def experts(**changes: Any) -> tuple[Any, ptpc_moe.PtpcFp8MoEMethod]:
    """Of four experts the second of two ranks has the last two."""
    facts = {"_expert_storage_rank": 1, "_num_local_routed": 2, "_num_global_routed": 4, "_has_fused_shared": False}
    facts |= {"num_experts": 4, "num_local_experts": 2, "moe_tp_size": 1}
    layer = layer_of(FusedMoE, **facts | changes)
    method = ptpc_moe.PtpcFp8MoEMethod(PtpcFp8Config(), layer, EXPERTS)

    def loader(weight: torch.nn.Parameter, tensor: torch.Tensor, name: str, shard: str, expert: int) -> None:
        assert expert in (2, 3), "what another rank has is not for this one"
        weight.data[expert - 2][INNER if shard == "w3" else 0 :][: len(tensor)] = tensor

    method.create_weights(layer, 2, HIDDEN, INNER, torch.bfloat16, weight_loader=loader)
    return layer, method


def load_experts(layer: Any, missing: tuple[int, str] | None = None) -> dict[tuple[int, str], torch.Tensor]:
    """What all ranks' experts are loaded from, but for `missing`."""
    given = {}
    for expert in range(4):
        for shard in ("w1", "w2", "w3"):
            given[expert, shard] = tensor(HIDDEN, INNER) if shard == "w2" else tensor(INNER, HIDDEN)
            if (expert, shard) != missing:
                weight = layer.w2_weight if shard == "w2" else layer.w13_weight
                weight.weight_loader(weight, given[expert, shard], f"{EXPERTS}.weight", shard, expert)
    return given


def test_experts_of_this_rank_are_quantized() -> None:
    layer, method = experts()
    given = load_experts(layer)
    for name, shards in (("w13_weight", ("w1", "w3")), ("w2_weight", ("w2",))):
        whole = torch.stack([torch.cat([given[expert, shard] for shard in shards]) for expert in (2, 3)])
        codes, scale = fp8.quantize_rows(whole, fp8.OCP)
        assert torch.equal(getattr(layer, name).view(torch.uint8), codes.view(torch.uint8))
        assert torch.equal(getattr(layer, f"{name}_scale"), scale)
    method.process_weights_after_loading(layer)
    assert layer._derived_weight_cache_error.startswith(f"{EXPERTS} was prepared for its kernels")
    with pytest.raises(
        ValueError, match=f"{EXPERTS}.w2_weight was prepared for its kernels when .*: start the server again"
    ):
        layer.w2_weight.weight_loader(layer.w2_weight, given[3, "w2"], f"{EXPERTS}.weight", "w2", 3)


@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_share_rows_of_w2_alone(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of gate and up are whole on one rank, and the others have other ones."""
    groups = []

    def quantize(weight: torch.Tensor, name: str, name_of_row: Any, group: Any, *rest: Any) -> Any:
        groups.append(group)
        return fp8.quantize_rows(weight, fp8.OCP)

    monkeypatch.setattr(ptpc_moe, "quantize_weight", quantize)
    monkeypatch.setattr(ptpc_moe, "get_moe_tp_group", lambda: SimpleNamespace(device_group="ranks"))
    layer, method = experts()
    layer.moe_tp_size = ranks
    method.quantize(layer, "w13_weight", torch.ones(2, 2 * INNER, HIDDEN))
    method.quantize(layer, "w2_weight", torch.ones(2, HIDDEN, INNER))
    assert groups == [None, "ranks" if ranks > 1 else None]


@pytest.mark.parametrize(
    ("shard", "name", "needed"),
    [("w1", "gate_proj", (2 * INNER, HIDDEN)), ("w2", "down_proj", (HIDDEN, 2 * INNER))],
    ids=["gate", "down"],
)
@pytest.mark.parametrize("in_pieces", [True, False], ids=["tensor by tensor", "as SGLang likes"])
def test_an_expert_of_another_shape(
    in_pieces: bool, shard: str, name: str, needed: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang would leave zeros behind one that is too short, and repeat a single row. Here two ranks share features."""
    monkeypatch.setattr(ptpc_moe, "loads_tensors", lambda: in_pieces)
    monkeypatch.setattr(ptpc_moe, "device_type", lambda: "cuda")
    layer, _ = experts(moe_tp_size=2)
    weight, (rows, columns) = layer.w2_weight if shard == "w2" else layer.w13_weight, needed
    for shape in ((rows // 2, columns), (1, columns), (2 * rows, columns), (rows, columns // 2), (rows, 2 * columns)):
        sentence = (
            f"{EXPERTS}.3.{name}.weight has shape {shape} in the checkpoint; the model's configuration needs {needed}"
        )
        with pytest.raises(ValueError, match=f"^{re.escape(sentence)}"):
            weight.weight_loader(weight, torch.zeros(shape), f"{EXPERTS}.weight", shard, 3)


@pytest.mark.parametrize(
    ("device", "presharded"), [("cpu", False), ("cuda", True)], ids=["padded on a CPU", "a file a rank"]
)
def test_shapes_of_experts_that_sglang_knows(device: str, presharded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ptpc_moe, "device_type", lambda: device)
    layer, _ = experts(moe_tp_size=2, use_presharded_weights=presharded)
    layer.w13_weight.weight_loader(layer.w13_weight, tensor(INNER, HIDDEN), f"{EXPERTS}.weight", "w1", 3)


@pytest.mark.parametrize(("shard", "name"), [("w1", "gate_proj"), ("w2", "down_proj"), ("w3", "up_proj")])
def test_experts_without_a_tensor_are_refused(shard: str, name: str) -> None:
    layer, method = experts()
    load_experts(layer, missing=(3, shard))
    with pytest.raises(ValueError, match=rf"^model\.layers\.0\.mlp\.experts\.3\.{name}\.weight is missing"):
        method.process_weights_after_loading(layer)


@pytest.mark.parametrize(("shard", "name"), [("w1", "gate_proj"), ("w2", "down_proj"), ("w3", "up_proj")])
def test_a_tensor_that_holds_nan_is_named(shard: str, name: str) -> None:
    layer, _ = experts()
    broken = tensor(HIDDEN, INNER) if shard == "w2" else tensor(INNER, HIDDEN)
    broken[0, 0] = torch.nan
    weight = layer.w2_weight if shard == "w2" else layer.w13_weight
    weight.weight_loader(weight, broken, f"{EXPERTS}.weight", shard, 3)
    with pytest.raises(ValueError, match=rf"^model\.layers\.0\.mlp\.experts\.3\.{name}\.weight holds NaN"):
        load_experts(layer, missing=(3, shard))

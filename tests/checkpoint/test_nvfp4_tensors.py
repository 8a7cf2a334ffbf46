# SPDX-License-Identifier: Apache-2.0
"""NVFP4 layers between the checkpoint's tensors and a served layer's, without an engine."""

import copy
import io
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from llm_quant_rocm import ops
from llm_quant_rocm.checkpoint.expert_tensors import STEMS, ExpertNames
from llm_quant_rocm.checkpoint.fp8_layers import Fp8Linear
from llm_quant_rocm.checkpoint.linear_tensors import EngineLayers
from llm_quant_rocm.checkpoint.nvfp4_kinds import Options
from llm_quant_rocm.checkpoint.nvfp4_layers import NvFp4Experts, NvFp4Linear
from llm_quant_rocm.checkpoint.nvfp4_tensors import (
    COMPRESSED_TENSORS,
    MODELOPT,
    Piece,
    TensorNames,
    assemble,
    input_global_scale,
    keep,
    kept,
)
from llm_quant_rocm.formats import nvfp4
from tests.inputs import assert_same
from tests.nvfp4_inputs import nasty_weight

SIZES = (6, 3, 7)


def pieces(scales: list[float]) -> list[Piece]:
    ends = torch.tensor(SIZES).cumsum(0).tolist()
    rows = [slice(end - size, end) for end, size in zip(ends, SIZES, strict=True)]
    return [
        Piece(f"{name}_proj.weight", (place,), torch.tensor(scale))
        for name, place, scale in zip("qkv", rows, scales, strict=True)
    ]


def parts() -> tuple[torch.Tensor, torch.Tensor]:
    weight = nasty_weight(sum(SIZES), 32)
    return weight.codes, weight.scales


@pytest.mark.parametrize("names", [MODELOPT, COMPRESSED_TENSORS], ids=["modelopt", "compressed-tensors"])
def test_pieces_keep_their_global_scales(names: TensorNames) -> None:
    codes, scales = parts()
    given = [0.5, 2.0, 0.25]
    weight = assemble(names, codes, scales, pieces(given))
    multipliers = given if names is MODELOPT else [1 / scale for scale in given]
    assert weight.global_scale.tolist() == [m for m, size in zip(multipliers, SIZES, strict=True) for _ in range(size)]


def test_no_negative_zero_is_left_in_the_scales_that_are_served() -> None:
    codes, scales = parts()
    scales.view(torch.uint8)[[0, 8]] = 0x80
    weight = assemble(MODELOPT, codes, scales, pieces([1.0, 1.0, 1.0]))
    assert not (weight.scales.view(torch.uint8) & 0x80).any()


def test_a_broken_piece_is_named() -> None:
    codes, scales = parts()
    scales.view(torch.uint8)[8, 1] = 0x7F
    with pytest.raises(ValueError, match="^k_proj.weight_scale holds 1 NaN"):
        assemble(MODELOPT, codes, scales, pieces([1.0, 1.0, 1.0]))
    with pytest.raises(ValueError, match="^v_proj.weight_scale_2 is 0"):
        assemble(MODELOPT, *parts(), pieces([1.0, 1.0, 0.0]))


def test_a_served_layer_survives_copies_and_its_state_dict() -> None:
    weight, other = nasty_weight(16, 32), nasty_weight(16, 32, seed=1)
    layer, second = torch.nn.Module(), torch.nn.Module()
    keep(layer, weight)
    keep(second, other)
    x = torch.randn(3, 32).bfloat16()
    expected = ops.nvfp4_gemm(x, weight)
    assert_same(ops.nvfp4_gemm(x, kept(copy.deepcopy(layer))), expected)
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    second.load_state_dict(torch.load(file, weights_only=True))
    assert_same(ops.nvfp4_gemm(x, kept(second)), expected)


def test_prepared_weights_can_be_copied() -> None:
    prepared = ops.prepare_nvfp4_weight(nasty_weight(16, 32))
    copied = copy.deepcopy(prepared)
    assert copied.codes.data_ptr() != prepared.codes.data_ptr()
    for name in ("codes", "scales", "global_scale"):
        assert_same(getattr(copied, name), getattr(prepared, name))
    assert isinstance(copy.copy(nvfp4.quantize(torch.ones(2, 16))), nvfp4.NvFp4Weight)


@pytest.mark.parametrize("scale", [0.0, -1.0, torch.inf, torch.nan])
def test_input_scales_are_positive(scale: float) -> None:
    with pytest.raises(ValueError, match="is not positive and finite"):
        input_global_scale(COMPRESSED_TENSORS, "a.q_proj", [torch.tensor(1.0), torch.tensor(scale)])


W4A4 = Options(activations="nvfp4")
EXPERTS = ExpertNames(lambda expert, shard: f"experts.{expert}.{shard}", lambda expert: expert, lambda expert: expert)


def parameter(data: torch.Tensor, **others: Any) -> torch.nn.Parameter:
    return torch.nn.Parameter(data, requires_grad=False)


def test_dummies_need_no_input_scales() -> None:
    layer, linear = torch.nn.Module(), NvFp4Linear(MODELOPT, "a", W4A4, is_dummy=True)
    engine = EngineLayers(parameter, parameter, (), SimpleNamespace)
    linear.declare(layer, 32, [16], (16, 32), lambda *given: None, {}, engine)
    linear.finish(layer)
    assert linear.product(layer, torch.ones(3, 32).bfloat16(), None).isfinite().all()


class Plain(torch.nn.Module):
    pass


class OwnRules(Plain):
    """A model's layer whose loader pads or repeats rows, as Mamba's does."""


@pytest.mark.parametrize("kind", [Plain, OwnRules])
def test_rows_are_counted_where_the_engine_has_no_rules_of_its_own(kind: type[Plain]) -> None:
    layer, linear, loaded = kind(), NvFp4Linear(MODELOPT, "a", Options(), is_dummy=False), []
    loaders: list[Any] = []

    def keep_loader(data: torch.Tensor, weight_loader: Any, **others: Any) -> torch.nn.Parameter:
        loaders.append(weight_loader)
        return parameter(data)

    engine = EngineLayers(keep_loader, parameter, (Plain,), SimpleNamespace)
    linear.declare(layer, 32, [16], (16, 32), lambda *given: loaded.append(given), {}, engine)
    rows = torch.zeros(20, 16, dtype=torch.uint8)
    if kind is Plain:
        with pytest.raises(ValueError, match=r"^a\.weight has shape \(20, 16\) .* configuration needs \(16, 16\)"):
            loaders[0](layer.weight, rows)
    else:
        loaders[0](layer.weight, rows)
    assert len(loaded) == (kind is OwnRules)


def test_experts_whose_activations_are_rounded_stay_in_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference computes them, whatever the kernels of this device read."""
    monkeypatch.setattr(ops, "prepare_nvfp4_weight", None)
    layer, experts = torch.nn.Module(), NvFp4Experts(MODELOPT, "experts", W4A4, is_dummy=True)
    experts.declare(layer, EXPERTS, 2, 32, (16, 16), lambda *given: None, {})
    experts.finish(layer)
    ids, weights = torch.tensor([[0], [1]]), torch.ones(2, 1)
    assert experts.product(layer, torch.ones(2, 32).bfloat16(), weights, ids, "silu", False).isfinite().all()


def test_experts_that_ranks_would_cut_within_blocks() -> None:
    experts = NvFp4Experts(MODELOPT, "experts", Options(), is_dummy=False)
    with pytest.raises(ValueError, match=r"^experts\.0\.w2 has 24 of 48 input features on each of 2 ranks"):
        experts.declare(torch.nn.Module(), EXPERTS, 2, 32, (24, 48), lambda *given: None, {})


@pytest.mark.parametrize("names", [MODELOPT, COMPRESSED_TENSORS], ids=["modelopt", "compressed_tensors"])
def test_parameters_are_where_the_engine_makes_its_own(names: TensorNames) -> None:
    """What engines find on the CPU before a layer is prepared they put back there afterwards, by its name, and the
    prepared weight's global scales are called as compressed-tensors' are."""
    layers, engine = [torch.nn.Module(), torch.nn.Module()], EngineLayers(loaded, loaded, (), SimpleNamespace)
    with torch.device("meta"):
        NvFp4Linear(names, "a", Options(), is_dummy=False, batch_invariant=False).declare(
            layers[0], 32, [32], (32, 32), copy_rows, {}, engine
        )
        NvFp4Experts(names, "a", Options(), is_dummy=False).declare(layers[1], EXPERTS, 2, 32, (32, 32), copy_rows, {})
    for layer in layers:
        assert all(param.is_meta for param in layer.parameters())


def loaded(data: torch.Tensor, weight_loader: Any, **others: Any) -> torch.nn.Parameter:
    made = parameter(data)
    made.weight_loader = weight_loader  # type: ignore[attr-defined]
    return made


def copy_rows(param: torch.nn.Parameter, tensor: torch.Tensor, *expert: Any) -> None:
    """An engine's loader, of a weight in which all rows are equal."""
    param.data[expert[-1] if expert else ...] = tensor[0]


@pytest.mark.parametrize(
    ("kind", "lacking"),
    [
        *((Fp8Linear, name) for name in ("weight", "weight_scale")),
        *((NvFp4Linear, name) for name in ("weight", "weight_scale", "weight_scale_2", "input_scale")),
        *((NvFp4Experts, name) for name in ("weight", "weight_scale", "weight_scale_2", "input_scale")),
    ],
)
def test_what_an_engine_reloads_is_complete_and_is_served(kind: Any, lacking: str) -> None:
    """Over dummies too, with which reinforcement learning begins."""
    layer, engine = torch.nn.Module(), EngineLayers(loaded, loaded, (), SimpleNamespace)
    tensors = {"weight": torch.full((32, 32), 0.5).to(torch.float8_e4m3fn), "weight_scale": torch.tensor(0.25)}
    stems: dict[str, list[tuple[Any, ...]]] = {"": [()]}
    if kind is Fp8Linear:
        served = Fp8Linear("a", is_dummy=True)
    else:
        served = kind(MODELOPT, "a", W4A4, is_dummy=True)
        scales = torch.full((32, 2), 0.25).to(torch.float8_e4m3fn)
        tensors = {"weight": torch.full((32, 16), 0x11, dtype=torch.uint8), "weight_scale": scales}
        tensors |= {"weight_scale_2": torch.tensor(1.0), "input_scale": torch.tensor(1.0)}
    if kind is NvFp4Experts:
        stems = {stem: [("", shard, e) for shard in shards for e in range(2)] for stem, shards in STEMS.items()}
        served.declare(layer, EXPERTS, 2, 32, (32, 32), copy_rows, {})
    else:
        served.declare(layer, 32, [32], (32, 32), copy_rows, {}, engine)
    declared = dict(layer._parameters)

    def load(lacking: str | None) -> None:
        for name in list(layer._parameters):
            delattr(layer, name)
        for name, param in declared.items():
            layer.register_parameter(name, param)
        for stem, places in stems.items():
            for name, tensor in tensors.items():
                for place in places if name != lacking else places[:-1]:
                    declared[stem + name].weight_loader(declared[stem + name], tensor, *place)
        served.finish(layer)

    for param in declared.values():
        param.data.zero_()
    served.finish(layer)
    load(lacking=None)
    for stem in stems:
        row = tensors["weight"].view(torch.uint8)[0]
        assert bool((getattr(layer, f"{stem}weight").view(torch.uint8) == row).all())
        assert bool((getattr(layer, f"{stem}weight_scale").float() == 0.25).all())
    with pytest.raises(ValueError, match=rf"\.{lacking} is missing from the checkpoint"):
        load(lacking)

# SPDX-License-Identifier: Apache-2.0
"""Checkpoint tensors of a fused linear layer, as they are checked before an engine's loader copies them."""

from typing import Any

import pytest
import torch

from llm_quant_rocm.checkpoint.linear_tensors import EngineLayers, LinearTensors

FUSED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}


class Qkv(torch.nn.Module):
    """A rank's q, k and v, of which two ranks have the same k and v."""

    num_kv_heads, total_num_kv_heads = 1, 2


class Embedding(torch.nn.Module):
    pass


def parameter(data: torch.Tensor, weight_loader: Any, **of_a_matrix: Any) -> torch.nn.Parameter:
    made = torch.nn.Parameter(data, requires_grad=False)
    made.weight_loader = weight_loader  # type: ignore[attr-defined]
    return made


def fused(layer: Qkv, loaded: list[str], tensor: str = "weight", dtype: torch.dtype = torch.uint8) -> LinearTensors:
    """One of the tensors of `layer`, 16 columns wide; the engine's loader notes the shards that it is given."""
    tensors = LinearTensors(
        layer, "a.qkv_proj", FUSED, [8, 4, 4], 64,
        lambda param, weight, shard: loaded.append(shard), EngineLayers(parameter, parameter, (Qkv,), Embedding),
    )  # fmt: skip
    tensors.add_matrix(tensor, dtype, 16, 16)
    return tensors


def test_ranks_that_share_heads_of_k_and_v() -> None:
    """Of 4 ranks with 8, 4 and 4 rows each: the checkpoint has 32 of q, but 8 of k and of v."""
    layer, loaded = Qkv(), []
    tensors = fused(layer, loaded)
    load = layer.weight.weight_loader
    for shard, rows in (("q", 32), ("k", 8)):
        load(layer.weight, torch.zeros(rows, 16, dtype=torch.uint8), shard)
    for rows in (16, 4):
        with pytest.raises(ValueError, match=rf"a.v_proj.weight has shape \({rows}, 16\) .* needs \(8, 16\)"):
            load(layer.weight, torch.zeros(rows, 16, dtype=torch.uint8), "v")
    assert loaded == ["q", "k"]
    with pytest.raises(ValueError, match=r"a.v_proj.weight is missing from the checkpoint"):
        tensors.refuse_missing()


def test_one_tensor_of_several_shards() -> None:
    """Messages name it: Qwen3.5's in_proj_qkv, of which engines make three shards."""
    layer = torch.nn.Module()
    tensors = LinearTensors(
        layer, "a.in_proj_qkvz", {"in_proj_qkvz": ["in_proj_qkv", "in_proj_z"]}, [2, 2, 4, 4], 12,
        lambda param, weight, shard: None, EngineLayers(parameter, parameter, (), Embedding),
    )  # fmt: skip
    tensors.add_matrix("weight", torch.uint8, 16, 16)
    load = layer.weight.weight_loader
    with pytest.raises(TypeError, match=r"^a\.in_proj_qkv\.weight is torch\.bfloat16"):
        load(layer.weight, torch.zeros(8, 16, dtype=torch.bfloat16), (0, 1, 2))
    load(layer.weight, torch.zeros(8, 16, dtype=torch.uint8), (0, 1, 2))
    with pytest.raises(ValueError, match=r"^a\.in_proj_z\.weight is missing from the checkpoint"):
        tensors.refuse_missing()
    assert [name for name, _ in tensors.pieces()] == ["a.in_proj_qkv.weight"] * 3 + ["a.in_proj_z.weight"]


@pytest.mark.parametrize(
    ("tensor", "promised", "dtype", "words"),
    [
        ("weight", torch.uint8, torch.int8, "is int8 in the checkpoint, and NVFP4 codes are uint8: fetch"),
        (
            "weight_scale",
            torch.float8_e4m3fn,
            torch.uint8,
            "is torch.uint8 in the checkpoint, and NVFP4's block scales are F8_E4M3: fetch",
        ),
        (
            "weight_scale",
            torch.float8_e4m3fn,
            torch.bfloat16,
            "is torch.bfloat16 in the checkpoint, and NVFP4's block scales are F8_E4M3: fetch",
        ),
        (
            "weight",
            torch.uint8,
            torch.bfloat16,
            "is torch.bfloat16 in the checkpoint, where its quantization_config promises torch.uint8: if the layer is",
        ),
    ],
    ids=["codes-int8", "scales-uint8", "scales-bf16", "unquantized"],
)
def test_another_dtype(tensor: str, promised: torch.dtype, dtype: torch.dtype, words: str) -> None:
    """`doctor` says the same: tests/cli/test_doctor_model.py."""
    layer, loaded = Qkv(), []
    fused(layer, loaded, tensor, promised)
    param = getattr(layer, tensor)
    with pytest.raises(TypeError, match=rf"^a\.q_proj\.{tensor} {words}"):
        param.weight_loader(param, torch.zeros(32, 16, dtype=dtype), "q")
    assert loaded == []


@pytest.mark.parametrize("last", ["q", "scale"])
def test_the_last_tensor_completes_a_layer(last: str) -> None:
    """Once, when the engine's loader has copied it; what may lack does not count."""
    layer, seen = Qkv(), []
    tensors = LinearTensors(
        layer, "a.qkv_proj", FUSED, [8, 4, 4], 64, lambda param, weight, shard: param.data.fill_(7),
        EngineLayers(parameter, parameter, (Qkv,), Embedding),
        lambda: seen.append((layer.weight.max(), layer.scale.max())),
    )  # fmt: skip
    tensors.add_matrix("weight", torch.uint8, 16, 16)
    tensors.add_scalars("scale")
    tensors.add_optional_scalars("input_scale")

    def load(name: str, tensor: torch.Tensor, *shard: Any) -> None:
        parameter = getattr(layer, name)
        parameter.weight_loader(parameter, tensor, *shard)

    steps = {
        "scale": lambda: load("scale", torch.tensor(0.5)),
        "q": lambda: load("weight", torch.zeros(32, 16, dtype=torch.uint8), "q"),
    }
    for shard in ("k", "v"):
        load("weight", torch.zeros(8, 16, dtype=torch.uint8), shard)
    steps.pop("q" if last == "scale" else "scale")()
    load("input_scale", torch.tensor(2.0))
    assert not seen
    steps.pop(last)()
    assert seen == [(7, 0.5)]
    load("input_scale", torch.tensor(2.0))
    load("weight", torch.zeros(8, 16, dtype=torch.uint8), "v")
    assert len(seen) == 1

# SPDX-License-Identifier: Apache-2.0
"""Names in a checkpoint's lists find the layers of models whose names SGLang's mappers rewrite to other ones."""

import logging
from typing import Any

import pytest
from sglang.srt.layers.linear import LinearBase
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead
from sglang.srt.models.utils import WeightsMapper

from llm_quant_rocm_sglang import nvfp4_linear
from llm_quant_rocm_sglang.names import ListedNames
from llm_quant_rocm_sglang.nvfp4 import NvFp4Config
from llm_quant_rocm_sglang.ptpc_fp8 import PtpcFp8Config

# As in SGLang 0.5.21, of Qwen2.5-VL and Qwen3-VL, and of transformers' models.
QWEN_VL = WeightsMapper(
    orig_to_new_substr={"attn.qkv": "attn.qkv_proj"},
    orig_to_new_prefix={
        "model.language_model.": "language_model.model.",
        "model.visual.": "visual.",
        "lm_head.": "language_model.lm_head.",
        "model.": "language_model.model.",
    },
)
TRANSFORMERS = WeightsMapper(orig_to_new_prefix={"model.": "model.", "lm_head.": "lm_head.", "": "model."})

MLP = "layers.0.mlp.down_proj"
PTPC, MODELOPT, COMPRESSED = KINDS = ("ptpc_fp8", "modelopt", "compressed-tensors")
ENTRIES = [
    # Whose lists have such an entry, and what SGLang calls the layer: in Qwen3-VL,
    ((MODELOPT,), QWEN_VL, "model.visual*", "model.visual.blocks.0.mlp.linear_fc1"),
    ((PTPC, MODELOPT), QWEN_VL, "model.visual", "model.visual.blocks.0.mlp.linear_fc1"),
    (KINDS, QWEN_VL, "model.visual.blocks.0.attn.qkv", "model.visual.blocks.0.attn.qkv_proj"),
    (KINDS, QWEN_VL, f"model.language_model.{MLP}", f"model.language_model.{MLP}"),
    # in Qwen2.5-VL,
    ((MODELOPT,), QWEN_VL, "model.visual*", "visual.blocks.0.mlp.down_proj"),
    ((PTPC, MODELOPT), QWEN_VL, "model.visual", "visual.blocks.0.mlp.down_proj"),
    (KINDS, QWEN_VL, f"model.language_model.{MLP}", f"model.{MLP}"),
    (KINDS, QWEN_VL, f"model.{MLP}", f"model.{MLP}"),
    # and in a model of transformers'.
    (KINDS, TRANSFORMERS, "down_proj", f"model.{MLP}"),
    ((MODELOPT,), TRANSFORMERS, "*down_proj", f"model.{MLP}"),
    ((PTPC, COMPRESSED), TRANSFORMERS, "re:.*down_proj", f"model.{MLP}"),
]
CASES = [(kind, *entry) for kinds, *entry in ENTRIES for kind in kinds]
GROUP = {
    "targets": ["Linear"],
    "weights": {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True},
}
COMPRESSED_TENSORS = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}


def config(kind: str, mapper: WeightsMapper, entry: str) -> Any:
    """A checkpoint's configuration whose list has this entry, for a model with this mapper."""
    made: Any
    if kind == "ptpc_fp8":
        made = PtpcFp8Config([entry])
    elif kind == "modelopt":
        described = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}
        made = NvFp4Config.from_config({**described, "ignore": [entry]})
    else:
        made = NvFp4Config.from_config({**COMPRESSED_TENSORS, "config_groups": {"g": GROUP}, "ignore": [entry]})
    made.apply_weight_name_mapper(mapper)
    return made


@pytest.fixture(autouse=True)
def loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvfp4_linear, "is_dummy", lambda: False)


@pytest.mark.parametrize(("kind", "mapper", "entry", "layer"), CASES)
def test_a_layer_that_a_list_names(kind: str, mapper: WeightsMapper, entry: str, layer: str) -> None:
    """Of transformers' models, SGLang found no target in compressed-tensors' checkpoints, for any layer."""
    described = config(kind, mapper, entry)
    linear = object.__new__(LinearBase)
    assert isinstance(described.get_quant_method(linear, layer), UnquantizedLinearMethod)
    other = "model.language_model.layers.1.self_attn.o_proj"
    assert not isinstance(described.get_quant_method(linear, other), UnquantizedLinearMethod)


@pytest.mark.parametrize("kind", ["modelopt", "compressed-tensors"])
@pytest.mark.parametrize(("entry", "stays"), [("lm_head", True), ("other", False)])
def test_the_output_head_of_a_model_of_transformers(kind: str, entry: str, stays: bool) -> None:
    head = object.__new__(ParallelLMHead)
    method = config(kind, TRANSFORMERS, entry).get_quant_method(head, "lm_head")
    assert isinstance(method, nvfp4_linear.NvFp4LinearMethod) is not stays


def test_layers_by_their_algorithms() -> None:
    """What ModelOpt says of each layer of a mixed checkpoint, too."""
    names = ListedNames(QWEN_VL).apply_dict({f"model.language_model.{MLP}": "NVFP4", "model.visual.merger": "FP8"})
    assert [names[f"{of}{MLP}"] for of in ("model.language_model.", "model.")] == ["NVFP4", "NVFP4"]
    assert [names[f"{of}visual.merger"] for of in ("model.", "")] == ["FP8", "FP8"]


def test_a_name_that_finds_nothing_is_the_users(caplog: pytest.LogCaptureFixture) -> None:
    described = config("ptpc_fp8", QWEN_VL, "model.visual")
    described.get_quant_method(object.__new__(LinearBase), f"model.{MLP}")
    described.report()
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 1 and "'model.visual', which no layer" in warnings[0]

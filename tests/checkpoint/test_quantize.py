# SPDX-License-Identifier: Apache-2.0
"""NVFP4 checkpoints: the same values in every layout, read back by compressed-tensors and transformers."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.entrypoints.convert.converters import ModelOptNvfp4Converter
from compressed_tensors.quantization import QuantizationConfig
from safetensors.torch import load_file, save_file

from llm_quant_rocm.checkpoint import output as output_module
from llm_quant_rocm.checkpoint.files import refuse_broken_files
from llm_quant_rocm.checkpoint.kept import IGNORE, fused_with
from llm_quant_rocm.checkpoint.layouts import LAYOUTS
from llm_quant_rocm.checkpoint.quantize import quantize_checkpoint
from llm_quant_rocm.checkpoint.survey import survey
from llm_quant_rocm.formats import nvfp4
from llm_quant_rocm.formats.nvfp4 import NvFp4Weight
from tests.inputs import assert_same
from tests.nvfp4_inputs import weight64

DEMO_MODEL = Path(__file__).parents[2] / "examples" / "demo_model"
HIDDEN, KV, INNER = 64, 32, 96
LINEARS = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (KV, HIDDEN),
    "self_attn.v_proj": (KV, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (INNER, HIDDEN),
    "mlp.up_proj": (INNER, HIDDEN),
    "mlp.down_proj": (HIDDEN, INNER),
}

INPUT_AMAX = {f"model.layers.{layer}.{name}": 1.5 + layer for layer in range(2) for name in LINEARS}


def tensors_of_a_model(dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    """Two layers, an embedding, norms, biases and an output layer; every weight of another size."""
    generator = torch.Generator().manual_seed(0)
    tensors = {"model.embed_tokens.weight": torch.randn(128, HIDDEN, generator=generator)}
    for layer in range(2):
        for number, (name, shape) in enumerate(LINEARS.items()):
            w = torch.randn(shape, generator=generator) * 2.0 ** (number - 3)
            tensors[f"model.layers.{layer}.{name}.weight"] = w
        tensors[f"model.layers.{layer}.self_attn.q_proj.bias"] = torch.randn(HIDDEN, generator=generator)
        tensors[f"model.layers.{layer}.input_layernorm.weight"] = torch.ones(HIDDEN)
    tensors["lm_head.weight"] = torch.randn(128, HIDDEN, generator=generator)
    return {name: tensor.to(dtype) for name, tensor in tensors.items()}


def write(folder: Path, tensors: dict[str, torch.Tensor], shards: int = 1, **config: Any) -> Path:
    """A checkpoint; neighbouring tensors go to different shards."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], **config}))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "pytorch_model.bin").write_bytes(b"the same weights once more")
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    weight_map = {name: f"model-{i % shards + 1:05}-of-{shards:05}.safetensors" for i, name in enumerate(tensors)}
    for file in set(weight_map.values()):
        save_file({name: tensors[name] for name, place in weight_map.items() if place == file}, folder / file)
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def read(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def weight_of(tensors: dict[str, torch.Tensor], module: str) -> NvFp4Weight:
    """A module's weight in either convention."""
    if f"{module}.weight_packed" in tensors:
        parts = [tensors[f"{module}.weight_{part}"] for part in ("packed", "scale", "global_scale")]
        return NvFp4Weight.from_compressed_tensors(*parts)
    return NvFp4Weight.from_modelopt(*(tensors[f"{module}.weight{part}"] for part in ("", "_scale", "_scale_2")))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("shards", [1, 3])
def test_every_layout_holds_the_same_values(tmp_path: Path, shards: int, dtype: torch.dtype) -> None:
    original = tensors_of_a_model(dtype)
    source = write(tmp_path / "source", original, shards)
    written = {}
    for layout in LAYOUTS:
        report = quantize_checkpoint(source, tmp_path / layout, layout, input_amax=INPUT_AMAX)
        written[layout] = read(tmp_path / layout)
        assert len(report.quantized) == 14
        assert set(report.kept) == {"model.embed_tokens", "lm_head"}
        assert report.bytes_before == sum(tensor.nbytes for tensor in original.values())
        assert report.bytes_after == sum(tensor.nbytes for tensor in written[layout].values())
    for module in report.quantized:
        found = [weight_of(tensors, module) for tensors in written.values()]
        for other in found[1:]:
            assert_same(other.codes, found[0].codes)
            assert_same(other.scales, found[0].scales)
            assert_same(other.global_scale, found[0].global_scale)
        w = original[f"{module}.weight"].float()
        assert (found[0].dequantize() - w).norm() / w.norm() < 0.12
    for tensors in written.values():
        quantized = {f"{module}.weight" for module in report.quantized}
        for name, tensor in original.items():
            if name not in quantized:
                assert_same(tensors[name], tensor)


def test_the_index_names_every_tensor(tmp_path: Path) -> None:
    source, target = write(tmp_path / "source", tensors_of_a_model(), 3), tmp_path / "target"
    quantize_checkpoint(source, target)
    index = json.loads((target / "model.safetensors.index.json").read_text())
    found = {name: file.name for file in target.glob("*.safetensors") for name in load_file(file)}
    assert index["weight_map"] == found
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in read(target).values())
    names = {file.name for file in target.iterdir()}
    assert "tokenizer.json" in names and "pytorch_model.bin" not in names


def test_layers_that_engines_fuse_share_the_largest_global_scale(tmp_path: Path) -> None:
    original = tensors_of_a_model()
    source = write(tmp_path / "source", original, 3)
    quantize_checkpoint(source, tmp_path / "shared", "modelopt")
    quantize_checkpoint(source, tmp_path / "apart", "modelopt", share_global_scales=False)
    shared, apart = read(tmp_path / "shared"), read(tmp_path / "apart")
    for layer in range(2):
        for parent, group in (("self_attn", "qkv"), ("self_attn", "o"), ("mlp", ("gate", "up")), ("mlp", ("down",))):
            modules = [f"model.layers.{layer}.{parent}.{member}_proj" for member in group]
            own = [nvfp4.global_scale_of(nvfp4.amax_of(original[f"{module}.weight"])) for module in modules]
            assert [apart[f"{module}.weight_scale_2"] for module in modules] == own
            assert len(own) == 1 or len(set(map(float, own))) == len(own)
            assert {float(shared[f"{module}.weight_scale_2"]) for module in modules} == {float(max(own))}


@pytest.mark.parametrize("size", [0.0, 1e-38], ids=["zero", "tiny"])
def test_a_shard_of_nothing_leaves_the_others_their_global_scale(tmp_path: Path, size: float) -> None:
    """A bias-only k_proj, a pruned gate: alone its global scale would be 1, far above those of the others."""
    original = tensors_of_a_model(torch.float32)
    empty = {"self_attn.k_proj": ("q_proj", "v_proj"), "mlp.up_proj": ("gate_proj",)}
    for name in empty:
        original[f"model.layers.0.{name}.weight"] = torch.randn(LINEARS[name]) * size
    quantize_checkpoint(write(tmp_path / "source", original), tmp_path / "target", "modelopt")
    found = read(tmp_path / "target")
    for name, siblings in empty.items():
        modules = [f"model.layers.0.{name.partition('.')[0]}.{sibling}" for sibling in siblings]
        amax = max(original[f"{module}.weight"].abs().max() for module in modules)
        for module in (f"model.layers.0.{name}", *modules):
            assert_same(found[f"{module}.weight_scale_2"], nvfp4.global_scale_of(amax))
        for module in modules:
            w = original[f"{module}.weight"]
            assert (weight_of(found, module).dequantize() - w).norm() / w.norm() < 0.12
        assert not weight_of(found, f"model.layers.0.{name}").dequantize().any()


@pytest.mark.parametrize(
    "group",
    [
        ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"), ("q_a_proj", "kv_a_proj_with_mqa"),
        ("in_proj_qkv", "in_proj_z"), ("in_proj_b", "in_proj_a"),
        ("o_proj",), ("w2",), ("down_proj",),
    ],
    ids="-".join,
)  # fmt: skip
def test_what_engines_fuse(group: tuple[str, ...]) -> None:
    names = tuple(f"model.layers.3.block.{member}" for member in group)
    for name in names:
        assert fused_with(name) == names
    assert fused_with(group[0]) == group and fused_with("lm_head") == ("lm_head",)


def test_ignore(tmp_path: Path) -> None:
    source = write(tmp_path / "source", tensors_of_a_model())
    ignore = ("lm_head", "*embed*", "model.layers.0.*", "*.o_proj")
    report = quantize_checkpoint(source, tmp_path / "target", "modelopt", ignore)
    assert set(report.quantized) == {f"model.layers.1.{name}" for name in LINEARS if name != "self_attn.o_proj"}
    listed = json.loads((tmp_path / "target" / "config.json").read_text())["quantization_config"]["ignore"]
    assert listed == sorted(report.kept)


@pytest.mark.parametrize(
    "module",
    [
        "transformer.wte",
        "transformer.wpe",
        "model.layers.0.mlp.gate",
        "model.layers.0.mlp.gate.wg",
        "model.layers.0.altup.modality_router",
        "model.vision_tower.0.q_proj",
        "model.layers.0.self_attn.indexer.wk",
        "model.layers.2.shared_head.head",
        "language_model.lm_head",
        "transformer.output_layer",
        "output",
        "language_model.output",
        "mtp.fc",
        "model.mtp_linear_proj.0",
        "model.mtp_layers.0.input_proj",
        "multi_modal_projector.patch_merger.merging_layer",
        "mlp_AR.linear_1",
        "audio_tower.layers.0.fc1",
        "score",
        "classifier.out_proj",
    ],
)
def test_what_always_stays(tmp_path: Path, module: str) -> None:
    tensors = tensors_of_a_model() | {f"{module}.weight": torch.ones(16, 64)}
    assert module in quantize_checkpoint(write(tmp_path / "source", tensors), tmp_path / "target").kept


def test_an_ignored_name_that_nothing_matches(tmp_path: Path) -> None:
    """ModelOpt's lists are matched by parts of names: o_proj among them would name layers that were quantized."""
    source = write(tmp_path / "source", tensors_of_a_model())
    for pattern in ("o_proj", "re:.*o_proj", "*.o_porj"):
        with pytest.raises(ValueError, match=f"^ignore names '{re.escape(pattern)}', which no module of .* matches"):
            quantize_checkpoint(source, tmp_path / "target", "modelopt", (*IGNORE, pattern))
    assert not (tmp_path / "target").exists()


def test_convolutions_stay(tmp_path: Path) -> None:
    kernels = {
        "model.layers.0.mamba.conv1d.weight": torch.randn(64, 1, 31),
        "audio.conv1.weight": torch.randn(64, 32, 3),
        "audio.pos_conv_embed.weight": torch.randn(64, 4, 128),
    }
    report = quantize_checkpoint(write(tmp_path / "source", tensors_of_a_model() | kernels), tmp_path / "target")
    assert not {name.removesuffix(".weight") for name in kernels} & {*report.quantized}


@pytest.mark.parametrize("outside", ["../store/model.safetensors", "/store/model.safetensors"])
def test_files_out_of_the_folder_are_not_read_or_written(tmp_path: Path, outside: str) -> None:
    source = write(tmp_path / "source", tensors_of_a_model(), 2)
    index = json.loads((source / "model.safetensors.index.json").read_text())
    index["weight_map"]["lm_head.weight"] = outside
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=f"names {outside}, which is out of its folder: put the files, or links,"):
        quantize_checkpoint(source, tmp_path / "target", "modelopt")
    assert not (tmp_path / "target").exists()


def test_a_part_without_the_others(tmp_path: Path) -> None:
    """Names say how many there are where no index does."""
    source = write(tmp_path / "source", tensors_of_a_model(), 3)
    (source / "model.safetensors.index.json").unlink()
    quantize_checkpoint(source, tmp_path / "whole", "modelopt")
    (source / "model-00002-of-00003.safetensors").unlink()
    missing = "model-00002-of-00003.safetensors is missing, by the name of model-00001-of-00003.safetensors: download"
    with pytest.raises(ValueError, match=missing):
        quantize_checkpoint(source, tmp_path / "target", "modelopt")
    with pytest.raises(ValueError, match=missing):
        refuse_broken_files(source)
    assert missing in survey(source).faults[0]


def test_weights_in_a_folder_of_the_checkpoint(tmp_path: Path) -> None:
    source = write(tmp_path / "source", tensors_of_a_model(), 2)
    index = json.loads((source / "model.safetensors.index.json").read_text())
    (source / "weights").mkdir()
    for file in set(index["weight_map"].values()):
        (source / file).rename(source / "weights" / file)
    index["weight_map"] = {name: f"weights/{file}" for name, file in index["weight_map"].items()}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    quantize_checkpoint(source, tmp_path / "target", "modelopt")
    assert set(read(tmp_path / "target" / "weights")) == set(
        json.loads((tmp_path / "target" / "model.safetensors.index.json").read_text())["weight_map"]
    )


def test_an_earlier_output_in_the_checkpoint_is_not_copied(tmp_path: Path) -> None:
    source = write(tmp_path / "source", tensors_of_a_model())
    quantize_checkpoint(source, source / "earlier", "modelopt")
    quantize_checkpoint(source, tmp_path / "target", "modelopt")
    assert (source / "earlier" / "config.json").is_file()
    assert not (tmp_path / "target" / "earlier").exists()


@pytest.mark.parametrize("itself", ["", ".", "./", None])
def test_folders_of_a_checkpoint(tmp_path: Path, itself: str | None) -> None:
    """Pooling and templates go along, and what sentence-transformers' modules have; not weights in other formats."""
    source = write(tmp_path / "source", tensors_of_a_model())
    (source / "modules.json").write_text(json.dumps([{"path": itself}, {"path": "./1_Pooling"}, {"path": "2_Dense"}]))
    here = ["1_Pooling/config.json", "2_Dense/model.safetensors", "additional_chat_templates/tools.jinja"]
    for name in [*here, "onnx/model.onnx", "original/consolidated.00.pth", ".cache/huggingface/x.json"]:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(name)
    target = source / "quantized"
    quantize_checkpoint(source, target)
    found = [str(file.relative_to(target)) for file in target.rglob("*") if file.parent != target and file.is_file()]
    assert sorted(found) == here and all((target / name).read_text() == name for name in here)
    (source / "modules.json").write_text('{"path": "1_Pooling"}')
    with pytest.raises(ValueError, match=r"modules\.json is no list of modules"):
        quantize_checkpoint(source, tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_mamba_stays(tmp_path: Path) -> None:
    """Of the first kind; of the second, which has no dt_proj, engines serve quantized layers."""
    shapes = {"in_proj": (128, 64), "x_proj": (48, 64), "dt_proj": (64, 16), "out_proj": (64, 64)}
    tensors = {f"model.layers.0.mamba.{name}.weight": torch.randn(shape) for name, shape in shapes.items()}
    second = {f"model.layers.1.mamba.{name}": torch.randn(shapes[name]) for name in ("in_proj", "out_proj")}
    tensors |= {f"{name}.weight": tensor for name, tensor in second.items()}
    report = quantize_checkpoint(write(tmp_path / "source", tensors), tmp_path / "target")
    assert set(report.kept) == {f"model.layers.0.mamba.{name}" for name in shapes}
    assert set(report.quantized) == set(second)


def test_transposed_weights(tmp_path: Path) -> None:
    source = write(tmp_path / "source", tensors_of_a_model(), model_type="gpt2")
    with pytest.raises(ValueError, match=r"source is a gpt2, whose weights are transposed in the checkpoint"):
        quantize_checkpoint(source, tmp_path / "target")


@pytest.mark.parametrize("layout", ["compressed-tensors", "modelopt"])
def test_a_tied_output_layer_is_ignored_by_name(tmp_path: Path, layout: str) -> None:
    tensors = tensors_of_a_model()
    del tensors["lm_head.weight"]
    quantize_checkpoint(write(tmp_path / "source", tensors), tmp_path / "target", layout)
    config = json.loads((tmp_path / "target" / "config.json").read_text())
    assert config["quantization_config"]["ignore"] == ["lm_head", "model.embed_tokens"]


@pytest.mark.parametrize("scheme", ["nvfp4", "ptpc_fp8"])
@pytest.mark.parametrize(("layout", "pattern"), [("compressed-tensors", r"re:.*vision.*"), ("modelopt", "*vision*")])
def test_an_encoder_is_ignored_as_a_whole(tmp_path: Path, scheme: str, layout: str, pattern: str) -> None:
    """vLLM's model of it may make one layer of q, k and v, and not say so."""
    tower = {f"visual.vision_model.0.self_attn.{name}_proj.weight": torch.ones(16, 64) for name in "qkv"}
    source = write(tmp_path / "source", tensors_of_a_model() | tower)
    quantize_checkpoint(source, tmp_path / "target", layout, scheme=scheme)
    ignored = json.loads((tmp_path / "target" / "config.json").read_text())["quantization_config"]["ignore"]
    assert pattern in ignored
    assert not any("audio" in entry for entry in ignored)


def test_compressed_tensors_reads_the_description(tmp_path: Path) -> None:
    source = write(tmp_path / "source", tensors_of_a_model(), rope_theta=10000.0)
    quantize_checkpoint(source, tmp_path / "target")
    config = json.loads((tmp_path / "target" / "config.json").read_text())
    assert config["rope_theta"] == 10000.0
    description = config["quantization_config"]
    assert description["quant_method"] == "compressed-tensors"
    read_back = QuantizationConfig.model_validate(description)
    scheme = read_back.config_groups["group_0"]
    assert (read_back.format, scheme.format) == ("nvfp4-pack-quantized",) * 2
    assert (scheme.weights.num_bits, scheme.weights.group_size, scheme.weights.strategy) == (4, 16, "tensor_group")
    assert scheme.input_activations is None


def test_inputs_of_layers_make_w4a4(tmp_path: Path) -> None:
    source = write(tmp_path / "source", tensors_of_a_model())
    quantize_checkpoint(source, tmp_path / "ct", input_amax=INPUT_AMAX)
    quantize_checkpoint(source, tmp_path / "mo", "modelopt", input_amax=INPUT_AMAX)
    ct, mo = read(tmp_path / "ct"), read(tmp_path / "mo")
    for module, amax in INPUT_AMAX.items():
        assert ct[f"{module}.input_global_scale"].tolist() == [pytest.approx(2688 / amax)]
        assert mo[f"{module}.input_scale"].item() == pytest.approx(amax / 2688)
    described = [
        json.loads((tmp_path / name / "config.json").read_text())["quantization_config"] for name in ("ct", "mo")
    ]
    scheme = QuantizationConfig.model_validate(described[0]).config_groups["group_0"]
    assert (scheme.input_activations.num_bits, scheme.input_activations.dynamic) == (4, "local")
    assert described[1]["quant_algo"] == "NVFP4"
    assert described[1]["config_groups"]["group_0"]["input_activations"]["num_bits"] == 4


def test_without_inputs_modelopt_is_w4a16(tmp_path: Path) -> None:
    quantize_checkpoint(write(tmp_path / "source", tensors_of_a_model()), tmp_path / "target", "modelopt")
    description = json.loads((tmp_path / "target" / "config.json").read_text())["quantization_config"]
    assert (description["quant_algo"], description["group_size"]) == ("W4A16_NVFP4", 16)
    assert description["config_groups"]["group_0"]["input_activations"] is None
    assert not any(name.endswith("input_scale") for name in read(tmp_path / "target"))


def test_the_legacy_description_stands_in_its_own_file(tmp_path: Path) -> None:
    source = write(tmp_path / "source", tensors_of_a_model())
    quantize_checkpoint(source, tmp_path / "target", "modelopt-legacy", input_amax=INPUT_AMAX)
    assert "quantization_config" not in json.loads((tmp_path / "target" / "config.json").read_text())
    description = json.loads((tmp_path / "target" / "hf_quant_config.json").read_text())
    assert description["producer"]["name"] == "modelopt"
    assert description["quantization"] == {
        "quant_algo": "NVFP4",
        "kv_cache_quant_algo": None,
        "group_size": 16,
        "exclude_modules": ["lm_head", "model.embed_tokens"],
    }


def test_the_layouts_convert_into_each_other(tmp_path: Path) -> None:
    """compressed-tensors' own converter makes of our ModelOpt tensors our compressed-tensors ones."""
    source = write(tmp_path / "source", tensors_of_a_model())
    for layout in ("modelopt", "compressed-tensors"):
        quantize_checkpoint(source, tmp_path / layout, layout, input_amax=INPUT_AMAX)
    converter = ModelOptNvfp4Converter(targets=["re:.*_proj$"])
    modelopt = read(tmp_path / "modelopt")
    converter.validate(modelopt)
    converted, expected = converter.process(modelopt), read(tmp_path / "compressed-tensors")
    assert converted.keys() == expected.keys()
    for name, tensor in expected.items():
        assert_same(converted[name].reshape(tensor.shape), tensor)


def test_transformers_reads_the_values_of_dequantize(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    quantize_checkpoint(DEMO_MODEL, tmp_path / "target")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "target", dtype=torch.bfloat16)
    tensors = read(tmp_path / "target")
    with torch.no_grad():
        model(torch.arange(4)[None])  # the first call decompresses
    linears = {name: m for name, m in model.named_modules() if isinstance(m, torch.nn.Linear) and name != "lm_head"}
    assert len(linears) == 21
    for name, linear in linears.items():
        weight = weight_of(tensors, name)
        # Theirs divides the block scale by the global scale first, which rounds otherwise in fp32: a value halfway
        # between two of bf16 may go either way. Both round the exact value.
        for found in (linear.weight.detach(), weight.dequantize(torch.bfloat16)):
            torch.testing.assert_close(found.double(), weight64(weight), rtol=2**-8 * (1 + 1e-4), atol=0)


def test_the_output_of_one_file_is_all_that_memory_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, sizes = write(tmp_path / "source", tensors_of_a_model(), 4), []

    def watched(tensors: dict[str, torch.Tensor], path: Path, **rest: Any) -> None:
        sizes.append(sum(tensor.nbytes for tensor in tensors.values()))
        save_file(tensors, path, **rest)

    monkeypatch.setattr(output_module, "save_file", watched)
    report = quantize_checkpoint(source, tmp_path / "target")
    assert len(sizes) == 4
    assert sum(sizes) == report.bytes_after


def truncate(folder: Path) -> None:
    file = folder / "model-00002-of-00003.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


# What git leaves in the place of a large file where git-lfs was not there.
LFS_POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:" + 64 * "0" + "\nsize 4976698672\n"


def point_to_lfs(folder: Path) -> None:
    (folder / "model-00002-of-00003.safetensors").write_text(LFS_POINTER)


def write_text(file: str, text: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        (folder / file).write_text(text)

    return damage


def edit_config(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "fp8"}}))


def name_one_more(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["a.weight"] = "model-00001-of-00003.safetensors"
    index.write_text(json.dumps(content))


def write_twice(folder: Path) -> None:
    """A tensor, where no index says which is the right one."""
    (folder / "model.safetensors.index.json").unlink()
    save_file({"lm_head.weight": torch.ones(128, HIDDEN)}, folder / "rescued.safetensors")


def turn_into_mistrals(folder: Path, config: str = "params.json") -> None:
    (folder / "model.safetensors.index.json").unlink()
    (folder / "config.json").rename(folder / config)
    (folder / "params.json").write_text("{}")
    for number, file in enumerate(folder.glob("model*")):
        file.rename(folder / f"consolidated-{number}.safetensors")


def leave_links_alone(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.json").symlink_to("blobs/0123")


def remove_weights(folder: Path) -> None:
    for file in folder.glob("*.safetensors*"):
        file.unlink()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncate, r"model-00002-of-00003.safetensors is truncated: it has \d+ of \d+ bytes, and .* is the first of"),
        (point_to_lfs, "model-00002-of-00003.safetensors is a Git LFS pointer and not the weights: run `git lfs pull`"),
        (lambda folder: (folder / "model-00003-of-00003.safetensors").unlink(), "00003.safetensors is missing, but"),
        (edit_config, "is quantized already: start from the 16-bit checkpoint"),
        (
            write_text("config.json", '{"text_config": {"quantization_config": {"quant_method": "fp8"}}}'),
            "is quantized already",
        ),
        (
            write_text("config.json", '{"compression_config": {"quant_method": "compressed-tensors"}}'),
            "is quantized already",
        ),
        (lambda folder: (folder / "hf_quant_config.json").write_text("{}"), "is quantized already"),
        (lambda folder: (folder / "config.json").unlink(), "has no config.json: name the folder"),
        (write_text("config.json", "{"), "config.json is no JSON .*: download the checkpoint again"),
        (write_text("config.json", '{"a": ' + 9999 * "["), "config.json is no JSON .*: download the checkpoint again"),
        (write_text("config.json", '{"text_config": [1]}'), "text_config in .*config.json is no JSON object: download"),
        (write_text("config.json", '{"quantization_config": "fp8"}'), "quantization_config in .* is no JSON object"),
        (
            write_text("config.json", '{"text_config": {"quantization_config": "fp8"}}'),
            "quantization_config in .* is no JSON object",
        ),
        (write_text("config.json", "[]"), "config.json holds no JSON object: download the checkpoint again"),
        (write_text("model.safetensors.index.json", 9999 * "["), "index.json has no weight_map: download it again"),
        (write_text("modules.json", 9999 * "["), "modules.json is no JSON .*: download the checkpoint"),
        (write_text("model.safetensors.index.json", "{}"), "index.json has no weight_map: download it again"),
        (
            write_twice,
            "^lm_head.weight is in two files, .*/model-0000[123]-of-00003.safetensors and .*/rescued.safetensors: keep",
        ),
        (turn_into_mistrals, "is in Mistral's own format .*: download the model in Hugging Face's"),
        (lambda folder: turn_into_mistrals(folder, "config.json"), "is in Mistral's own format"),
        (
            leave_links_alone,
            "tokenizer.json is a link to blobs/0123, which is gone: download the checkpoint again",
        ),
        (remove_weights, "has no safetensors files: convert the checkpoint first"),
        (
            name_one_more,
            "a.weight is not in .*model-00001-of-00003.safetensors, where model.safetensors",
        ),
    ],
)
def test_broken_checkpoints(tmp_path: Path, damage: Callable[[Path], None], message: str) -> None:
    source = write(tmp_path / "source", tensors_of_a_model(), 3)
    damage(source)
    with pytest.raises(ValueError, match=message):
        quantize_checkpoint(source, tmp_path / "target")
    assert not (tmp_path / "target").exists()


@pytest.mark.parametrize("damage", [truncate, point_to_lfs])
def test_a_broken_file_is_told_alike(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    """To who quantizes a checkpoint, to who serves it, and by the doctor."""
    source = write(tmp_path / "source", tensors_of_a_model(), 3)
    damage(source)
    with pytest.raises(ValueError) as quantizing:
        quantize_checkpoint(source, tmp_path / "target")
    with pytest.raises(ValueError) as serving:
        refuse_broken_files(source)
    assert str(quantizing.value) == str(serving.value) == survey(source).faults[0]


def test_a_folder_is_no_weight_file(tmp_path: Path) -> None:
    """Whatever its name; and what an index does not name, it is not blamed for."""
    source = write(tmp_path / "source", tensors_of_a_model())
    (source / "of_an_earlier_run.safetensors").mkdir()
    assert len(quantize_checkpoint(source, tmp_path / "target").quantized) == 14
    assert not survey(source).faults


def test_mistrals_own_format_of_the_same_weights_is_left_out(tmp_path: Path) -> None:
    source = write(tmp_path / "source", tensors_of_a_model())
    save_file({"layers.0.attention.wq.weight": torch.ones(64, 64)}, source / "consolidated.safetensors")
    (source / "params.json").write_text("{}")
    assert len(quantize_checkpoint(source, tmp_path / "target").quantized) == 14
    assert not (tmp_path / "target" / "consolidated.safetensors").exists()


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("model.layers.1.mlp.up_proj.weight", torch.full((96, 64), float("nan")), "^{name} holds NaN or infinity"),
        ("model.layers.1.mlp.down_proj.weight", torch.ones(64, 72), "^{name} has 72 columns, no multiple of 16"),
        ("model.layers.1.mlp.down_proj.weight", torch.ones(64, 96).int(), "^{name} is I32; weights are"),
        ("model.layers.1.mlp.experts.w1", torch.ones(2, 64, 96), "^{name} holds all experts of a layer in one tensor"),
        # GraniteMoE's
        ("model.layers.1.moe.input_linear.weight", torch.ones(2, 64, 96), "^{name} holds all experts of a layer in"),
    ],
)
def test_a_weight_that_cannot_be_nvfp4(tmp_path: Path, name: str, tensor: torch.Tensor, message: str) -> None:
    source = write(tmp_path / "source", tensors_of_a_model() | {name: tensor}, 3)
    with pytest.raises((ValueError, TypeError), match=message.replace("{name}", name)):
        quantize_checkpoint(source, tmp_path / "target")
    assert not (tmp_path / "target" / "config.json").exists(), "an unfinished checkpoint must not load"


def test_experts_with_biases_are_not_sent_to_ptpc(tmp_path: Path) -> None:
    """gpt-oss's, which the engines' plugins refuse."""
    experts = {"model.layers.1.mlp.experts.down_proj": torch.ones(2, 64, 96)}
    biases = {"model.layers.1.mlp.experts.down_proj_bias": torch.ones(2, 96)}
    source = write(tmp_path / "source", tensors_of_a_model() | experts | biases)
    with pytest.raises(ValueError, match="one tensor for each of them, without biases: serve it in 16 bits$"):
        quantize_checkpoint(source, tmp_path / "target")


@pytest.mark.parametrize(
    ("ignore", "kept", "quantized"),
    [
        ("*.experts.1.*", "1.down_proj", "0.down_proj"),
        ("*.experts.*.gate_proj", "0.gate_proj", "0.down_proj"),
        ("*.down_proj", "0.down_proj", "0.gate_proj"),
    ],
    ids=["an-expert", "gate", "down"],
)
def test_the_experts_of_a_layer_are_not_parted(tmp_path: Path, ignore: str, kept: str, quantized: str) -> None:
    """Engines quantize all of them or none."""
    experts = {
        f"model.layers.0.mlp.experts.{expert}.{name}.weight": torch.randn(32, 32)
        for expert in range(2)
        for name in ("gate_proj", "up_proj", "down_proj")
    }
    source = write(
        tmp_path / "source", experts | {"model.layers.0.mlp.shared_experts.up_proj.weight": torch.ones(32, 32)}
    )
    layer = "model.layers.0.mlp.experts"
    with pytest.raises(ValueError, match=f"ignore keeps {layer}.{kept} but not {layer}.{quantized}, and engines make"):
        quantize_checkpoint(source, tmp_path / "target", ignore=(ignore,))
    assert not (tmp_path / "target").exists()
    quantize_checkpoint(source, tmp_path / "target", ignore=("*.experts.*",))


def test_arguments(tmp_path: Path) -> None:
    source = write(tmp_path / "source", tensors_of_a_model())
    with pytest.raises(ValueError, match="scheme 'int4' is not one of ptpc_fp8, nvfp4"):
        quantize_checkpoint(source, tmp_path / "target", scheme="int4")
    with pytest.raises(ValueError, match="layout 'modelopt-legacy' is not one of compressed-tensors, modelopt$"):
        quantize_checkpoint(source, tmp_path / "target", "modelopt-legacy", scheme="ptpc_fp8")
    with pytest.raises(ValueError, match="input_amax and search are for the scheme nvfp4"):
        quantize_checkpoint(source, tmp_path / "target", scheme="ptpc_fp8", search=True)
    with pytest.raises(ValueError, match="layout 'gguf' is not one of compressed-tensors, modelopt, modelopt-legacy"):
        quantize_checkpoint(source, tmp_path / "target", "gguf")
    with pytest.raises(ValueError, match="describes W4A4 only: give input_amax, or take the layout modelopt"):
        quantize_checkpoint(source, tmp_path / "target", "modelopt-legacy")
    for wrong in (0.0, float("nan"), float("inf"), None):
        inputs = INPUT_AMAX | {"model.layers.1.mlp.up_proj": wrong}
        with pytest.raises(ValueError, match=f"input_amax of model.layers.1.mlp.up_proj is {wrong}; it must be"):
            quantize_checkpoint(source, tmp_path / "target", input_amax=inputs)
    with pytest.raises(ValueError, match="source has no two-dimensional weight that ignore leaves"):
        quantize_checkpoint(source, tmp_path / "target", ignore=("*",))
    (tmp_path / "link").symlink_to(source)
    for itself in (source, source / ".." / "source", tmp_path / "link"):
        with pytest.raises(ValueError, match=f"^{itself} is the model itself: name another folder$"):
            quantize_checkpoint(source, itself)
    with pytest.raises(ValueError, match=r"ignore keeps model.layers.0.self_attn.k_proj but not .*q_proj, and engines"):
        quantize_checkpoint(source, tmp_path / "target", ignore=("*.k_proj",))
    assert not (tmp_path / "target").exists()

# SPDX-License-Identifier: Apache-2.0
"""Dense NVFP4 checkpoints without a flag, against their own values in BF16 and against vLLM's emulation of NVFP4."""

from pathlib import Path

import checkpoints
import engines
import fake_quantized
import nvfp4_checkpoints
import pytest
import torch
from conftest import succeed
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

K_PROJ = "model.layers.0.self_attn.k_proj"


@pytest.fixture(scope="module")
def values(folder: Path, nvfp4_dense: nvfp4_checkpoints.Quantized) -> engines.Result:
    return succeed(engines.run(folder / "nvfp4-values-run", nvfp4_dense.write_values(folder / "nvfp4-values")))


@pytest.fixture(scope="module")
def shared_scale(folder: Path, dense_checkpoint: Path) -> Path:
    """One global scale for all layers, which is all that vLLM serves right."""
    quantized = nvfp4_checkpoints.Quantized(dense_checkpoint, shared_scale=True)
    return quantized.write_modelopt(folder / "nvfp4-shared")


def test_modelopt_is_exact(nvfp4_served: engines.Result, values: engines.Result) -> None:
    # The values are exact in BF16, products are exact, and sums are in fp32: only their order may differ.
    assert (nvfp4_served.logprobs - values.logprobs).abs().max() < 0.01
    assert "NVFP4 checkpoint (modelopt): nvfp4_triton serves it" in nvfp4_served.log
    assert "nvfp4_triton: 8 linear layers" in nvfp4_served.log
    assert "1 layers left to vLLM (lm_head); activations: 16bit, prefill: exact" in nvfp4_served.log


def test_a_wrong_scale_would_be_seen(nvfp4_dense: nvfp4_checkpoints.Quantized) -> None:
    """The shards of one layer differ by more than any tolerance here: taking one scale for all is no rounding."""
    scales = [nvfp4_dense.layers[K_PROJ.replace("k_proj", name)].divisor for name in ("q_proj", "k_proj", "v_proj")]
    assert len({scale.item() for scale in scales}) == 3


def test_served_tensors(nvfp4_served: engines.Result, nvfp4_dense: nvfp4_checkpoints.Quantized) -> None:
    weights = nvfp4_served.weights[0]
    layer = nvfp4_dense.layers[K_PROJ]
    rows = slice(128, 192)  # below q's
    assert torch.equal(weights["model.layers.0.self_attn.qkv_proj.weight"][rows], layer.packed)
    assert torch.equal(weights["model.layers.0.self_attn.qkv_proj.weight_scale"][rows], layer.scale.view(torch.uint8))
    global_scale = weights["model.layers.0.self_attn.qkv_proj.weight_global_scale"]
    assert torch.equal(global_scale[rows], layer.divisor.reciprocal().expand(64))
    assert weights["lm_head.weight"].dtype == torch.bfloat16
    assert not [name for name in weights if name.endswith(("scale_2", "input_scale", "_packed"))]


def test_compressed_tensors_without_activations(
    folder: Path, nvfp4_dense: nvfp4_checkpoints.Quantized, values: engines.Result
) -> None:
    """Weights alone, which vLLM refuses on ROCm; parts of fused and unfused layers' names on the ignore list."""
    checkpoint = nvfp4_dense.write_compressed_tensors(
        folder / "nvfp4-ct", activations=False, ignore=("lm_head", "layers.1.self_attn.q_proj",
                                                        "layers.1.self_attn.k_proj", "layers.1.self_attn.v_proj",
                                                        "layers.0.mlp.down_proj")
    )  # fmt: skip
    result = succeed(engines.run(folder / "nvfp4-ct-run", checkpoint))
    assert (result.logprobs - values.logprobs).abs().max() < 0.01
    assert result.weights[0]["model.layers.0.mlp.down_proj.weight"].dtype == torch.bfloat16
    assert result.weights[0]["model.layers.1.self_attn.qkv_proj.weight"].dtype == torch.bfloat16
    assert "nvfp4_triton: 6 linear layers" in result.log


def test_transformers_reads_the_same_checkpoint_the_same_way(folder: Path, dense_checkpoint: Path) -> None:
    """compressed-tensors' writer and its reader in transformers, with the global scales of an ordinary calibration."""
    quantized = nvfp4_checkpoints.Quantized(dense_checkpoint, calibrated=True)
    checkpoint = quantized.write_compressed_tensors(folder / "nvfp4-calibrated", activations=False)
    result = succeed(engines.run(folder / "nvfp4-calibrated-run", checkpoint))
    model = AutoModelForCausalLM.from_pretrained(
        checkpoint, quantization_config=CompressedTensorsConfig(dequantize=True)
    )
    expected = fake_quantized.logprobs(model.float(), result.prompt_token_ids)
    unquantized = fake_quantized.logprobs(fake_quantized.load(dense_checkpoint), result.prompt_token_ids)
    assert (result.logprobs - expected).abs().mean() < 0.05 * (unquantized - expected).abs().mean()


def test_two_ranks(
    folder: Path, nvfp4_dense: nvfp4_checkpoints.Quantized, nvfp4_served: engines.Result, values: engines.Result
) -> None:
    """ModelOpt's W4A16 with a quantized output head, sharded, in fp16."""
    checkpoint = nvfp4_dense.write_modelopt(folder / "nvfp4-tp", "W4A16_NVFP4", ignore=())
    result = succeed(engines.run(folder / "nvfp4-tp-run", checkpoint, tensor_parallel_size=2, dtype="float16"))
    one = nvfp4_served.weights[0]
    for name in ("model.layers.0.self_attn.o_proj.weight", "model.layers.0.mlp.down_proj.weight_scale"):
        assert torch.equal(torch.cat([rank[name] for rank in result.weights], 1), one[name])
    for rank in result.weights:
        name = "model.layers.0.mlp.down_proj.weight_global_scale"
        assert torch.equal(rank[name], one[name])
        assert rank["lm_head.weight"].dtype == torch.uint8
    assert (result.logprobs - values.logprobs).abs().mean() < 0.05


def test_tied_embeddings(folder: Path) -> None:
    """The output head is the embedding, although no ignore list says so."""
    source = checkpoints.dense(folder / "tied", tie_word_embeddings=True)
    quantized = nvfp4_checkpoints.Quantized(source)
    assert "lm_head" not in quantized.layers
    result = succeed(engines.run(folder / "nvfp4-tied-run", quantized.write_modelopt(folder / "nvfp4-tied", ignore=())))
    model = fake_quantized.load(quantized.write_values(folder / "nvfp4-tied-values"))
    expected = fake_quantized.logprobs(model, result.prompt_token_ids)
    # A head as large as an embedding makes logprobs of 35.
    assert (result.logprobs - expected).abs().mean() < 0.01 * expected.abs().mean()
    assert "lm_head.weight_scale" not in result.weights[0]


def test_tied_embeddings_beside_fp8_layers(tmp_path: Path) -> None:
    """An output head that quantized_layers has in FP8 is the embedding, too."""
    quantized = nvfp4_checkpoints.Quantized(checkpoints.dense(tmp_path / "tied", tie_word_embeddings=True))
    settings = {} if engines.FP8_KV_CACHE else {"kv_cache_dtype": "bfloat16"}
    named, ignored = (
        succeed(
            engines.run(tmp_path / f"run {head}", quantized.write_mixed(tmp_path / f"mixed {head}", head), **settings)
        )
        for head in ("FP8", None)
    )
    assert torch.equal(named.logprobs, ignored.logprobs)
    assert named.weights[0]["lm_head.weight"].dtype == torch.bfloat16
    assert named.weights[0].keys() == ignored.weights[0].keys()


def test_fp8_layers_and_an_fp8_kv_cache(
    folder: Path, nvfp4_dense: nvfp4_checkpoints.Quantized, values: engines.Result
) -> None:
    checkpoint = nvfp4_dense.write_mixed(folder / "nvfp4-mixed")
    settings = {} if engines.FP8_KV_CACHE else {"kv_cache_dtype": "bfloat16"}
    result = succeed(engines.run(folder / "nvfp4-mixed-run", checkpoint, **settings))
    assert ("kv_cache_dtype=fp8_e4m3" in result.log) == engines.FP8_KV_CACHE
    assert "4 linear layers in FP8 (model.layers.0.self_attn.qkv_proj" in result.log
    assert "4 linear layers (model.layers.0.mlp.gate_up_proj" in result.log
    weights, tensors = result.weights[0], load_file(checkpoint / "model.safetensors")
    rows = {"q_proj": slice(0, 128), "k_proj": slice(128, 192), "v_proj": slice(192, 256)}
    for name, place in rows.items():
        codes = tensors[f"model.layers.0.self_attn.{name}.weight"].view(torch.uint8)
        assert torch.equal(weights["model.layers.0.self_attn.qkv_proj.weight"][place], codes)
        scale = tensors[f"model.layers.0.self_attn.{name}.weight_scale"]
        assert (weights["model.layers.0.self_attn.qkv_proj.weight_scale"][place] == scale).all()
    for letter, scale in nvfp4_checkpoints.KV_SCALES.items():
        assert weights[f"model.layers.1.self_attn.attn._{letter}_scale"] == (scale if engines.FP8_KV_CACHE else 1.0)
    assert 0.01 < (result.logprobs - values.logprobs).abs().mean() < 0.3


def test_nvfp4_activations_are_those_of_vllms_emulation(folder: Path, shared_scale: Path) -> None:
    emulated = succeed(
        engines.run(folder / "nvfp4-upstream", shared_scale, {"LLM_QUANT_ROCM_NVFP4": "0", "EMULATE_NVFP4": "1"})
    )
    ours = succeed(engines.run(folder / "nvfp4-a4", shared_scale, {"LLM_QUANT_ROCM_NVFP4_ACTIVATIONS": "nvfp4"}))
    exact = succeed(engines.run(folder / "nvfp4-a16", shared_scale, {"LLM_QUANT_ROCM_NVFP4_PREFILL": "exact"}))
    assert "nvfp4_triton" not in emulated.log
    assert "activations: nvfp4" in ours.log
    # A rounding between layers flips 4-bit codes of the next one, so not all of the change is explained.
    correlation = torch.corrcoef(torch.stack([emulated.logprobs - exact.logprobs, ours.logprobs - exact.logprobs]))
    assert correlation[0, 1] > 0.6
    changed = (emulated.logprobs - exact.logprobs).abs().mean()
    assert (ours.logprobs - emulated.logprobs).abs().mean() < 0.7 * changed

# SPDX-License-Identifier: Apache-2.0
"""Servers as users start them: the demo model in BF16, PTPC and NVFP4, and experts, against transformers."""

from pathlib import Path

import fake_quantized
import nvfp4_checkpoints
import pytest
import servers
import torch
from conftest import DEMO
from transformers import AutoTokenizer

from llm_quant_rocm.checkpoint.quantize import quantize_checkpoint
from llm_quant_rocm.formats import fp8

two_gpus = pytest.mark.skipif(torch.cuda.device_count() == 1, reason="a CPU, or two GPUs")


def tokens(checkpoint: Path) -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    return [tokenizer(prompt)["input_ids"] for prompt in servers.PROMPTS]


def expected(checkpoint: Path) -> torch.Tensor:
    """Logprobs of the prompts' tokens, by transformers in fp32."""
    return fake_quantized.logprobs(fake_quantized.load(checkpoint), tokens(checkpoint))


@pytest.fixture(scope="module")
def bf16() -> torch.Tensor:
    return expected(DEMO)


def test_bf16_with_the_plugin_installed(folder: Path, bf16: torch.Tensor) -> None:
    served = servers.run(folder / "demo-bf16", DEMO)
    assert (served.logprobs - bf16).abs().mean() < 0.03
    assert "nvfp4_triton" not in served.log
    assert "ptpc_fp8:" not in served.log


def test_ptpc(folder: Path, bf16: torch.Tensor) -> None:
    served = servers.run(folder / "demo-ptpc", DEMO, "--quantization=ptpc_fp8", "--kv-cache-dtype=fp8_e4m3", anew=True)
    assert "ptpc_fp8: quantizing 12 linear layers to E4M3" in served.log
    assert "norm fusion: on for 7 norms, with quantization, where an FP8 layer reads them; " in served.log
    assert "reduce_norm_quant runs on" in served.log
    # The bytes of every layer are those of the format, whoever loads it.
    weights, model = served.weights[0], fake_quantized.load(DEMO)
    for layer, block in enumerate(model.model.layers):
        attention, mlp = block.self_attn, block.mlp
        shards = {
            "self_attn.qkv_proj": (attention.q_proj, attention.k_proj, attention.v_proj),
            "self_attn.o_proj": (attention.o_proj,),
            "mlp.gate_up_proj": (mlp.gate_proj, mlp.up_proj),
            "mlp.down_proj": (mlp.down_proj,),
        }
        for name, modules in shards.items():
            whole = torch.cat([module.weight.data for module in modules])
            codes, scale = fp8.quantize_rows(whole.bfloat16(), fp8.OCP)
            assert torch.equal(weights[f"model.layers.{layer}.{name}.weight"], codes.view(torch.uint8))
            assert torch.equal(weights[f"model.layers.{layer}.{name}.weight_scale"], scale)
    correlation, error = fake_quantized.explains(served.logprobs, DEMO, tokens(DEMO))
    assert correlation > 0.5
    assert (served.logprobs - bf16).abs().mean() < 0.1


def test_nvfp4_without_a_flag(folder: Path, bf16: torch.Tensor) -> None:
    checkpoint = folder / "demo-modelopt"
    quantize_checkpoint(DEMO, checkpoint, "modelopt", share_global_scales=False)
    served = servers.run(folder / "demo-modelopt-run", checkpoint)
    assert "nvfp4_triton: 12 linear layers" in served.log
    assert (served.logprobs - bf16).abs().mean() < 0.5


@two_gpus
def test_two_ranks_with_the_quantized_all_reduce(folder: Path, bf16: torch.Tensor) -> None:
    checkpoint = folder / "demo-compressed-tensors"
    quantize_checkpoint(DEMO, checkpoint, "compressed-tensors", share_global_scales=False)
    wishes = {"ROCM_QUICK_REDUCE_QUANTIZATION": "FP4", "ROCM_QUICK_REDUCE_MIN_SIZE_BYTES_MB": "0"}
    binding = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
    served = servers.run(folder / "demo-compressed-tensors-run", checkpoint, "--tp-size=2", **binding, **wishes)
    assert "nvfp4_triton: 12 linear layers" in served.log
    transport = "two_shot" if torch.cuda.is_available() else "process_group"
    assert f"quantized all-reduce: {transport} FP4 from 0 bytes" in served.log
    assert "norm fusion: on for 7 norms, with the all-reduce" in served.log  # which this Llama does not leave to them
    assert (served.logprobs - bf16).abs().mean() < 0.6


def test_experts_and_unequal_scales(folder: Path, nvfp4_moe: nvfp4_checkpoints.Quantized) -> None:
    checkpoint = nvfp4_moe.write_compressed_tensors(folder / "moe-ct", activations=True)
    values = nvfp4_moe.write_values(folder / "moe-values")
    # Shared out between two ranks: rows of gate and up, columns of down.
    ranks, binding = 2 - (torch.cuda.device_count() == 1), {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
    served = servers.run(folder / "moe-ct-run", checkpoint, "--dtype=float16", f"--tp-size={ranks}", **binding)
    assert "nvfp4_triton: 4 linear layers" in served.log
    assert "2 mixture-of-experts layers" in served.log
    # What a checkpoint and its values in BF16 differ by is roundings, which may flip the choice of an expert.
    assert (served.logprobs - expected(values)).abs().median() < 0.02


@two_gpus
def test_experts_quantized_on_two_ranks(folder: Path, moe_checkpoint: Path) -> None:
    binding = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
    # In fp16: bf16's roundings flip the choice of an expert too often.
    arguments = ("--quantization=ptpc_fp8", "--tp-size=2", "--dtype=float16")
    served = servers.run(folder / "moe-ptpc", moe_checkpoint, *arguments, **binding)
    assert "ptpc_fp8: quantizing 4 linear layers and 2 mixture-of-experts layers" in served.log
    # This model leaves its all-reduces to the norms.
    assert "where an FP8 layer reads them and the all-reduce, where the model leaves it to them; " in served.log
    if not torch.cuda.is_available():
        assert "reduce_norm_quant runs on reference; passed over fused: cpu has no peer memory" in served.log
    # Codes and scales are those of whole rows, whatever the number of ranks that share them.
    for number, layer in enumerate(fake_quantized.load(moe_checkpoint).model.layers):
        gate_up, down = layer.mlp.experts.gate_up_proj.data, layer.mlp.experts.down_proj.data
        for name, whole in (("w13", gate_up), ("w2", down)):
            codes, scale = fp8.quantize_rows(whole.half(), fp8.OCP)
            for rank, weights in enumerate(served.weights):
                found = weights[f"model.layers.{number}.mlp.experts.{name}_weight"]
                found_scale = weights[f"model.layers.{number}.mlp.experts.{name}_weight_scale"]
                if name == "w2":
                    expected_codes, expected_scale = codes.chunk(2, 2)[rank], scale
                else:
                    expected_codes, expected_scale = (
                        torch.cat([part.chunk(2, 1)[rank] for part in tensor.chunk(2, 1)], 1)
                        for tensor in (codes.view(torch.uint8), scale)
                    )
                assert torch.equal(found, expected_codes.view(torch.uint8)), name
                assert torch.equal(found_scale, expected_scale), name
    correlation, _ = fake_quantized.explains(served.logprobs, moe_checkpoint, tokens(moe_checkpoint))
    assert correlation > 0.5

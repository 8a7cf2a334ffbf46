# SPDX-License-Identifier: Apache-2.0
"""A mixture-of-experts checkpoint under `--quantization ptpc_fp8`, in fp16."""

from pathlib import Path

import engines
import fake_quantized
import torch
from safetensors.torch import load_file

from llm_quant_rocm.formats import fp8

EXPERTS = "model.layers.1.mlp.experts.routed_experts"


def test_experts_are_quantized_and_router_gates_are_not(moe: engines.Result) -> None:
    weights = moe.weights[0]
    assert weights[f"{EXPERTS}.w13_weight"].dtype == weights[f"{EXPERTS}.w2_weight"].dtype == torch.uint8
    assert weights["model.layers.1.mlp.gate.weight"].dtype == torch.float16
    assert "quantizing 6 linear layers and 1 mixture-of-experts layers" in moe.log
    assert "1 router gates (model.layers.1.mlp.gate)" in moe.log


def test_every_expert_has_its_own_rows_and_scales(moe: engines.Result, moe_checkpoint: Path) -> None:
    tensors = load_file(moe_checkpoint / "model.safetensors")
    weights = moe.weights[0]
    for expert in range(8):
        name = f"model.layers.1.mlp.experts.{expert}"
        w13 = torch.cat([tensors[f"{name}.gate_proj.weight"], tensors[f"{name}.up_proj.weight"]])
        for ours, theirs in (("w13", w13), ("w2", tensors[f"{name}.down_proj.weight"])):
            codes, scale = fp8.quantize_rows(theirs.half(), fp8.OCP)
            assert torch.equal(weights[f"{EXPERTS}.{ours}_weight"][expert], codes.view(torch.uint8))
            assert torch.equal(weights[f"{EXPERTS}.{ours}_weight_scale"][expert], scale)


def test_logprobs_are_those_of_the_quantized_checkpoint(moe: engines.Result, moe_checkpoint: Path) -> None:
    correlation, error = fake_quantized.explains(moe.logprobs, moe_checkpoint, moe.prompt_token_ids)
    assert correlation > 0.6
    assert error < 0.85

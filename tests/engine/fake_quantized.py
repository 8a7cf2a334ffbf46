# SPDX-License-Identifier: Apache-2.0
"""What a served model should compute: the checkpoint in transformers, in fp32, with our quantization emulated."""

from pathlib import Path

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from llm_quant_rocm.formats import fp8


def logprobs(model: PreTrainedModel, prompts: list[list[int]]) -> torch.Tensor:
    """Of every token of every prompt but its first, in one row."""
    rows = []
    with torch.no_grad():
        for tokens in prompts:
            ids = torch.tensor([tokens])
            predicted = model(ids).logits[0, :-1].log_softmax(-1)
            rows.append(predicted.gather(1, ids[0, 1:, None])[:, 0])
    return torch.cat(rows)


def explains(served: torch.Tensor, checkpoint: Path, prompts: list[list[int]]) -> tuple[float, float]:
    """How far our quantization explains the logprobs `served`: two figures about what it should do to them.

    Returns the correlation of what the engine changed with what it should have changed (1 is all, 0 nothing), and
    the error of `served` over the size of the change. An engine computes in 16 bits, and a rounding there flips some
    codes of the next layer, which is why not all is explained; logprobs of an unquantized or wrongly scaled model
    are not explained at all.
    """
    model = load(checkpoint)
    exact = logprobs(model, prompts)
    expected = logprobs(quantize(model), prompts)
    correlation = torch.corrcoef(torch.stack([served - exact, expected - exact]))[0, 1]
    return correlation.item(), ((served - expected).abs().mean() / (expected - exact).abs().mean()).item()


def load(checkpoint: Path) -> PreTrainedModel:
    """The checkpoint in fp32."""
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)


def quantize(model: PreTrainedModel) -> PreTrainedModel:
    """Emulate ptpc_fp8 in `model`, in place: every linear layer but `lm_head` and router gates, and every expert."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name != "lm_head":
            module.forward = _Linear(module)
        elif isinstance(getattr(module, "gate_up_proj", None), nn.Parameter):
            module.forward = _Experts(module)
    return model


class _Linear:
    def __init__(self, module: nn.Linear) -> None:
        self.weight = _round_trip(module.weight.data)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return _round_trip(x) @ self.weight.t()


class _Experts:
    """Routed experts one after the other: w13 on the quantized token, w2 on the quantized activation."""

    def __init__(self, module: nn.Module) -> None:
        self.w13 = _round_trip(module.gate_up_proj.data)
        self.w2 = _round_trip(module.down_proj.data)
        self.activation = module.act_fn

    def __call__(self, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        for token in range(x.shape[0]):
            for expert, weight in zip(topk_ids[token].tolist(), topk_weights[token], strict=True):
                gate, up = (self.w13[expert] @ _round_trip(x[token])).chunk(2)
                out[token] += weight * (self.w2[expert] @ _round_trip(self.activation(gate) * up))
        return out


def _round_trip(x: torch.Tensor) -> torch.Tensor:
    return fp8.dequantize(*fp8.quantize_rows(x, fp8.OCP))

# SPDX-License-Identifier: Apache-2.0
"""What FP8 does to a Llama, in plain torch: every linear's operands are rounded to E4M3 and multiplied in FP32."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from transformers import LlamaForCausalLM

from llm_quant_rocm.formats import fp8

Scheme = Literal["per_tensor", "ptpc"]


@contextmanager
def quantized(model: LlamaForCausalLM, scheme: Scheme) -> Iterator[None]:
    """Within the context the decoder's linears compute as under ``scheme``; embedding and head do not change.

    per_tensor: one scale for the batch's activations, one for each weight as an engine fuses it (query, key and
    value; gate and up). ptpc: one scale for each token and for each row of a weight.
    """
    hooks = []
    saved: list[tuple[torch.nn.Linear, torch.Tensor]] = []
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        groups = (
            (attention.q_proj, attention.k_proj, attention.v_proj),
            (attention.o_proj,),
            (mlp.gate_proj, mlp.up_proj),
            (mlp.down_proj,),
        )
        for group in groups:
            shared = torch.cat([linear.weight.detach() for linear in group]).abs().amax()
            for linear in group:
                saved.append((linear, linear.weight.data))
                amax = fp8.row_amax(linear.weight.data) if scheme == "ptpc" else shared
                linear.weight.data = _rounded(linear.weight.data, amax)
                hooks.append(linear.register_forward_pre_hook(_round_input, with_kwargs=False))
                linear.fp8_scheme = scheme
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for linear, weight in saved:
            linear.weight.data = weight
            del linear.fp8_scheme


def _round_input(linear: torch.nn.Linear, args: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
    (x,) = args
    return (_rounded(x, fp8.row_amax(x) if linear.fp8_scheme == "ptpc" else x.abs().amax()),)


def _rounded(x: torch.Tensor, amax: torch.Tensor) -> torch.Tensor:
    scale = fp8.scale_from_amax(amax, fp8.OCP)
    return fp8.dequantize(fp8.quantize(x, scale, fp8.OCP), scale, x.dtype)


@torch.no_grad()
def mean_loss(model: LlamaForCausalLM, windows: torch.Tensor) -> float:
    """Mean negative log-likelihood in nats of the tokens [windows, tokens] after the first of each window."""
    total = 0.0
    for batch in windows.split(8):
        logits = model(input_ids=batch, use_cache=False).logits[:, :-1].float()
        total += torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), reduction="sum").item()
    return total / (windows.shape[0] * (windows.shape[1] - 1))

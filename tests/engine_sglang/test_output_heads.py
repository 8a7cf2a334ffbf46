# SPDX-License-Identifier: Apache-2.0
"""What a draft model of speculative decoding makes of an output head that it takes from its target."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.logits_processor import LogitsProcessor
from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead

from llm_quant_rocm.formats import nvfp4
from llm_quant_rocm_sglang import fp8_linear, nvfp4_linear, output_heads
from llm_quant_rocm_sglang.nvfp4 import NvFp4Config

ROWS, COLUMNS = 64, 64
NVFP4 = {"quant_algo": "W4A16_NVFP4", "group_size": 16}
# What a checkpoint says of the head, beside another layer.
HEADS = {"W4A16_NVFP4": NVFP4, "FP8": {"quant_algo": "FP8"}}
MIXED = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}
ORIGINAL = getattr(LogitsProcessor._compute_lm_head, "__wrapped__", LogitsProcessor._compute_lm_head)


@pytest.fixture(autouse=True)
def arguments(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The server's."""
    made = SimpleNamespace(speculative_token_map=None)
    monkeypatch.setattr(output_heads, "server_arguments", lambda: made)
    for module in (nvfp4_linear, fp8_linear):
        monkeypatch.setattr(module, "is_dummy", lambda: False)
    return made


def output_head(config: NvFp4Config | None) -> Any:
    return ParallelLMHead(
        ROWS, COLUMNS, params_dtype=torch.bfloat16, quant_config=config, prefix="lm_head", enable_tp=False
    )


def loaded(algorithm: str) -> tuple[Any, torch.Tensor]:
    """A target's head, and its values."""
    layers = {"model.layers.0.mlp.down_proj": NVFP4, "lm_head": HEADS[algorithm]}
    head = output_head(NvFp4Config.from_config(MIXED | {"quantized_layers": layers}))
    values = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0))
    if algorithm == "FP8":
        scale = values.abs().max() / 448
        codes = (values / scale).to(torch.float8_e4m3fn)
        tensors = {"weight": codes, "weight_scale": scale, "input_scale": torch.tensor(1.0)}
        values = codes.float() * scale
    else:
        weight = nvfp4.quantize(values)
        tensors = {"weight": weight.codes, "weight_scale": weight.scales, "weight_scale_2": weight.global_scale[0]}
        values = weight.dequantize(torch.float32)
    for name, tensor in tensors.items():
        parameter = getattr(head, name)
        parameter.weight_loader(parameter, tensor)
    head.quant_method.process_weights_after_loading(head)
    return head, values


@pytest.mark.parametrize("algorithm", HEADS)
@pytest.mark.parametrize("draft", [None, *HEADS], ids=str)
def test_a_draft_that_takes_its_targets(draft: str | None, algorithm: str) -> None:
    """SGLang multiplied the activations of EAGLE and EAGLE3 by codes, of another shape or dtype."""
    target, values = loaded(algorithm)
    head = loaded(draft)[0] if draft else output_head(None)
    del head.weight  # as SGLang's set_embed_and_head does
    head.weight = target.weight
    processor: Any = object.__new__(LogitsProcessor)
    vars(processor).update(use_fp32_lm_head=False, rl_on_policy_target=None)
    x = torch.randn(3, COLUMNS, generator=torch.Generator().manual_seed(1)).bfloat16()
    logits = output_heads.logits(ORIGINAL, processor, x, head)
    assert torch.equal(logits, target.quant_method.apply(target, x))
    torch.testing.assert_close(logits.float(), x.float() @ values.T, rtol=5e-2, atol=1.0)


def test_other_heads_are_asked_themselves() -> None:
    """One in 16 bits, an adapter's around a quantized one, which adds to its logits, one without a weight (GGUF)."""
    target, _ = loaded("W4A16_NVFP4")
    gguf = output_head(None)
    del gguf.weight
    for head in (output_head(None), SimpleNamespace(weight=target.weight), gguf):
        assert output_heads.logits(lambda processor, x, asked: asked, None, torch.zeros(1), head) is head


@pytest.mark.parametrize("algorithm", HEADS)
def test_rows_of_a_quantized_head_are_refused(algorithm: str, arguments: SimpleNamespace) -> None:
    arguments.speculative_token_map = "map.pt"
    with pytest.raises(ValueError, match=r"^--speculative-token-map takes rows of lm_head, which is quantized in"):
        loaded(algorithm)
    assert output_head(None).weight.dtype == torch.bfloat16

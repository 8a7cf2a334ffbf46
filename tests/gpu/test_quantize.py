# SPDX-License-Identifier: Apache-2.0
"""Weights quantized on a GPU: the bytes of a CPU, and `quantize --device cuda`."""

import pytest
import torch

from llm_quant_rocm.formats import fp8, nvfp4
from tests.inputs import assert_same, finite_rows, random_rows

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

WIDTH = 512


def weight(dtype: torch.dtype) -> torch.Tensor:
    nasty = finite_rows(WIDTH, torch.float32)
    largest = nasty.abs().amax(1, keepdim=True).clamp_min(1e-30)
    return torch.cat([nasty / largest, random_rows(300, WIDTH, torch.float32) / 64]).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "fp16", "fp32"])
def test_nvfp4_bytes_do_not_depend_on_the_device(dtype: torch.dtype) -> None:
    w = weight(dtype)
    here, there = nvfp4.quantize(w), nvfp4.quantize(w.cuda())
    assert_same(there.codes.cpu(), here.codes)
    assert_same(there.scales.cpu(), here.scales)
    assert_same(there.global_scale.cpu(), here.global_scale)


def test_the_search_is_as_good_on_both() -> None:
    w = weight(torch.bfloat16)
    here, there = nvfp4.quantize(w, search=True), nvfp4.quantize(w.cuda(), search=True)
    errors = [(found.dequantize().cpu() - w.float()).square().sum(1) for found in (here, there)]
    torch.testing.assert_close(*errors, rtol=1e-5, atol=1e-12)
    # Two scales that are as good as each other within rounding may be exchanged.
    same = here.scales.view(torch.uint8) == there.scales.cpu().view(torch.uint8)
    assert same.float().mean() > 0.99


def test_ptpc_bytes_do_not_depend_on_the_device() -> None:
    w = weight(torch.bfloat16)
    fmt = fp8.OCP
    here, there = fp8.quantize_rows(w, fmt), fp8.quantize_rows(w.cuda(), fmt)
    for found, expected in zip(there, here, strict=True):
        assert_same(found.cpu(), expected)


def test_the_command_computes_on_the_gpu(tmp_path) -> None:  # type: ignore[no-untyped-def]
    save = pytest.importorskip("safetensors.torch")
    from llm_quant_rocm.checkpoint.quantize import quantize_checkpoint

    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text("{}")
    tensors = {f"{i}.proj.weight": torch.randn(512, 512, dtype=torch.bfloat16) for i in range(3)}
    save.save_file(tensors, source / "model.safetensors")
    for scheme in ("nvfp4", "ptpc_fp8"):
        for device in ("cpu", "cuda"):
            quantize_checkpoint(source, tmp_path / scheme / device, "modelopt", scheme=scheme, device=device)
        here, there = (save.load_file(tmp_path / scheme / device / "model.safetensors") for device in ("cpu", "cuda"))
        assert here.keys() == there.keys()
        for name, tensor in here.items():
            assert_same(there[name], tensor)

# SPDX-License-Identifier: Apache-2.0
"""Petit's operator test, of any bits for codes and a reference in fp32, on Petit's own functions as we serve them."""

import pytest
import torch

from tests import petit_shim

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def decode(words: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """float64 values [N, K] of codes [N, K/8] int32, digit by digit."""
    table = torch.tensor([*E2M1, *(-value for value in E2M1)], dtype=torch.float64, device=words.device)
    digits = torch.stack([(words.long() >> (4 * place)) & 15 for place in range(8)], dim=-1).flatten(1)
    return table[digits] * scales.double().repeat_interleave(16, dim=1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize(
    ("m", "n", "k"),
    [(64, 128, 256), (96, 64, 512), (1, 32, 256), (7, 48, 272), (130, 336, 1040)],  # Petit wants K in 256s, N in 16s
)
def test_any_codes(m: int, n: int, k: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(m * n)
    a = torch.randn(m, k, generator=generator).to(dtype).to(DEVICE)
    codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, generator=generator).to(DEVICE)
    scales = (torch.rand(n, k // 16, generator=generator) * 3.5 + 0.25).to(torch.float8_e4m3fn).to(DEVICE)
    global_scale = (torch.rand(1, generator=generator) * 1.5 + 0.5).to(DEVICE)

    words = petit_shim.repack_nvfp4(codes.view(torch.int32), n, k)
    processed = petit_shim.process_nvfp4_scales(scales, n, k)
    for solution in petit_shim.get_fp4_solutions(m, n, k, dtype, dtype):
        result = petit_shim.mul_nvfp4_a16(a, words, processed, global_scale, m, n, k, solution)
        expected = a.double() @ decode(codes.view(torch.int32), scales).t() * global_scale.double()
        # Petit allows 2e-2 of each. Sums in fp32 and one rounding need less.
        size = a.double().abs() @ decode(codes.view(torch.int32), scales).abs().t() * global_scale.double()
        rounding = torch.finfo(dtype).eps / 2
        assert ((result.double() - expected).abs() <= 1.01 * rounding * expected.abs() + 1e-5 * size).all()
        assert result.dtype == dtype

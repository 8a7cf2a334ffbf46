# SPDX-License-Identifier: Apache-2.0
"""NVFP4 weights that break numeric code, and what they hold in float64."""

import ml_dtypes
import numpy as np
import torch

from llm_quant_rocm.formats.nvfp4 import NvFp4Weight


def nasty_weight(n: int, k: int, *leading: int, seed: int = 0) -> NvFp4Weight:
    """Random codes, every block scale that is not NaN (subnormals and 0 too), and global scales of rows in three
    shards that differ by a thousand each. The first row is zero by its scales, the second by its codes, -0 among them.
    """
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (*leading, n, k // 2), dtype=torch.uint8, generator=generator)
    scales = torch.randint(0, 0x7F, (*leading, n, k // 16), dtype=torch.uint8, generator=generator)
    scales[..., :1, :] = 0
    codes[..., 1:2, :] = 0x80
    shard = torch.arange(n) * 3 // max(n, 1)
    global_scale = (0.7 + 0.3 * torch.rand(*leading, n, generator=generator)) * 1e-3 * 1e3**shard
    return NvFp4Weight(codes, scales.view(torch.float8_e4m3fn), global_scale.float())


def weight64(weight: NvFp4Weight) -> torch.Tensor:
    """The values [..., N, K] in float64, by ml_dtypes."""
    raw = weight.codes.cpu().numpy()
    codes = np.stack([raw & 15, raw >> 4], axis=-1).reshape(*raw.shape[:-1], weight.k)
    values = torch.from_numpy(codes.view(ml_dtypes.float4_e2m1fn).astype(np.float64))
    scales = weight.scales.cpu().view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    wide = torch.from_numpy(scales).repeat_interleave(16, dim=-1)
    return values * wide * weight.global_scale.cpu().double().unsqueeze(-1)

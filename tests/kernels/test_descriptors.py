# SPDX-License-Identifier: Apache-2.0
"""Descriptors for Hopper's tensor memory accelerator are what Triton would make, and pass the checks that they leave
out."""

import pytest
import torch

pytest.importorskip("triton")

from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from llm_quant_rocm.formats.nvfp4_wgmma import pack
from llm_quant_rocm.kernels import hopper


def same(found: TensorDescriptor, expected: TensorDescriptor) -> bool:
    """Whether both are of the same memory, with the same words for it. Triton checked `expected` when it was made."""
    found.__post_init__()
    assert found.base.data_ptr() == expected.base.data_ptr() and found.base.dtype == expected.base.dtype
    names = ("shape", "strides", "block_shape", "layout", "padding")
    return all(
        tuple(a) == tuple(b) if isinstance(a, (list, tuple)) else a == b
        for a, b in ((getattr(found, name), getattr(expected, name)) for name in names)
    )


@pytest.mark.parametrize("leading", [(), (3,)])
def test_packed_weights(leading: tuple[int, ...]) -> None:
    codes = torch.zeros((*leading, 200, 96), dtype=torch.uint8)
    words, scales = pack(codes, torch.ones((*leading, 200, 12)).to(torch.float8_e4m3fn))
    flat, pairs = words.view(-1, *words.shape[-2:]), scales.view(torch.uint16).view(-1, words.shape[-2], 32)
    layouts = hopper._layout(0, 32, 3), hopper._layout(0, 16, 3)
    of_words, of_scales = hopper.packed_descriptors(words, scales, 2, 4)
    assert same(of_words, TensorDescriptor.from_tensor(flat, [2, 4, 128], layouts[0]))
    assert same(of_scales, TensorDescriptor.from_tensor(pairs, [2, 4, 32], layouts[1]))
    of_blocks, of_scales = hopper.packed_descriptors(words, scales, 2, 4, blocks=True)
    lines = flat.view(len(flat), -1, 16)
    assert same(of_blocks, TensorDescriptor.from_tensor(lines, [2, 32, 16], hopper._layout(64, 32, 3)))
    assert same(of_scales, TensorDescriptor.from_tensor(pairs, [2, 4, 32], layouts[1]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_tiles_and_boxes(dtype: torch.dtype) -> None:
    x = torch.zeros((100, 512), dtype=torch.uint8).view(dtype)[:, 16:144]
    bits = x.element_size() * 8
    expected = TensorDescriptor.from_tensor(x, [64, 64], hopper._tile_layout(64, 64, x.element_size()))
    assert same(hopper.tile_descriptor(x, 64, 64), expected)
    expected = TensorDescriptor.from_tensor(x, [16, 128], hopper._layout(128, bits, 2))
    assert same(hopper.descriptor(x, [16, 128], 128), expected)


@pytest.mark.parametrize("m", [1, 8, 40, 64, 100])
def test_rows(m: int) -> None:
    hopper.row_descriptor(torch.zeros((m, 512), dtype=torch.bfloat16), 64).__post_init__()

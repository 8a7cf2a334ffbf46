# SPDX-License-Identifier: Apache-2.0
"""Kernels that are not the library's run on the virtual GPU as numpy and torch say, and their errors are found."""

import gcnsim
import pytest
import torch

from tests.amd import kernels, tritons
from tests.amd.budget import LDS
from tests.amd.isolated import Crashed, call
from tests.amd.launcher import run_on
from tests.amd.virtual_gpu import activate

TRITONS = pytest.mark.parametrize("triton", tritons.VERSIONS)
ARCHS = pytest.mark.parametrize("arch", list(LDS))


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@TRITONS
@ARCHS
def test_softmax(arch: str, triton: str) -> None:
    x = 8 * draw(5, 300)
    y = torch.full((5, 200), torch.nan)
    launch = run_on(arch, kernels.softmax, (5,), x, y, 200, x.stride(0), BLOCK=256, triton=triton)
    torch.testing.assert_close(y, torch.softmax(x[:, :200].double(), dim=1).float(), rtol=1e-6, atol=1e-9)
    assert (launch.kernel, launch.constants["BLOCK"], launch.warps) == ("softmax", 256, 4)


@TRITONS
@ARCHS
@pytest.mark.parametrize("by_column", [False, True], ids=["rows", "columns"])
def test_int8_product(arch: str, triton: str, by_column: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    a, b = (torch.randint(-128, 128, shape, generator=generator).to(torch.int8) for shape in ((50, 128), (128, 40)))
    c = torch.zeros(50, 40, dtype=torch.int32)
    stored = b.t().contiguous() if by_column else b
    tiles = {"BLOCK_M": 32, "BLOCK_N": 32, "BLOCK_K": 64}
    run_on(
        arch, kernels.matmul, (2, 2), a, stored, c, 50, 40, 128, **tiles,
        B_BY_COLUMN=by_column, ACC=kernels.tl.int32, triton=triton,
    )  # fmt: skip
    assert torch.equal(c, a.int() @ b.int())


@ARCHS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_half_product(arch: str, dtype: torch.dtype) -> None:
    # Multiples of 1/16 up to 8: no sum is rounded, and none is a denormal, which CDNA2's matrix units flush to zero.
    generator = torch.Generator().manual_seed(1)
    a, b = (torch.randint(-128, 129, shape, generator=generator).to(dtype) / 16 for shape in ((70, 96), (96, 33)))
    c = torch.zeros(70, 33)
    tiles = {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 32}
    run_on(arch, kernels.matmul, (2, 1), a, b, c, 70, 33, 96, **tiles, B_BY_COLUMN=False, ACC=kernels.tl.float32)
    assert torch.equal(c, a.float() @ b.float())


@TRITONS
@ARCHS
def test_histogram_with_atomics(arch: str, triton: str) -> None:
    x = torch.randint(0, 37, (1000,), generator=torch.Generator().manual_seed(2), dtype=torch.int32)
    count = torch.zeros(37, dtype=torch.int32)
    run_on(arch, kernels.histogram, (8,), x, count, 1000, BLOCK=128, triton=triton)
    assert torch.equal(count, torch.bincount(x, minlength=37).int())


def test_views_keep_their_storage_strides_and_alignment() -> None:
    wide = draw(4, 100)
    x, y = wide[:, 3:53], torch.zeros(4, 50)
    run_on("gfx942", kernels.softmax, (4,), x, y, 50, x.stride(0), BLOCK=64)
    torch.testing.assert_close(y, torch.softmax(x, dim=1), rtol=1e-6, atol=1e-9)


@ARCHS
@pytest.mark.parametrize("short", ["x", "y"])
def test_an_access_out_of_bounds_is_found(arch: str, short: str) -> None:
    """The planted defect: a read, or a write, of one element too many."""
    x, y = torch.ones(255 if short == "x" else 256), torch.ones(255 if short == "y" else 256)
    index = ["x", "y"].index(short)
    what = "read" if short == "x" else "write"
    with pytest.raises(gcnsim.MemoryFault, match=rf"(?s){what} .*argument {index} of copy_unmasked.*kernels\.py:\d+"):
        run_on(arch, kernels.copy_unmasked, (1,), x, y, BLOCK=256)


def test_more_lds_than_the_chip_has_is_refused() -> None:
    """Tiles of 256 x 128 in three stages compile, and could never be launched."""
    a, b, c = torch.zeros(256, 256).bfloat16(), torch.zeros(256, 256).bfloat16(), torch.zeros(256, 256)
    tiles = {"BLOCK_M": 256, "BLOCK_N": 256, "BLOCK_K": 128, "B_BY_COLUMN": False, "ACC": kernels.tl.float32}
    with pytest.raises(Exception, match="shared memory, Required: .* Hardware limit: 65536"):
        run_on("gfx942", kernels.matmul, (1, 1), a, b, c, 256, 256, 256, **tiles, num_stages=3, num_warps=8)


def two_ranks(arch: str, wait: bool) -> list[torch.Tensor]:
    """`exchange` between two ranks, whose blocks nobody has written before."""
    gpu = activate(arch)
    blocks = [torch.empty(256, dtype=torch.int32) for _ in range(2)]
    flags, outs = [torch.zeros(1, dtype=torch.int32) for _ in range(2)], [torch.empty_like(blocks[0]) for _ in range(2)]
    with gpu.together():
        for rank in range(2):
            mine, theirs = (pair[rank] for pair in (blocks, outs)), 1 - rank
            block, out = mine
            kernels.exchange[(1,)](block, blocks[theirs], flags[rank], flags[theirs], out, WAIT=wait, BLOCK=256)
    return outs


@TRITONS
@ARCHS
def test_two_ranks_wait_for_each_other(arch: str, triton: str) -> None:
    for out in call(triton, two_ranks, arch, True):
        assert torch.equal(out, 2 * torch.arange(1, 257, dtype=torch.int32))


@TRITONS
@ARCHS
def test_a_missing_barrier_between_ranks_is_found(arch: str, triton: str) -> None:
    """The planted defect: a rank reads its peer's block before the peer has written it."""
    with pytest.raises(gcnsim.UninitializedRead, match="argument . of exchange.*"):
        call(triton, two_ranks, arch, False)


@ARCHS
def test_a_miscompiled_spin_is_found(arch: str) -> None:
    """Triton 3.6.0 makes a loop with two entries of this spin: the lanes that do not read the flag go on without the
    one that does, or wait for it for ever."""
    with pytest.raises((gcnsim.Deadlock, gcnsim.UninitializedRead)):
        run_on(arch, kernels.spin_on_a_variable, (1,), torch.ones(1, dtype=torch.int32), 1, triton=tritons.OLDEST)


def test_a_flag_that_nobody_sets_is_a_deadlock() -> None:
    flags = [torch.zeros(1, dtype=torch.int32) for _ in range(2)]
    with pytest.raises(gcnsim.Deadlock):
        run_on("gfx942", kernels.exchange_on_one_gpu, (1,), *flags)


def test_a_compiler_that_aborts_is_an_error_of_the_test() -> None:
    with pytest.raises(Crashed, match="(?s)was ended by signal 6.*about to abort"):
        call(tritons.VERSIONS[-1], abort)


def test_a_kernel_that_takes_too_long_is_an_error_of_the_test() -> None:
    with pytest.raises(Crashed, match="Timeout"):
        call(tritons.VERSIONS[-1], sleep, limit=1)


def abort() -> None:
    import os

    print("about to abort", flush=True)
    os.abort()


def sleep() -> None:
    import time

    time.sleep(60)

# SPDX-License-Identifier: Apache-2.0
"""NVFP4 weights expanded on CDNA, and the operator that has the vendor multiply them: exact on integers, one rounding
less than upstream's emulation, in slices, and only where it may. The vendor is here the CPU's `torch.addmm`."""

from collections.abc import Callable
from functools import partial
from unittest import mock

import torch
import triton

from llm_quant_rocm import ops
from llm_quant_rocm.formats import nvfp4, nvfp4_mfma
from llm_quant_rocm.formats.nvfp4 import NvFp4Weight
from llm_quant_rocm.hardware import Hardware
from llm_quant_rocm.kernels import nvfp4_slices
from llm_quant_rocm.kernels.nvfp4_mfma_expand import expand
from llm_quant_rocm.ops.nvfp4_gemm import VENDOR_ROWS
from tests.amd.budget import Budget
from tests.amd.operators import shared_out
from tests.amd.operators.nvfp4_mfma import HALF, packed
from tests.inputs import assert_same
from tests.nvfp4_inputs import nasty_weight, weight64
from tests.ops.test_nvfp4_gemm import exact_operands

BUDGETS = {"nvfp4_mfma_expand_kernel": Budget()}
# Rows of q, k and v, no multiples of anything; k and v have one global scale.
SHARDS = (200, 70, 60)


def expanded_dtypes(hardware: Hardware) -> tuple[torch.dtype, ...]:
    return (*HALF, hardware.fp8_dtype) if hardware.fp8_units else HALF


def launched(run: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, list[str]]:
    """What `run` gives, and the kernels that it launches."""
    launches = triton.runtime.driver.active.launches
    before = len(launches)
    found = run()
    return found, [launch.kernel for launch in launches[before:]]


def shipped(hardware: Hardware) -> dict[str, Callable[[], object]]:
    def expanded(n: int, k: int, dtype: torch.dtype) -> None:
        (word_dtype, words), (byte_dtype, scales) = nvfp4_mfma.parts(n, k)
        weight = torch.empty(words, dtype=word_dtype), torch.empty(scales, dtype=byte_dtype)
        factor = None if dtype in HALF else 1 / 6
        expand(*weight, factor, torch.empty(n, k, dtype=dtype), 0, n, hardware)

    return {f"expand {dtype}": partial(expanded, 1024, 8192, dtype) for dtype in expanded_dtypes(hardware)}


def executed(hardware: Hardware) -> dict[str, Callable[[], object]]:
    arch = hardware.arch

    def expanded(dtype: torch.dtype) -> None:
        """The second tile of rows and a third that ends early, columns that end early."""
        weight = nasty_weight(300, 400)
        words, scale_bytes, _ = packed(weight, arch)
        out = torch.empty(172, 400, dtype=dtype)
        values = nvfp4.block_values(weight.codes, weight.scales)
        if dtype in HALF:
            expand(words, scale_bytes, None, out, 128, 300, hardware)
        else:
            factor = torch.tensor(torch.finfo(dtype).max / nvfp4.RANGE)
            expand(words, scale_bytes, factor.item(), out, 128, 300, hardware)
            values = values * factor
        assert_same(out.float() + 0.0, values[128:].to(dtype).float() + 0.0)

    def operands(dtype: torch.dtype) -> tuple[torch.Tensor, NvFp4Weight, torch.Tensor]:
        x, weight, bias = exact_operands(VENDOR_ROWS, sum(SHARDS), 272, dtype)
        scales = torch.tensor([0.5, 4.0, 4.0]).repeat_interleave(torch.tensor(SHARDS))
        return x, NvFp4Weight(weight.codes, weight.scales, scales), bias

    def operator(dtype: torch.dtype, values: int) -> None:
        """As an engine calls it with many tokens: one expansion for each slice of the weight, and nothing else."""
        x, weight, bias = operands(dtype)
        prepared = ops.prepare_nvfp4_weight(weight)
        wide = torch.full((VENDOR_ROWS, 300), float("nan"), dtype=dtype)
        wide[:, 3:275] = x
        for added in (None, bias.to(dtype)):
            expected = x.double() @ weight64(weight).t() + (0 if added is None else added.double())
            for rows in (x, wide[:, 3:275]):
                # The CPU stands in for the vendor here: where it has AMX, oneDNN reads the NaN beside the columns.
                plain = torch.backends.mkldnn.flags(enabled=False)
                with mock.patch.object(nvfp4_slices, "EXPANDED_VALUES", values), plain:
                    found, kernels = launched(partial(ops.nvfp4_gemm, rows, prepared, added))
                assert_same(found, expected.float().to(dtype))
                assert kernels == ["nvfp4_mfma_expand_kernel"] * -(-sum(SHARDS) * 272 // values), kernels

    def not_worse_than_emulation(dtype: torch.dtype) -> None:
        """Upstream rounds the weight with its global scale to 16 bits and multiplies that."""
        generator = torch.Generator().manual_seed(0)
        parts = [nvfp4.quantize(torch.randn(n, 512, generator=generator) / 22) for n in SHARDS]
        weight = NvFp4Weight(*(torch.cat([getattr(part, name) for part in parts]) for name in vars(parts[0])))
        x = torch.randn(VENDOR_ROWS, 512, generator=generator).to(dtype)
        expected = x.double() @ weight64(weight).t()
        emulated = (x.float() @ weight.dequantize(dtype).float().t()).to(dtype)
        found, kernels = launched(partial(ops.nvfp4_gemm, x, ops.prepare_nvfp4_weight(weight)))
        assert kernels == ["nvfp4_mfma_expand_kernel"]
        error = (found.double() - expected).norm()
        assert error < 0.9 * (emulated.double() - expected).norm()
        assert error < expected.norm() * (2.2e-3 if dtype == torch.bfloat16 else 3e-4)  # one rounding to 16 bits

    def batch_invariant(dtype: torch.dtype) -> None:
        """The vendor's product promises no order of sums: it is not asked."""
        generator = torch.Generator().manual_seed(0)
        x, weight = torch.randn(VENDOR_ROWS, 64, generator=generator).to(dtype), nasty_weight(16, 64)
        prepared = ops.prepare_nvfp4_weight(weight)
        bias = -ops.nvfp4_gemm(x[5:6], prepared, batch_invariant=True)[0].float()
        few = ops.nvfp4_gemm(x[5:6], prepared, bias, batch_invariant=True)
        found, kernels = launched(partial(ops.nvfp4_gemm, x, prepared, bias, batch_invariant=True))
        assert kernels == ["nvfp4_mfma_kernel"]
        assert_same(found[5:6], few)

    def refused(dtype: torch.dtype) -> None:
        """A bias of more bits than the vendor adds, and global scales that differ from row to row."""
        x, weight, bias = exact_operands(VENDOR_ROWS, 20, 64, dtype)
        one = NvFp4Weight(weight.codes, weight.scales, torch.ones(20))
        for given, added in ((one, bias), (weight, bias.to(dtype))):
            found, kernels = launched(partial(ops.nvfp4_gemm, x, ops.prepare_nvfp4_weight(given), added))
            assert kernels == ["nvfp4_mfma_kernel"]
            assert_same(found, (x.double() @ weight64(given).t() + added.double()).float().to(dtype))

    whole = sum(SHARDS) * 272
    cases: dict[str, Callable[[], object]] = {
        **{f"expand to {dtype}": partial(expanded, dtype) for dtype in expanded_dtypes(hardware)},
        **{f"operator, {dtype}": partial(operator, dtype, whole) for dtype in HALF},
        **{f"operator in slices, {dtype}": partial(operator, dtype, whole // 3) for dtype in HALF},
        **{f"no worse than upstream's emulation, {dtype}": partial(not_worse_than_emulation, dtype) for dtype in HALF},
        **{f"batch invariant, {dtype}": partial(batch_invariant, dtype) for dtype in HALF},
        **{f"what the kernel serves, {dtype}": partial(refused, dtype) for dtype in HALF},
    }
    return shared_out(cases, hardware)

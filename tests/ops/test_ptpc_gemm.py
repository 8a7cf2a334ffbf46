# SPDX-License-Identifier: Apache-2.0
"""ops.ptpc_gemm and ops.ptpc_linear on the CPU, where the reference runs."""

from importlib import import_module
from typing import Any

import pytest
import torch

from llm_quant_rocm import hardware, ops
from llm_quant_rocm.formats import fp8
from tests.inputs import DTYPE_IDS, DTYPES, assert_same, integer_product, product64, random_rows

OPERATOR = torch.ops.llm_quant_rocm.ptpc_gemm.default
OCP, FNUZ = torch.float8_e4m3fn, torch.float8_e4m3fnuz


@pytest.mark.parametrize("bias_dtype", [None, *DTYPES], ids=["no_bias", *(f"bias_{name}" for name in DTYPE_IDS)])
@pytest.mark.parametrize("out_dtype", DTYPES, ids=DTYPE_IDS)
@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 5, 33), (20, 64, 512), (0, 4, 8), (4, 0, 8), (4, 8, 0)], ids=str)
def test_exact_on_integers(shape: tuple[int, int, int], out_dtype: torch.dtype, bias_dtype: torch.dtype | None) -> None:
    *operands, bias = integer_product(*shape, OCP)
    chosen = None if bias_dtype is None else bias.to(bias_dtype)
    found = ops.ptpc_gemm(*operands, chosen, out_dtype)
    assert_same(found, product64(*operands, chosen).float().to(out_dtype))


@pytest.mark.parametrize("shape", [(0, 4, 8), (4, 0, 8), (4, 8, 0)], ids=str)
def test_without_values_no_backend_is_asked(shape: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """No kernel can be launched for none."""
    monkeypatch.setattr(import_module("llm_quant_rocm.ops.ptpc_gemm"), "_choose", None)
    *operands, bias = integer_product(*shape, OCP)
    assert_same(ops.ptpc_gemm(*operands, bias), bias.bfloat16().expand(shape[0], -1))


@pytest.mark.parametrize("leading", [(), (0,), (1,), (2, 3), (2, 1, 3), (2, 0)], ids=str)
def test_leading_dimensions(leading: tuple[int, ...]) -> None:
    count = int(torch.Size(leading).numel())
    xq, xscale, wq, wscale, bias = integer_product(count, 24, 40, OCP)
    found = ops.ptpc_gemm(xq.view(*leading, 40), xscale.view(*leading, 1), wq, wscale, bias, torch.float32)
    expected = product64(xq, xscale, wq, wscale, bias).float()
    assert_same(found, expected.view(*leading, 24))


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
def test_batch_invariant(dtype: torch.dtype) -> None:
    """A row has the bits that it has alone."""
    x, w = random_rows(37, 200, dtype), random_rows(24, 200, dtype, seed=1)
    wq, wscale = fp8.quantize_rows(w, fp8.OCP)
    bias = torch.linspace(-2, 2, 24).to(dtype)
    alone = [ops.ptpc_linear(row, wq, wscale, bias, batch_invariant=True) for row in x]
    for begin, end in ((0, 37), (3, 20), (36, 37)):
        found = ops.ptpc_linear(x[begin:end], wq, wscale, bias, batch_invariant=True)
        assert_same(found, torch.stack(alone[begin:end]))


def test_strides() -> None:
    xq, xscale, wq, wscale, bias = integer_product(12, 24, 64, OCP)
    for columns in (slice(0, 32), slice(3, 36), slice(0, 64, 2)):
        x, w = xq[::2, columns], wq[::3, columns]
        w = w if columns.step is None else w.contiguous()  # rows of a weight must be contiguous
        found = ops.ptpc_gemm(x, xscale[::2], w, wscale[::3], bias[::3], torch.float32)
        assert_same(found, product64(x, xscale[::2], w, wscale[::3], bias[::3]).float())


@pytest.mark.parametrize("odd", [None, "xq", "xscale", "wq", "wscale", "bias", "rows of wq"])
def test_odd_addresses_are_seen(odd: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The vendor's products want none."""
    module: Any = import_module("llm_quant_rocm.ops.ptpc_gemm")
    xq, xscale, wq, wscale, bias = integer_product(4, 16, 32, OCP)
    operands = {"xq": xq, "xscale": xscale, "wq": wq, "wscale": wscale, "bias": bias}
    if odd == "rows of wq":
        operands["wq"] = torch.cat([wq.view(torch.uint8)] * 2, 1)[:, :40].contiguous().view(OCP)[:, :32]
    elif odd:
        flat = operands[odd].reshape(-1).view(torch.uint8)
        size = operands[odd].element_size()
        memory = torch.empty(flat.numel() + size, dtype=torch.uint8, device="cpu")
        operands[odd] = memory[size:].copy_(flat).view(operands[odd].dtype).view(operands[odd].shape)
    real, calls = module._choose, []
    monkeypatch.setattr(module, "_choose", lambda call: calls.append(call) or real(call))
    found = ops.ptpc_gemm(*operands.values(), out_dtype=torch.float32)
    assert [call.aligned for call in calls] == [odd is None]
    assert_same(found, product64(xq, xscale, wq, wscale, bias).float())


def test_nan_stays_in_its_row_and_column() -> None:
    x, w = random_rows(5, 64, torch.bfloat16), random_rows(6, 64, torch.bfloat16, seed=1)
    x[1, 7], w[2, 9] = float("nan"), float("inf")
    wq, wscale = fp8.quantize_rows(w, fp8.OCP)
    nan = ops.ptpc_linear(x, wq, wscale).isnan()
    expected = torch.zeros(5, 6, dtype=torch.bool)
    expected[1, :], expected[:, 2] = True, True
    assert torch.equal(nan, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
def test_ptpc_linear_is_quantization_then_product(dtype: torch.dtype) -> None:
    x = random_rows(6, 100, dtype).view(2, 3, 100)
    wq, wscale = fp8.quantize_rows(random_rows(24, 100, dtype, seed=1), fp8.OCP)
    bias = torch.linspace(-2, 2, 24).to(dtype)
    found = ops.ptpc_linear(x, wq, wscale, bias)
    assert_same(found, ops.ptpc_gemm(*ops.per_token_quant_fp8(x), wq, wscale, bias, dtype))


def test_ptpc_linear_is_close_to_the_layer_it_replaces() -> None:
    """Each operand's codes are off by a uniform 2**-4 of a binade at most, some 2.6% in the mean square."""
    x, w = torch.randn(64, 512).bfloat16(), torch.randn(128, 512).bfloat16()
    x[:, 3] *= 200  # one loud channel is all of a token's scale, and none of its neighbours'
    x[5:6] *= 1e4
    wq, wscale = fp8.quantize_rows(w, fp8.OCP)
    expected = x.double() @ w.double().t()
    error = (ops.ptpc_linear(x, wq, wscale).double() - expected).norm(dim=1) / expected.norm(dim=1)
    assert error.max() < 0.08
    assert error.mean() < 0.045


def test_the_result_owns_its_memory() -> None:
    operands = integer_product(3, 5, 16, OCP)
    copies = [operand.clone() for operand in operands]
    ops.ptpc_gemm(*operands, torch.float32).fill_(7)
    for operand, copy in zip(operands, copies, strict=True):
        assert_same(operand, copy)


@pytest.mark.parametrize("shape", [(3, 5, 16), (0, 5, 16), (3, 0, 16), (3, 5, 0)], ids=str)
def test_registration(shape: tuple[int, int, int]) -> None:
    *operands, bias = integer_product(*shape, OCP)
    # Its schema test compares the inputs before and after with allclose, which FP8 has not.
    checks = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(OPERATOR, (*operands, bias, torch.bfloat16, "row", False), test_utils=checks)
    torch.library.opcheck(OPERATOR, (*operands, None, torch.float32, "row", True), test_utils=checks)


def test_compiles_to_one_graph() -> None:
    wq, wscale = fp8.quantize_rows(random_rows(24, 48, torch.bfloat16), fp8.OCP)

    def function(x: torch.Tensor) -> torch.Tensor:
        return ops.ptpc_linear(x, wq, wscale) * 2

    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend="aot_eager")
    for count in (0, 2, 3, 20):
        x = random_rows(count, 48, torch.bfloat16)
        assert_same(compiled(x), function(x))


def test_prepare_keeps_a_weight_that_no_backend_wants_shuffled() -> None:
    wq = torch.zeros(32, 64, dtype=OCP)
    prepared, layout = ops.prepare_ptpc_weight(wq)
    assert prepared is wq
    assert layout == "row"


@pytest.mark.parametrize("shape", [(32,), (2, 32, 64)], ids=str)
def test_prepare_refuses_what_is_no_matrix(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"^ptpc_gemm: a weight is \[N, K\]; got \(.*32,"):
        ops.prepare_ptpc_weight(torch.zeros(shape, dtype=OCP))


def call(**changes: Any) -> torch.Tensor:
    xq, xscale, wq, wscale, bias = integer_product(2, 3, 8, OCP)
    arguments = {"xq": xq, "xscale": xscale, "wq": wq, "wscale": wscale, "bias": bias}
    return ops.ptpc_gemm(**arguments | changes)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"xq": torch.zeros(2, 8)}, TypeError, "xq is torch.float32, not E4M3"),
        ({"wq": torch.zeros(3, 8, dtype=torch.float8_e5m2)}, TypeError, "wq is torch.float8_e5m2, not E4M3"),
        (
            {"wq": torch.zeros(3, 8, dtype=FNUZ)},
            TypeError,
            "wq is torch.float8_e4m3fnuz, but cpu computes in .*e4m3fn;",
        ),
        ({"wq": torch.zeros(3, 9, dtype=OCP)}, ValueError, r"xq \(2, 8\) and wq \(3, 9\) do not fit: \[..., K\] and"),
        ({"wq": torch.zeros(8, dtype=OCP)}, ValueError, "do not fit"),
        ({"xq": torch.zeros((), dtype=OCP)}, ValueError, "do not fit"),
        ({"xscale": torch.ones(2, 1).half()}, TypeError, "scales are fp32, not torch.float16 and torch.float32"),
        ({"wscale": torch.ones(3, 1).half()}, TypeError, "scales are fp32, not torch.float32 and torch.float16"),
        ({"xscale": torch.ones(2)}, ValueError, r"xscale \(2,\) .* must be \(2, 1\)"),
        ({"wscale": torch.ones(1, 3)}, ValueError, r"wscale \(1, 3\) must be .* and \(3, 1\)"),
        ({"bias": torch.ones(2)}, ValueError, r"bias must be bf16, fp16 or fp32 of shape \(3,\)"),
        ({"bias": torch.ones(3).int()}, ValueError, "bias must be bf16, fp16 or fp32"),
        ({"out_dtype": torch.float64}, TypeError, "out_dtype is torch.float64, not bf16, fp16 or fp32"),
        ({"xscale": torch.ones(2, 1, device="meta")}, ValueError, "xscale is on meta, xq on cpu; move them"),
        ({"wq": torch.ones(3, 8, device="meta").to(OCP)}, ValueError, "wq is on meta, xq on cpu; move them"),
        ({"wscale": torch.ones(3, 1, device="meta")}, ValueError, "wscale is on meta, xq on cpu; move them"),
        ({"bias": torch.ones(3, device="meta")}, ValueError, "bias is on meta, xq on cpu; move them"),
        ({"layout": "column"}, ValueError, "layout 'column' is not one of row, aiter_16x16"),
        (
            {"wq": torch.zeros(8, 3, dtype=OCP).t()},
            ValueError,
            r"wq must have contiguous rows; .* \(1, 3\)",
        ),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_refusals(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"ptpc_gemm: .*{message}"):
        call(**changes)


def test_an_ocp_checkpoint_on_gfx942_is_told_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "detect", lambda device: hardware.amd("gfx942"))
    with pytest.raises(TypeError, match="xq is torch.float8_e4m3fn, but cpu computes in .*fnuz; convert .*ocp_to_fnuz"):
        call()


def test_fnuz_codes_on_an_ocp_device_are_not_sent_the_wrong_way() -> None:
    with pytest.raises(TypeError) as caught:
        call(xq=torch.zeros(2, 8, dtype=FNUZ))
    assert "ocp_to_fnuz" not in str(caught.value)


def test_a_shuffled_weight_needs_aiter() -> None:
    with pytest.raises(NotImplementedError, match="aiter: aiter needs ROCm; .*reference: the weight was shuffled"):
        call(layout="aiter_16x16")

# SPDX-License-Identifier: Apache-2.0
"""ops.rms_norm_quant_fp8 on the CPU, where the reference runs."""

import pytest
import torch

from llm_quant_rocm import ops
from llm_quant_rocm.reference.rms_norm_quant import rms_norm
from tests.inputs import DTYPE_IDS, DTYPES, assert_same, nasty_rows, random_rows

OPERATORS = torch.ops.llm_quant_rocm


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
@pytest.mark.parametrize("weight_dtype", DTYPES, ids=[f"weight_{name}" for name in DTYPE_IDS])
def test_is_norm_then_quantization(dtype: torch.dtype, weight_dtype: torch.dtype) -> None:
    x, weight = nasty_rows(65, dtype), torch.linspace(-2, 2, 65).to(weight_dtype)
    for residual in (None, x.flip(0)):
        normed, total = rms_norm(x, weight, 1e-5, residual)
        expected = (*ops.per_token_quant_fp8(normed), total)
        found = ops.rms_norm_quant_fp8(x, weight, 1e-5, residual)
        assert len(found) == (2 if residual is None else 3)
        for part, whole in zip(found, expected, strict=False):
            assert_same(part, whole)


@pytest.mark.parametrize("shape", [(7,), (0, 7), (3, 0), (2, 3, 7), (2, 0, 7)], ids=str)
def test_shapes(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    found = ops.rms_norm_quant_fp8(x, torch.ones(shape[-1]), residual=x)
    assert [tuple(part.shape) for part in found] == [shape, (*shape[:-1], 1), shape]
    if x.numel():
        flat = ops.rms_norm_quant_fp8(
            x.reshape(-1, shape[-1]), torch.ones(shape[-1]), residual=x.reshape(-1, shape[-1])
        )
        for part, whole in zip(found, flat, strict=True):
            assert_same(part, whole.view(part.shape))


def test_strides() -> None:
    wide, weight = random_rows(12, 80, torch.bfloat16), torch.linspace(-2, 2, 80)
    x, residual = wide[::2, ::2], wide[1::2, 40:]
    found = ops.rms_norm_quant_fp8(x, weight[::2], residual=residual)
    expected = ops.rms_norm_quant_fp8(x.clone(), weight[::2].clone(), residual=residual.clone())
    for part, whole in zip(found, expected, strict=True):
        assert_same(part, whole)


def test_rows_that_overlap() -> None:
    x, weight = random_rows(1, 18, torch.bfloat16)[0].unfold(0, 16, 1), torch.ones(16)
    torch.library.opcheck(OPERATORS.rms_norm_quant_fp8.default, (x, weight, 1e-6))
    torch.library.opcheck(OPERATORS.add_rms_norm_quant_fp8.default, (x, weight, 1e-6, x))


def test_the_results_own_their_memory() -> None:
    x, residual, weight = random_rows(4, 16, torch.float32), torch.zeros(4, 16), torch.ones(16)
    before = x.clone()
    for part in ops.rms_norm_quant_fp8(x, weight, residual=residual):
        part.view(torch.uint8).fill_(1)
    assert torch.equal(x, before)
    assert (residual == 0).all() and (weight == 1).all()


def test_registration() -> None:
    x, weight = random_rows(3, 16, torch.bfloat16), torch.ones(16)
    torch.library.opcheck(OPERATORS.rms_norm_quant_fp8.default, (x, weight, 1e-6))
    torch.library.opcheck(OPERATORS.add_rms_norm_quant_fp8.default, (x, weight, 1e-6, x * 2))
    torch.library.opcheck(OPERATORS.add_rms_norm_quant_fp8.default, (x[:, ::2], weight[::2], 1e-6, x[:, 1::2]))


@pytest.mark.parametrize("with_residual", [False, True], ids=["norm", "add_norm"])
def test_compiles_to_one_graph(with_residual: bool) -> None:
    weight = torch.ones(48)

    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return ops.rms_norm_quant_fp8(x, weight, residual=x * 2 if with_residual else None)

    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend="aot_eager")
    for count in (0, 2, 3, 20):
        x = random_rows(count, 48, torch.bfloat16)
        for found, expected in zip(compiled(x), function(x), strict=True):
            assert_same(found, expected)


X = torch.zeros(2, 4)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((X.double(), torch.ones(4)), TypeError, "x is torch.float64, not bf16"),
        ((X, torch.ones(4, dtype=torch.int32)), TypeError, "weight is torch.int32, not bf16"),
        ((X, torch.ones(5)), ValueError, r"weight has shape \(5,\); x of shape \(2, 4\)"),
        ((X, torch.ones(1, 4)), ValueError, r"weight has shape \(1, 4\)"),
        ((torch.tensor(1.0), torch.tensor(1.0)), ValueError, "weight has shape .* needs its last dimension"),
        ((X, torch.ones(4, device="meta")), ValueError, "weight is on meta, x on cpu"),
        ((X, torch.ones(4), 1e-6, X[:1]), ValueError, r"residual is torch.float32 \(1, 4\) on cpu, x is .*must agree"),
        ((X, torch.ones(4), 1e-6, X.half()), ValueError, "residual is torch.float16"),
        ((X, torch.ones(4), 1e-6, X.to("meta")), ValueError, r"residual is torch.float32 \(2, 4\) on meta"),
    ],
    ids=[
        "x dtype",
        "weight dtype",
        "weight length",
        "weight rank",
        "scalar",
        "device",
        "residual shape",
        "residual",
        "residual device",
    ],
)
def test_refusals(arguments: tuple, error: type[Exception], message: str) -> None:  # type: ignore[type-arg]
    with pytest.raises(error, match=f"rms_norm_quant_fp8: {message}"):
        ops.rms_norm_quant_fp8(*arguments)

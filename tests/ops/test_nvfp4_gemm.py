# SPDX-License-Identifier: Apache-2.0
"""ops.nvfp4_gemm on the CPU, where the reference runs."""

from collections.abc import Iterator
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from llm_quant_rocm import environment, hardware, ops, reference, tuning
from llm_quant_rocm.formats import fp8, nvfp4
from llm_quant_rocm.ops.nvfp4_gemm import DECODE_ROWS, VENDOR_ROWS, GemmCall, _choose
from llm_quant_rocm.ops.nvfp4_weight import MAX_RUNS
from tests.inputs import DTYPE_IDS, DTYPES, assert_same, random_rows
from tests.nvfp4_inputs import nasty_weight, weight64

OPERATOR = torch.ops.llm_quant_rocm.nvfp4_gemm.default
HALF = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])


def exact_operands(m: int, n: int, k: int, dtype: torch.dtype) -> tuple[torch.Tensor, nvfp4.NvFp4Weight, torch.Tensor]:
    """x, weight and bias of a product that every correct accumulator computes exactly, in any order: small integers in
    x, all codes, scales and global scales that are powers of two."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(-2, 3, (m, k), generator=generator).to(dtype)
    codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, generator=generator)
    scales = torch.randint(0, 3, (n, k // 16), generator=generator).float().exp2().to(torch.float8_e4m3fn)
    global_scale = torch.randint(-3, 3, (n,), generator=generator).float().exp2()
    bias = torch.randint(-4, 5, (n,), generator=generator).float()
    return x, nvfp4.NvFp4Weight(codes, scales, global_scale), bias


@pytest.mark.parametrize("bias_dtype", [None, *DTYPES], ids=["no_bias", *(f"bias_{name}" for name in DTYPE_IDS)])
@HALF
@pytest.mark.parametrize("shape", [(1, 1, 16), (3, 5, 48), (20, 67, 528), (0, 4, 32), (4, 0, 32), (4, 8, 0)], ids=str)
def test_exact_on_integers(shape: tuple[int, int, int], dtype: torch.dtype, bias_dtype: torch.dtype | None) -> None:
    x, weight, bias = exact_operands(*shape, dtype)
    chosen = None if bias_dtype is None else bias.to(bias_dtype)
    expected = x.double() @ weight64(weight).t() + (0 if chosen is None else chosen.double())
    for given in (weight, ops.prepare_nvfp4_weight(weight)):
        for batch_invariant in (False, True):
            found = ops.nvfp4_gemm(x, given, chosen, batch_invariant=batch_invariant)
            assert_same(found, expected.float().to(dtype))


@pytest.mark.parametrize("leading", [(), (0,), (1,), (2, 3), (2, 1, 3), (2, 0)], ids=str)
def test_leading_dimensions(leading: tuple[int, ...]) -> None:
    x, weight, bias = exact_operands(int(torch.Size(leading).numel()), 24, 48, torch.bfloat16)
    found = ops.nvfp4_gemm(x.view(*leading, 48), ops.prepare_nvfp4_weight(weight), bias)
    assert_same(found, (x.double() @ weight64(weight).t() + bias).bfloat16().view(*leading, 24))


def test_strides_of_x_and_bias() -> None:
    x, weight, bias = exact_operands(12, 24, 64, torch.float16)
    wide = torch.zeros(24, 130, dtype=torch.float16)
    wide[::2, 1:129:2] = x
    found = ops.nvfp4_gemm(wide[::2, 1:129:2], weight, bias.repeat_interleave(2)[::2])
    assert_same(found, ops.nvfp4_gemm(x, weight, bias))


def test_global_scales_of_shards_are_their_own() -> None:
    """Every element against float64, not a norm that the loudest shard rules."""
    x, weight = torch.randn(7, 64).bfloat16(), nasty_weight(30, 64)
    expected = x.double() @ weight64(weight).t()
    terms = x.double().abs() @ weight64(weight).abs().t()
    found = ops.nvfp4_gemm(x, ops.prepare_nvfp4_weight(weight)).double()
    assert ((found - expected).abs() <= expected.abs() * 2**-8 + terms * 1e-5).all()
    assert weight.global_scale.max() / weight.global_scale.min() > 1e5


def test_nan_and_infinity_stay_in_their_row() -> None:
    x, weight = torch.randn(5, 64).bfloat16(), nasty_weight(30, 64)
    clean = ops.nvfp4_gemm(x, weight, batch_invariant=True)
    x[1, 7], x[3, 9] = float("nan"), float("inf")
    found = ops.nvfp4_gemm(x, weight, batch_invariant=True)
    assert found[1].isnan().all()
    assert not found[3].isfinite().any()
    assert_same(found[[0, 2, 4]], clean[[0, 2, 4]])


@HALF
def test_batch_invariance(dtype: torch.dtype) -> None:
    """The bias takes row 3's own product away, in fp32: 16 bits then show what is left of its last bits."""
    x, weight = torch.randn(130, 512).to(dtype), nvfp4.quantize(torch.randn(70, 512))
    bias = -reference.nvfp4_gemm(x[3:4], weight, None, torch.float32, batch_invariant=True)[0]
    whole = ops.nvfp4_gemm(x, weight, bias, batch_invariant=True)
    assert (whole[3] == 0).all()
    for rows in (slice(3, 4), slice(2, 4), slice(1, 8), slice(3, 130)):
        assert_same(ops.nvfp4_gemm(x[rows], weight, bias, batch_invariant=True), whole[rows])
    assert_same(ops.nvfp4_gemm(x.flip(0), weight, bias, batch_invariant=True), whole.flip(0))


@HALF
def test_prefill_in_fp8_begins_above_decode(dtype: torch.dtype) -> None:
    weight, bias = nvfp4.quantize(torch.randn(40, 96)), torch.linspace(-1, 1, 40)
    for count, in_fp8 in ((1, False), (DECODE_ROWS, False), (DECODE_ROWS + 1, True), (200, True)):
        x = torch.randn(count, 96).to(dtype)
        found = ops.nvfp4_gemm(x, weight, bias, prefill="fp8")
        exact = ops.nvfp4_gemm(x, weight, bias)
        expected = reference.nvfp4_gemm_fp8(x, weight, bias, dtype, fp8.OCP) if in_fp8 else exact
        assert_same(found, expected)
        assert torch.equal(found, exact) != in_fp8


def test_users_are_told_what_is_decode() -> None:
    assert f"of more than {DECODE_ROWS} tokens" in environment.VARIABLES[f"{environment.NVFP4}_PREFILL"].meaning


def test_the_result_owns_its_memory() -> None:
    x, weight, bias = exact_operands(3, 5, 16, torch.bfloat16)
    copies = [t.clone() for t in (x, weight.codes, weight.scales, weight.global_scale, bias)]
    ops.nvfp4_gemm(x, weight, bias).fill_(7)
    for tensor, copy in zip((x, weight.codes, weight.scales, weight.global_scale, bias), copies, strict=True):
        assert_same(tensor, copy)


@pytest.mark.parametrize("shape", [(3, 5, 16), (0, 5, 16), (3, 0, 16), (3, 5, 0)], ids=str)
def test_registration(shape: tuple[int, int, int]) -> None:
    x, weight, bias = exact_operands(*shape, torch.bfloat16)
    tensors = (weight.codes, weight.scales, weight.global_scale)
    # Its schema test compares the inputs before and after with allclose, which FP8 has not.
    checks = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    for chosen in (bias, None):
        for runs in (None, torch.zeros(MAX_RUNS, 2, dtype=torch.float64)):
            arguments = (x, *tensors, chosen, "row", shape[1], shape[2], "exact", False, runs)
            torch.library.opcheck(OPERATOR, arguments, test_utils=checks)


def test_compiles_to_one_graph() -> None:
    prepared = ops.prepare_nvfp4_weight(nasty_weight(24, 48))

    def given(x: torch.Tensor) -> torch.Tensor:
        return ops.nvfp4_gemm(x, prepared, prefill="fp8") * 2

    def rebuilt(x: torch.Tensor) -> torch.Tensor:  # as a plugin does that keeps the tensors as a layer's parameters
        weight = ops.PreparedNvFp4Weight(prepared.codes, prepared.scales, prepared.global_scale, "row", 24, 48)
        return ops.nvfp4_gemm(x, weight) * 2

    runs = torch.zeros(MAX_RUNS, 2, dtype=torch.float64)

    def with_runs(x: torch.Tensor) -> torch.Tensor:
        tensors = (prepared.codes, prepared.scales, prepared.global_scale)
        return ops.nvfp4_gemm(x, ops.PreparedNvFp4Weight(*tensors, "row", 24, 48, runs)) * 2

    for function in (given, rebuilt, with_runs):
        compiled = torch.compile(function, fullgraph=True, dynamic=True, backend="aot_eager")
        for count in (0, 2, 3, 70):
            x = random_rows(count, 48, torch.bfloat16)
            assert_same(compiled(x), function(x))


def test_fake_quantization_compiles() -> None:
    weight = ops.prepare_nvfp4_weight(nasty_weight(24, 48))

    def function(x: torch.Tensor, input_global: torch.Tensor) -> torch.Tensor:
        return ops.nvfp4_gemm(nvfp4.fake_quantize_activation(x, input_global), weight)

    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend="aot_eager")
    for count in (2, 3, 70):
        x = random_rows(count, 48, torch.bfloat16)
        assert_same(compiled(x, torch.tensor(3.0)), function(x, torch.tensor(3.0)))


def test_the_environment_forces_a_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLM_QUANT_ROCM_NVFP4_GEMM", "nonsense")
    with pytest.raises(ValueError, match="LLM_QUANT_ROCM_NVFP4_GEMM=nonsense: nvfp4_gemm has the backends"):
        ops.nvfp4_gemm(torch.ones(77, 32).half(), nvfp4.quantize(torch.ones(7, 32)))


MANY = GemmCall(
    hardware.amd("gfx942"), VENDOR_ROWS, 96, 64, torch.bfloat16, "mfma", False, False, torch.bfloat16, 3, False
)


@pytest.fixture
def with_triton() -> Iterator[None]:
    pytest.importorskip("triton")
    _choose.cache_clear()
    yield
    _choose.cache_clear()


@pytest.mark.parametrize(
    ("changes", "backend", "reason"),
    [
        ({}, "torch", None),
        ({"dtype": torch.float16, "bias": None}, "torch", None),
        ({"hardware": hardware.amd("gfx90a"), "fp8": True}, "torch", None),  # which has no FP8 units
        ({"hardware": hardware.amd("gfx950"), "layout": "mfma_fp4", "m": 5000}, "torch", None),
        ({"m": VENDOR_ROWS - 1}, "triton", None),
        ({"batch_invariant": True}, "triton", "the vendor's product may add up a row differently"),
        ({"fp8": True}, "triton", "prefill='fp8' is another product"),
        # The vendor's FP8 product has neither fp16 results nor such rows.
        ({"fp8": True, "dtype": torch.float16, "bias": None}, "torch", None),
        ({"fp8": True, "n": 100}, "torch", None),
        # Nor do rows so wide fit in registers to be quantized.
        ({"fp8": True, "k": 65536}, "triton", "prefill='fp8' is another product"),
        ({"fp8": True, "k": 65552}, "torch", None),
        ({"bias": torch.float32}, "triton", "its bias is of x's dtype, torch.bfloat16, not torch.float32"),
        ({"runs": 0}, "triton", "it takes up to 8 runs of rows under one global scale"),
        ({"captured": True}, "triton", "the CUDA graph would keep today's global scales"),
        ({"hardware": hardware.nvidia(9, 0), "layout": "wgmma"}, "triton", None),
        ({"hardware": hardware.CPU, "layout": "row"}, "reference", "cpu has no kernel for NVFP4"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
@pytest.mark.usefixtures("with_triton")
def test_who_serves_many_rows(changes: dict[str, Any], backend: str, reason: str | None) -> None:
    choice = _choose(MANY._replace(**changes))
    assert choice.backend.name == backend
    reasons = dict(choice.passed_over)
    assert reasons.get("torch", "").startswith(reason) if reason else not reasons


@pytest.mark.usefixtures("with_triton")
def test_what_was_measured_counts_before_what_was_derived(monkeypatch: pytest.MonkeyPatch) -> None:
    for backend, m in (("torch", 100), ("triton", 5000)):
        measured = tuning.Measured(96, 64, m, backend, {})
        monkeypatch.setattr(tuning, "lookup", lambda *shape, measured=measured: measured)
        assert _choose(MANY._replace(m=m)).backend.name == backend


@pytest.mark.usefixtures("with_triton")
def test_fp8_serves_only_what_it_speeds_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the measurement where there is one, else by the kernels' estimate."""
    pytest.importorskip("triton")
    from llm_quant_rocm.kernels.nvfp4_slices import Expanded
    from llm_quant_rocm.kernels.nvfp4_wgmma_large_tiles import Config

    module = import_module("llm_quant_rocm.ops.nvfp4_gemm")
    hopper = MANY._replace(hardware=hardware.nvidia(9, 0), layout="wgmma", fp8=True)
    measured: list[tuning.Measured] = []
    monkeypatch.setattr(tuning, "lookup", lambda *shape: measured[-1] if measured else None)
    chosen = module._fp8_config.__wrapped__
    monkeypatch.setattr(module, "_fp8_config", chosen)
    # Of Llama-3-70B: o with few rows, two full waves of tiles, and, a quarter of it, rows enough to expand the weight.
    estimates = [chosen(hopper.hardware, m, 8192, k) for m, k in ((128, 8192), (1024, 8192), (16384, 2048))]
    assert estimates == [None, Config(256, 128, 0), Expanded()]
    assert not module._in_fp8(hopper._replace(m=128)) and module._in_fp8(hopper._replace(m=4096, n=8192, k=8192))
    measured.append(tuning.Measured(8192, 8192, 4096, "exact", {"values": 2**24}))
    assert not module._in_fp8(hopper._replace(m=4096, n=8192, k=8192))
    measured.append(tuning.Measured(8192, 8192, 128, "triton", {"values": 2**24}))
    assert chosen(hopper.hardware, 128, 8192, 8192) == Expanded(2**24)
    measured.append(tuning.Measured(8192, 8192, 128, "triton", {"block_m": 256, "block_n": 128, "cut": 1}))
    assert chosen(hopper.hardware, 128, 8192, 8192) == Config(256, 128, 1)
    # Measurements of another weight, or of twice as many rows.
    assert chosen(hopper.hardware, 128, 8192, 4096) is None and chosen(hopper.hardware, 64, 8192, 8192) is None


@pytest.mark.parametrize("hip", ["7.1", None], ids=["hipBLASLt", "another library"])
@pytest.mark.usefixtures("with_triton")
def test_what_hipblaslt_has_no_kernel_for_is_exact(
    hip: str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    module = import_module("llm_quant_rocm.ops.nvfp4_gemm")
    kernels, tried = module.kernels_of("gfx942"), []

    def gemm_fp8(*operands: Any) -> None:
        tried.append(operands)
        raise RuntimeError("no valid solution")

    monkeypatch.setattr(kernels, "gemm_fp8", gemm_fp8)
    monkeypatch.setattr(kernels, "gemm_expanded", lambda *operands: "exact")
    monkeypatch.setattr(module, "_not_in_fp8", set())
    monkeypatch.setattr(torch.version, "hip", hip)
    prefill = MANY._replace(fp8=True)
    weight = SimpleNamespace(codes=None, scales=None, global_scale=None, runs=None, n=96)
    arguments = torch.empty(0), weight, None, prefill
    if hip is None:
        with pytest.raises(RuntimeError, match="no valid solution"):
            _choose(prefill).backend.run(*arguments)
        return
    assert [_choose(prefill).backend.run(*arguments) for _ in range(2)] == ["exact", "exact"]
    assert len(tried) == 1, "once of each weight"
    assert caplog.messages == ["nvfp4_gemm: 96 x 64 stays exact, as FP8 fails here: no valid solution"]
    assert module._in_fp8(prefill._replace(n=112))


@pytest.mark.parametrize("device", [hardware.amd("gfx942"), hardware.nvidia(9, 0)], ids=["gfx942", "sm_90"])
@pytest.mark.usefixtures("with_triton")
def test_an_invariant_product_adds_up_no_parts(device: hardware.Hardware, monkeypatch: pytest.MonkeyPatch) -> None:
    module = import_module("llm_quant_rocm.ops.nvfp4_gemm")
    kernels, configs = module.kernels_of(device.arch), []
    monkeypatch.setattr(tuning, "lookup", lambda *shape: None)
    monkeypatch.setattr(module, "_config", module._config.__wrapped__)
    monkeypatch.setattr(kernels, "gemm", lambda *operands: configs.append(operands[-1]))
    weight = SimpleNamespace(codes=None, scales=None, global_scale=None)
    for wish in (False, True):
        one_row = MANY._replace(hardware=device, m=1, n=1024, k=8192, batch_invariant=wish)
        module._run_triton(torch.empty(0), weight, None, one_row)
    assert configs[1] == kernels.batch_invariant(configs[0]) != configs[0]


@pytest.mark.usefixtures("with_triton")
def test_ck_is_not_asked_and_the_wish_for_it_may_change(monkeypatch: pytest.MonkeyPatch) -> None:
    module, calls, wish = import_module("llm_quant_rocm.ops.nvfp4_gemm"), [], torch._C._BlasBackend
    monkeypatch.setattr(module, "_choose", lambda call: calls.append(call) or _choose(call))
    x, weight, _ = exact_operands(2, 3, 32, torch.bfloat16)
    for preferred in (wish.Cublas, wish.Ck, wish.Cublas):
        monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", lambda preferred=preferred: preferred)
        prepared = ops.prepare_nvfp4_weight(weight)
        module._implementation(
            x, prepared.codes, prepared.scales, prepared.global_scale, None, "row", 3, 32, "exact", False,
            runs=torch.tensor([[3.0, 1.0]]),
        )  # fmt: skip
        chosen = _choose(MANY._replace(ck=calls[-1].ck))
        refused = {"torch": "torch is told to prefer CK, which rounds before it scales"}
        assert dict(chosen.passed_over) == (refused if preferred == wish.Ck else {})


def call(**changes: Any) -> torch.Tensor:
    x, weight, bias = exact_operands(2, 3, 32, torch.bfloat16)
    prepared = ops.prepare_nvfp4_weight(weight)
    fields = {name: getattr(prepared, name) for name in ("codes", "scales", "global_scale", "layout", "n", "k", "runs")}
    weight_changes = {name: value for name, value in changes.items() if name in fields}
    others = {name: value for name, value in changes.items() if name not in fields}
    arguments = {"x": x, "weight": ops.PreparedNvFp4Weight(**fields | weight_changes), "bias": bias}
    return ops.nvfp4_gemm(**arguments | others)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"x": torch.zeros(2, 32)}, TypeError, "x is torch.float32, not bf16 or fp16"),
        ({"x": torch.zeros(2, 48).half()}, ValueError, r"x \(2, 48\) and the weight \[3, 32\] do not fit"),
        ({"x": torch.zeros(()).half()}, ValueError, "do not fit"),
        ({"k": 40}, ValueError, "weight has 40 columns, no multiple of 16; keep this layer"),
        ({"k": 48}, ValueError, r"weight.codes has shape \(3, 16\), not \(3, 24\)"),
        ({"n": 4}, ValueError, r"weight.codes has shape \(3, 16\), not \(4, 16\)"),
        ({"codes": torch.zeros(3, 16).int()}, TypeError, "weight.codes is torch.int32, not torch.uint8"),
        ({"scales": torch.zeros(3, 2)}, TypeError, "weight.scales is torch.float32, not torch.float8_e4m3fn"),
        (
            {"scales": torch.zeros(3, 4).to(fp8.OCP.dtype)},
            ValueError,
            r"weight.scales has shape \(3, 4\), not \(3, 2\)",
        ),
        ({"global_scale": torch.ones(1)}, ValueError, r"weight.global_scale has shape \(1,\), not \(3,\)"),
        ({"global_scale": torch.ones(3).half()}, TypeError, "weight.global_scale is torch.float16"),
        ({"codes": torch.zeros(16, 3, dtype=torch.uint8).t()}, ValueError, "weight.codes is not contiguous; .*prepare"),
        ({"global_scale": torch.ones(3, device="meta")}, ValueError, "weight.global_scale is on meta, weight.codes on"),
        ({"bias": torch.ones(2)}, ValueError, r"bias must be bf16, fp16 or fp32 of shape \(3,\)"),
        ({"bias": torch.ones(3).int()}, ValueError, "bias must be bf16, fp16 or fp32"),
        ({"bias": torch.ones(3, device="meta")}, ValueError, "bias is on meta, x on cpu; move them"),
        ({"x": torch.ones(2, 32, device="meta").half()}, ValueError, "weight is on cpu, x on meta; move them"),
        (
            {"runs": torch.zeros(MAX_RUNS, 2)},
            ValueError,
            r"weight.runs is torch.float32 \(8, 2\), not float64 \(8, 2\)",
        ),
        ({"runs": torch.zeros(2, 2).double()}, ValueError, r"weight.runs is torch.float64 \(2, 2\), not float64"),
        ({"layout": "column"}, ValueError, "weight: layout 'column' is not one of row"),
        ({"prefill": "fp4"}, ValueError, "prefill 'fp4' is not one of exact, fp8"),
        ({"prefill": "fp8", "batch_invariant": True}, ValueError, "depends on the number of rows; use 'exact'"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_refusals(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"nvfp4_gemm: .*{message}"):
        call(**changes)

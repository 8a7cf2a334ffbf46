# SPDX-License-Identifier: Apache-2.0
"""Which backend is chosen, and what the user reads about those that are not."""

import logging
import re
import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from llm_quant_rocm import backends, hardware, ops, reference, tuning
from llm_quant_rocm.backends import Backend, choose
from llm_quant_rocm.formats import fp8
from llm_quant_rocm.ops import _aiter, _row_call
from llm_quant_rocm.ops import per_token_quant as quant_operator
from llm_quant_rocm.ops import rms_norm_quant as norm_operator
from tests.inputs import assert_same, integer_product

# By name: in ops the operator of the same name hides its module.
gemm_operator = import_module("llm_quant_rocm.ops.ptpc_gemm")
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def fresh_caches() -> Iterator[None]:
    """Choices are remembered; these tests change what they depend on."""
    caches = (
        backends._log_once,
        backends.missing,
        tuning.lookup,
        _aiter.refusal,
        _aiter.refusal_of_shape,
        *(operator._choose for operator in (quant_operator, gemm_operator, norm_operator)),
    )
    for cached in caches:
        cached.cache_clear()
    yield
    for cached in caches:
        cached.cache_clear()


def refuses(reason: str) -> Any:
    return lambda call: reason


THREE = (
    Backend("fast", lambda call: None if call == "even" else "odd call", lambda: "ran fast"),
    Backend("middle", lambda call: "it is Monday" if call == "monday" else None, lambda: "ran middle"),
    Backend("slow", lambda call: None, lambda: "ran slow"),
)


def test_the_first_that_can_serves() -> None:
    assert choose("op", THREE, "even").backend.run() == "ran fast"
    choice = choose("op", THREE, "odd")
    assert (choice.backend.name, choice.passed_over) == ("middle", (("fast", "odd call"),))
    choice = choose("op", THREE, "monday")
    assert (choice.backend.name, choice.passed_over) == ("slow", (("fast", "odd call"), ("middle", "it is Monday")))


def test_the_measured_winner_comes_first_if_it_can() -> None:
    assert choose("op", THREE, "even", "slow").backend.name == "slow"
    assert choose("op", THREE, "monday", "middle").passed_over[0] == ("middle", "it is Monday")
    assert choose("op", THREE, "even", "gone since it was measured").backend.name == "fast"


def test_the_environment_forces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLM_QUANT_ROCM_OP", "slow")
    assert choose("op", THREE, "even", "middle").backend.name == "slow"
    assert choose("other", THREE, "even").backend.name == "fast"
    monkeypatch.setenv("LLM_QUANT_ROCM_OP", "")
    assert choose("op", THREE, "even").backend.name == "fast"


def test_a_forced_backend_that_cannot_is_an_error_not_a_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLM_QUANT_ROCM_OP", "fast")
    with pytest.raises(ValueError, match="LLM_QUANT_ROCM_OP=fast cannot serve this call of op: fast: odd call"):
        choose("op", THREE, "odd")


def test_an_unknown_forced_backend_lists_the_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLM_QUANT_ROCM_OP", "fats")
    with pytest.raises(ValueError, match="LLM_QUANT_ROCM_OP=fats: op has the backends fast, middle, slow"):
        choose("op", THREE, "even")


def test_none_that_can_lists_every_reason() -> None:
    none = (Backend("a", refuses("no unit"), print), Backend("b", refuses("no wheel"), print))
    with pytest.raises(NotImplementedError, match="no backend can serve this call of op: a: no unit; b: no wheel"):
        choose("op", none, "even")


def test_a_choice_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "llm_quant_rocm"):
        for call in ("odd", "odd", "even", "odd", "monday"):
            choose("op", THREE, call)
    assert caplog.messages == [
        "op runs on middle; passed over fast: odd call",
        "op runs on fast",
        "op runs on slow; passed over fast: odd call; passed over middle: it is Monday",
    ]
    assert {record.levelname for record in caplog.records} == {"INFO"}


def test_an_operator_obeys_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLM_QUANT_ROCM_PER_TOKEN_QUANT", "triton")
    with pytest.raises(ValueError, match="PER_TOKEN_QUANT=triton cannot serve .*Triton kernels run on a GPU"):
        ops.per_token_quant_fp8(torch.ones(2, 4))


ARCHS = {
    "cpu": hardware.CPU,
    "gfx90a": hardware.amd("gfx90a"),
    "gfx942": hardware.amd("gfx942"),
    "gfx950": hardware.amd("gfx950"),
    "sm_80": hardware.nvidia(8, 0),
    "sm_90": hardware.nvidia(9, 0),
}


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes every device the architecture of the given name, with Triton installed and nothing measured."""

    def pretend(arch: str) -> hardware.Hardware:
        monkeypatch.setattr(hardware, "detect", lambda device: ARCHS[arch])
        monkeypatch.setattr(tuning, "shapes", lambda operator, arch: ())
        real = backends.missing
        for module in (gemm_operator, backends):
            monkeypatch.setattr(module, "missing", lambda name: None if name == "triton" else real(name))
        return ARCHS[arch]

    return pretend


def gemm_call(**changes: Any) -> Any:
    fields = {"device": CPU, "m": 16, "n": 64, "k": 128, "out_dtype": torch.bfloat16, "bias_dtype": None}
    return gemm_operator.GemmCall(**fields | {"layout": "row"} | changes)


NO_AITER = ("aiter", "aiter needs ROCm")
NO_FP16 = ("torch", "torch._scaled_mm with a scale a row has bf16 output only")
ANY_BIAS = ("torch", "torch._scaled_mm fails with a bias where cuBLAS would split K")
NO_BIAS = ("torch", "torch._scaled_mm takes a bf16 bias only")
OTHER_ORDER = "it may add up a row differently when other rows are beside it"
RAGGED = ("torch", "torch._scaled_mm needs N and K to be multiples of 16")
MANY = {"m": 2048, "n": 8192}
ODD = ("torch", "torch._scaled_mm needs operands whose rows begin at multiples of 16 bytes")


@pytest.mark.parametrize(
    ("arch", "changes", "chosen", "passed_over"),
    [
        ("gfx942", {}, "torch", [NO_AITER]),
        ("gfx950", {}, "torch", [NO_AITER]),
        # On Hopper, where nobody measured, few rows are ours, up to 330 tiles of 128 x 128, and, of up to 2048 rows of
        # which the last tile reaches 32 or more beyond x, up to 1800.
        ("sm_90", {}, "triton", []),
        ("sm_90", {"m": 64, "n": 65536}, "triton", []),
        ("sm_90", {"m": 128, "n": 330 * 128}, "triton", []),
        ("sm_90", {"m": 128, "n": 331 * 128}, "torch", [NO_AITER]),
        ("sm_90", {"m": 1280, "n": 33 * 128, "k": 32768}, "triton", []),
        ("sm_90", {"m": 1280, "n": 34 * 128, "k": 32768}, "torch", [NO_AITER]),
        ("sm_90", {"m": 96, "n": 65536}, "triton", []),
        ("sm_90", {"m": 97, "n": 65536}, "torch", [NO_AITER]),
        ("sm_90", {"m": 2000, "n": 112 * 128, "k": 32768}, "triton", []),
        ("sm_90", {"m": 2000, "n": 113 * 128, "k": 32768}, "torch", [NO_AITER]),
        ("sm_90", {"m": 2049, "n": 100 * 128, "k": 32768}, "torch", [NO_AITER]),
        ("gfx942", {"m": 1}, "torch", [NO_AITER]),
        ("sm_90", MANY | {"bias_dtype": torch.bfloat16}, "triton", [NO_AITER, ANY_BIAS]),
        ("gfx942", {"bias_dtype": torch.bfloat16}, "torch", [NO_AITER]),
        ("sm_90", MANY | {"out_dtype": torch.float16}, "triton", [NO_AITER, NO_FP16]),
        ("sm_90", MANY | {"aligned": False}, "triton", [NO_AITER, ODD]),
        ("gfx942", {"out_dtype": torch.float32}, "triton", [NO_AITER, NO_FP16]),
        ("gfx942", {"batch_invariant": True}, "triton", [("aiter", OTHER_ORDER), ("torch", OTHER_ORDER)]),
        ("sm_90", MANY | {"batch_invariant": True}, "triton", [("aiter", OTHER_ORDER), ("torch", OTHER_ORDER)]),
        ("gfx950", {"bias_dtype": torch.float32}, "triton", [NO_AITER, NO_BIAS]),
        ("sm_90", MANY | {"n": 10000 - 4}, "triton", [NO_AITER, RAGGED]),
        ("sm_90", MANY | {"n": 10008}, "triton", [NO_AITER, RAGGED]),
        ("sm_90", MANY | {"k": 72}, "triton", [NO_AITER, RAGGED]),
        ("gfx942", {"k": 1001}, "triton", [NO_AITER, RAGGED]),
        ("gfx90a", {}, "triton", [NO_AITER, ("torch", "gfx90a has no FP8 units")]),
        ("sm_80", {}, "triton", [NO_AITER, ("torch", "sm_80 has no FP8 units")]),
        (
            "cpu",
            {},
            "reference",
            [
                NO_AITER,
                ("torch", "torch._scaled_mm with a scale a row needs a GPU"),
                ("triton", "Triton kernels run on a GPU"),
            ],
        ),
    ],
)
def test_backend_of_a_product(on: Any, arch: str, changes: dict[str, Any], chosen: str, passed_over: list) -> None:  # type: ignore[type-arg]
    on(arch)
    choice = gemm_operator._choose(gemm_call(**changes))
    assert (choice.backend.name, list(choice.passed_over)) == (chosen, passed_over)


NOT_SUPPORTED = "CUDA error: HIPBLAS_STATUS_NOT_SUPPORTED when calling `HIPBLAS_STATUS_NOT_SUPPORTED`"


@pytest.fixture
def without_solution(on: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """A gfx950 whose hipBLASLt has kernels for other weights than [64, 128]; the numbers of rows that it is asked for.
    Of Triton's there is a stand-in."""
    on("gfx950")
    asked = []

    def scaled_mm(a: torch.Tensor, b: torch.Tensor, *scales: torch.Tensor, **options: Any) -> torch.Tensor:
        asked.append(a.shape[0])
        if (b.shape[1], b.shape[0]) == (64, 128):
            raise RuntimeError(NOT_SUPPORTED)
        return reference.ptpc_gemm(a, scales[0], b.t(), scales[1].t(), options["bias"], options["out_dtype"])

    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    monkeypatch.setattr(torch.version, "hip", "7.1")
    aiter, torchs, triton, last = gemm_operator.BACKENDS
    triton = Backend("triton", triton.refusal, reference.ptpc_gemm)
    monkeypatch.setattr(gemm_operator, "BACKENDS", (aiter, torchs, triton, last))
    yield asked
    gemm_operator._torch_failed.clear()


def test_what_hipblaslt_has_no_kernel_for_is_ours(
    without_solution: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "llm_quant_rocm")
    for n in (64, 64, 96):
        operands = integer_product(16, n, 128, fp8.OCP.dtype)
        assert_same(ops.ptpc_gemm(*operands[:4]), reference.ptpc_gemm(*operands[:4], None, torch.bfloat16))
    assert without_solution == [16, 16], "once of each weight"
    line = "ptpc_gemm runs on triton; .*; passed over torch: torch._scaled_mm fails with 16 x 64 x 128 here: "
    assert len(re.findall(line + NOT_SUPPORTED, caplog.text)) == 1


@pytest.mark.parametrize("failure", [torch.OutOfMemoryError, torch.AcceleratorError, RuntimeError])
def test_failures_that_are_none_of_hipblaslts(
    failure: type[RuntimeError], without_solution: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*operands: Any, **options: Any) -> None:
        raise failure("something else")

    monkeypatch.setattr(torch, "_scaled_mm", fail)
    if failure is RuntimeError:
        monkeypatch.setenv("LLM_QUANT_ROCM_PTPC_GEMM", "torch")
    with pytest.raises(failure, match="something else"):
        ops.ptpc_gemm(*integer_product(16, 64, 128, fp8.OCP.dtype)[:4])


def test_without_triton_odd_products_take_the_reference(on: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    on("sm_90")
    monkeypatch.setattr(gemm_operator, "missing", lambda name: f"{name} is not installed")
    choice = gemm_operator._choose(gemm_call(n=100))
    assert choice.backend.name == "reference"
    assert ("triton", "triton is not installed") in choice.passed_over


def test_a_measured_shape_takes_its_winner(on: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    on("sm_90")
    winner = tuning.Measured(n=64, k=128, m=16, backend="torch", config={})
    monkeypatch.setattr(tuning, "shapes", lambda operator, arch: (winner,))
    assert gemm_operator._choose(gemm_call()).backend.name == "torch"


@pytest.mark.parametrize(
    ("arch", "m", "counts"), [("sm_90", 225, True), ("sm_90", 224, False), ("sm_90", 64, False), ("gfx942", 65, True)]
)
def test_what_more_rows_were_measured_with_counts_where_tiles_are_as_full(
    on: Any, monkeypatch: pytest.MonkeyPatch, arch: str, m: int, counts: bool
) -> None:
    on(arch)
    winner = tuning.Measured(n=8192, k=8192, m=256, backend="torch", config={})
    monkeypatch.setattr(tuning, "shapes", lambda operator, arch: (winner,))
    assert tuning.lookup_product("ptpc_gemm", arch, m, 8192, 8192) == (winner if counts else None)


@pytest.mark.parametrize("operator", [quant_operator, norm_operator], ids=["per_token_quant", "rms_norm_quant"])
@pytest.mark.parametrize(
    ("arch", "columns", "reason"),
    [
        ("gfx90a", 8192, None),
        ("gfx942", 65536, None),
        ("sm_90", 1, None),
        ("sm_80", 8192, "Triton has no conversion to FP8 for sm_80"),
        ("sm_90", 65537, "rows of more than 65536 columns do not fit in registers"),
        ("cpu", 8192, "Triton kernels run on a GPU"),
    ],
)
def test_backend_of_a_row_kernel(on: Any, operator: Any, arch: str, columns: int, reason: str | None) -> None:
    choice = operator._choose(_row_call.RowCall(on(arch), columns))
    assert choice.backend.name == ("reference" if reason else "triton")
    assert choice.passed_over == ((("triton", reason),) if reason else ())


def test_the_row_limit_is_the_kernels() -> None:
    pytest.importorskip("triton")
    from llm_quant_rocm.kernels import per_token_quant as kernel

    assert _row_call.MAX_COLUMNS == kernel.MAX_COLUMNS


def shuffle(w: torch.Tensor, layout: tuple[int, int] = (16, 16)) -> torch.Tensor:
    """A permutation in the place of aiter's."""
    assert layout == (16, 16)
    n, k = w.shape
    return w.view(torch.uint8).view(n // 16, 16, k // 32, 32).transpose(1, 2).reshape(n, k).view(w.dtype)


def gemm_a8w8_bpreshuffle(
    XQ: torch.Tensor, WQ: torch.Tensor, x_scale: torch.Tensor, w_scale: torch.Tensor,
    bias: torch.Tensor | None = None, dtype: torch.dtype = torch.bfloat16, check: bool = False,
) -> torch.Tensor:  # fmt: skip
    """The product that aiter computes of a shuffled weight."""
    assert bias is None, "aiter's kernel has no bias"
    n, k = WQ.shape
    w = WQ.view(torch.uint8).view(n // 16, k // 32, 16, 32).transpose(1, 2).reshape(n, k).view(WQ.dtype)
    return ((XQ.float() @ w.float().t()) * x_scale * w_scale.t()).to(dtype)


def tuned(m: int, n: int, k: int, q_dtype_w: torch.dtype, tuned_file: str) -> dict[str, Any] | None:
    """What aiter was tuned for: weights of less than 8192 rows, of some numbers of rows of x."""
    assert (q_dtype_w, tuned_file) == (torch.float8_e4m3fnuz, "tuned.csv")
    return {"libtype": "ck", "splitK": 0} if n < 8192 and m == 256 else None


def wrapped(function: Any) -> Any:
    """As aiter wraps its functions for torch.compile: nobody sees what they take."""
    return lambda *args, **kwargs: function(*args, **kwargs)


@pytest.fixture
def aiter(on: Any, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A gfx942 with ROCm and an aiter that works; a test breaks what it likes."""
    on("gfx942")
    monkeypatch.setattr(torch.version, "hip", "7.1")
    names = ("aiter", "aiter.ops", "aiter.ops.shuffle", "aiter.ops.gemm_op_a8w8")
    modules: dict[str, Any] = {name: ModuleType(name) for name in names}
    for name, module in modules.items():
        module.__spec__ = ModuleSpec(name, None)
        monkeypatch.setitem(sys.modules, name, module)
    modules["aiter"].gemm_a8w8_bpreshuffle = wrapped(gemm_a8w8_bpreshuffle)
    modules["aiter.ops"].shuffle = modules["aiter.ops.shuffle"]
    modules["aiter.ops.shuffle"].shuffle_weight = shuffle
    modules["aiter.ops"].gemm_op_a8w8 = gemms = modules["aiter.ops.gemm_op_a8w8"]
    gemms.AITER_CONFIGS = SimpleNamespace(AITER_CONFIG_GEMM_A8W8_BPRESHUFFLE_FILE="tuned.csv")
    gemms.get_GEMM_config_with_quant_type = tuned
    return modules["aiter"]


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_aiter_serves_a_shuffled_weight(aiter: Any, out_dtype: torch.dtype) -> None:
    xq, xscale, wq, wscale, bias = integer_product(5, 128, 512, torch.float8_e4m3fnuz)
    prepared, layout = ops.prepare_ptpc_weight(wq)
    assert layout == "aiter_16x16"
    assert_same(prepared, shuffle(wq))
    assert not torch.equal(prepared.float(), wq.float())
    call = gemm_call(layout=layout, out_dtype=out_dtype)
    assert gemm_operator._choose(call).backend.name == "aiter"
    expected = reference.ptpc_gemm(xq, xscale, wq, wscale, None, torch.float32)
    for chosen in (None, bias.to(out_dtype)):
        found = ops.ptpc_gemm(xq, xscale, prepared, wscale, chosen, out_dtype, layout)
        # aiter rounds the product before the bias is added.
        rounded = expected.to(out_dtype)
        assert_same(found, rounded if chosen is None else rounded + chosen)


def test_rows_stay_for_products_that_aiter_does_not_have(aiter: Any) -> None:
    xq, xscale, wq, wscale, _ = integer_product(5, 128, 512, torch.float8_e4m3fnuz)
    prepared, layout = ops.prepare_ptpc_weight(wq, torch.float32)
    assert (prepared, layout) == (wq, "row")
    assert gemm_operator._choose(gemm_call(layout=layout, out_dtype=torch.float32)).backend.name != "aiter"


def test_rows_stay_where_a_rows_bits_are_its_own(aiter: Any) -> None:
    wq = torch.zeros(128, 512, dtype=torch.float8_e4m3fnuz)
    assert ops.prepare_ptpc_weight(wq)[1] != "row"
    assert ops.prepare_ptpc_weight(wq, batch_invariant=True) == (wq, "row")


def test_ptpc_linear_through_aiter(aiter: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLM_QUANT_ROCM_PER_TOKEN_QUANT", "reference")
    wq, wscale = fp8.quantize_rows(torch.randn(128, 512), fp8.FNUZ)
    x = torch.randn(2, 3, 512).bfloat16()
    prepared, layout = ops.prepare_ptpc_weight(wq)
    found = ops.ptpc_linear(x, prepared, wscale, layout=layout)
    expected = x.float() @ fp8.dequantize(wq, wscale).t()
    assert (found.float() - expected).norm() / expected.norm() < 0.05


@pytest.mark.parametrize(
    ("shape", "layout"),
    [
        ((64, 4096), "aiter_16x16"),
        ((32, 4096), "row"),  # a projection of Qwen3.5's on four ranks: decode would be served, long prefills not
        ((128, 1408), "aiter_16x16"),
        ((192, 1408), "row"),
        ((4096, 10944), "row"),  # GLM-4.5-Air's
        ((256, 384), "row"),
        ((8192, 4096), "row"),  # for which it was not tuned
    ],
    ids=str,
)
def test_only_a_weight_that_aiter_was_tuned_for_is_shuffled(aiter: Any, shape: tuple[int, int], layout: str) -> None:
    wq = torch.zeros(shape, dtype=torch.float8_e4m3fnuz)
    assert ops.prepare_ptpc_weight(wq)[1] == layout


@pytest.mark.parametrize(
    ("n", "reason"),
    [(32, "it has no kernels for a weight of 32 x 4096"), (8192, "it was not tuned for a weight of 8192 x 4096")],
)
def test_a_shape_that_aiter_lacks_is_said(aiter: Any, n: int, reason: str) -> None:
    assert gemm_operator._choose(gemm_call(n=n, k=4096)).passed_over[0] == ("aiter", reason)


def test_an_aiter_that_does_not_say_what_it_was_tuned_for_is_passed_over(
    aiter: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(sys.modules["aiter.ops.gemm_op_a8w8"], "AITER_CONFIGS")
    name, reason = gemm_operator._choose(gemm_call(n=128, k=512)).passed_over[0]
    assert name == "aiter"
    assert reason.startswith("it does not say what it was tuned for: ")


@pytest.mark.parametrize("backend", ["torch", "triton", "reference", "aiter"])
def test_a_weight_is_arranged_for_the_backend_that_is_forced(
    aiter: Any, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLM_QUANT_ROCM_PTPC_GEMM", backend)
    _, layout = ops.prepare_ptpc_weight(torch.zeros(128, 512, dtype=torch.float8_e4m3fnuz))
    assert gemm_operator._choose(gemm_call(layout=layout)).backend.name == backend


def test_an_empty_wish_forces_nothing(aiter: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLM_QUANT_ROCM_PTPC_GEMM", "")
    _, layout = ops.prepare_ptpc_weight(torch.zeros(128, 512, dtype=torch.float8_e4m3fnuz))
    assert layout == "aiter_16x16"


def test_an_unshuffled_weight_passes_aiter_over(aiter: Any) -> None:
    choice = gemm_operator._choose(gemm_call(n=128, k=512))
    assert choice.backend.name == "torch"
    assert choice.passed_over == (("aiter", "the weight was not shuffled for it (ops.prepare_ptpc_weight)"),)


def test_nothing_else_reads_a_shuffled_weight(aiter: Any) -> None:
    call = gemm_call(layout="aiter_16x16", out_dtype=torch.float32)
    message = "aiter: it has no torch.float32 output; .*triton: the weight was shuffled.*tell .*out_dtype"
    with pytest.raises(NotImplementedError, match=message):
        gemm_operator._choose(call)


def wrong_arguments(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x


def wrong_product(*args: Any, **kwargs: Any) -> torch.Tensor:
    return gemm_a8w8_bpreshuffle(*args, **kwargs) * 1.5


def nan_product(*args: Any, **kwargs: Any) -> torch.Tensor:
    return gemm_a8w8_bpreshuffle(*args, **kwargs) * float("nan")


def crash(*args: Any, **kwargs: Any) -> torch.Tensor:
    raise RuntimeError("no kernel image")


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (wrong_arguments, r"aiter failed: wrong_arguments\(\) got an unexpected keyword argument"),
        (wrong_product, r"its product is wrong here \(largest relative error 0.[45]"),
        (nan_product, r"its product is wrong here \(largest relative error nan"),
        (crash, "aiter failed: no kernel image"),
    ],
)
def test_an_aiter_that_does_not_prove_itself_is_passed_over(
    aiter: Any, monkeypatch: pytest.MonkeyPatch, function: Any, reason: str
) -> None:
    monkeypatch.setattr(aiter, "gemm_a8w8_bpreshuffle", wrapped(function))
    choice = gemm_operator._choose(gemm_call())
    assert choice.backend.name == "torch"
    name, found = choice.passed_over[0]
    assert name == "aiter"
    assert re.match(reason, found)
    wq = torch.zeros(128, 512, dtype=torch.float8_e4m3fnuz)
    assert ops.prepare_ptpc_weight(wq) == (wq, "row")


@pytest.mark.parametrize(
    ("module", "name"), [("aiter", "gemm_a8w8_bpreshuffle"), ("aiter.ops.shuffle", "shuffle_weight")]
)
def test_an_aiter_without_its_functions_is_passed_over(
    aiter: Any, monkeypatch: pytest.MonkeyPatch, module: str, name: str
) -> None:
    monkeypatch.delattr(sys.modules[module], name)
    assert gemm_operator._choose(gemm_call()).passed_over[0] == ("aiter", f"aiter has no {name}")


def test_rocm_without_aiter_says_so(on: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    on("gfx942")
    monkeypatch.setattr(torch.version, "hip", "7.1")
    assert gemm_operator._choose(gemm_call()).passed_over[0] == ("aiter", "aiter is not installed")


def test_aiter_is_tried_once(aiter: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def counted(*args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append(1)
        return gemm_a8w8_bpreshuffle(*args, **kwargs)

    monkeypatch.setattr(aiter, "gemm_a8w8_bpreshuffle", counted)
    for _ in range(3):
        ops.prepare_ptpc_weight(torch.zeros(128, 512, dtype=torch.float8_e4m3fnuz))
    assert len(calls) == 1

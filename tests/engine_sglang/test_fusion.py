# SPDX-License-Identifier: Apache-2.0
"""SGLang's own norms with ours in their place, against our separate operators, bit for bit."""

import logging
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from sglang.srt.layers.layernorm import GemmaRMSNorm, RMSNorm

from llm_quant_rocm import ops
from llm_quant_rocm.comm import norm_ranks, reduce_norm_quant
from llm_quant_rocm.formats.nvfp4 import BLOCK
from llm_quant_rocm.ops.reduce_norm_quant import MAX_COLUMNS
from llm_quant_rocm_sglang import fusion
from llm_quant_rocm_sglang.nvfp4_linear import NvFp4LinearMethod
from llm_quant_rocm_sglang.ptpc_linear import PtpcFp8LinearMethod

COLUMNS = 256


class Group:
    """As much of SGLang's GroupCoordinator as is read; its one process stands for both ranks."""

    def __init__(self, world_size: int = 1) -> None:
        self.world_size, self.unique_name, self.cpu_group, self.qr_comm = world_size, "tp:0", None, None

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x + x


@pytest.fixture(autouse=True)
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[Group]:
    """The group of one rank; none of its lines was logged before."""
    made = Group()
    monkeypatch.setattr(fusion.parallel_state, "get_tp_group", lambda: made)
    monkeypatch.setattr(fusion.dist, "get_rank", lambda group: 0)
    fusion._log.cache_clear()
    yield made
    fusion._connected.clear()


def norm(kind: type = RMSNorm, **options: Any) -> Any:
    made = kind(COLUMNS, eps=1e-5, **options)
    made.weight.data = torch.randn(COLUMNS, generator=torch.Generator().manual_seed(3)).bfloat16()
    return made


class Linear(torch.nn.Module):
    """A layer of 64 rows, with a bias, that `PtpcFp8LinearMethod` serves."""

    def __init__(self) -> None:
        super().__init__()
        weight = torch.randn(64, COLUMNS, generator=torch.Generator().manual_seed(5)).bfloat16()
        self.weight, self.weight_scale = ops.per_token_quant_fp8(weight)
        self.bias = torch.randn(64, generator=torch.Generator().manual_seed(7)).bfloat16()
        self.ptpc_layout = "row"
        self.quant_method = object.__new__(PtpcFp8LinearMethod)
        self.quant_method.codes = self.weight.dtype
        self.quant_method.batch_invariant = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.quant_method.apply(self, x, self.bias)


_ptpc_linear = ops.ptpc_linear


def by_operator(layer: Linear, x: torch.Tensor) -> torch.Tensor:
    return _ptpc_linear(x.clone(), layer.weight, layer.weight_scale, layer.bias)


def model(kind: type = RMSNorm, **options: Any) -> torch.nn.ModuleDict:
    made = torch.nn.ModuleDict({"norm": norm(kind, **options), "linear": Linear()})
    fusion.install(made)
    return made


def rows(count: int = 5, seed: int = 0) -> torch.Tensor:
    """Rows with zeros, an outlier and subnormals among them."""
    x = torch.randn(count, COLUMNS, generator=torch.Generator().manual_seed(seed)).bfloat16()
    if count > 3:
        x[1], x[2, 7], x[3] = 0.0, 3e4, x[3] * 1e-38
    return x


def apart(x: torch.Tensor, residual: torch.Tensor | None, bias: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(norm, sum) by our operator, without quantization."""
    weight = norm().weight.data
    options = {"eps": 1e-5, "weight_bias": bias, "quantization": "none", "normed": True}
    result = ops.reduce_norm_quant(x, weight, residual, **options)
    return result.normed, result.residual


@pytest.mark.parametrize("residual", [None, rows(seed=1)], ids=["first", "residual"])
@pytest.mark.parametrize(("kind", "bias"), [(RMSNorm, 0.0), (GemmaRMSNorm, 1.0)], ids=["llama", "gemma"])
def test_bits_are_those_of_the_operators_apart(
    kind: type, bias: float, residual: torch.Tensor | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers, x, post = model(kind), rows(), rows(seed=2)
    quantized: list[torch.Tensor] = []
    monkeypatch.setattr(ops, "ptpc_linear", lambda x, *layer, **how: quantized.append(x) or _ptpc_linear(x, *layer))
    given = () if residual is None else (residual.clone(),)
    first = _first(layers["norm"](x.clone(), *given))  # by SGLang's kernel; the norm learns who reads it
    assert torch.equal(layers["linear"](first), by_operator(layers["linear"], first))
    assert len(quantized) == 1
    found = layers["norm"](x.clone(), *given)
    normed, total = apart(x, residual, bias)
    assert torch.equal(_first(found), normed)
    if residual is not None:
        assert torch.equal(found[1], total)
        found = layers["norm"](x, residual, post)
        normed, total = apart(x, residual + post, bias)
        assert torch.equal(found[0], normed)
        assert torch.equal(found[1], total)
    output = layers["linear"](_first(found))
    assert len(quantized) == 1  # the second time, the norm had made the codes
    assert torch.equal(output, by_operator(layers["linear"], normed))


def _first(result: Any) -> torch.Tensor:
    return result if isinstance(result, torch.Tensor) else result[0]


def learned(kind: type = RMSNorm, **options: Any) -> torch.nn.ModuleDict:
    layers = model(kind, **options)
    layers["linear"](_first(layers["norm"](rows())))
    return layers


def test_a_result_that_was_changed_is_quantized_again() -> None:
    layers = learned()
    result = layers["norm"](rows())
    result.mul_(2)
    assert torch.equal(layers["linear"](result), by_operator(layers["linear"], result))


def test_what_a_norm_of_sglangs_own_writes_over_is_quantized_again() -> None:
    """Its kernels on GPUs write their result over their input, whose Python object stays."""
    layers = learned()
    other = norm(cast_x_before_out_mul=True)
    other._forward_method = lambda x, residual, post: (x.data.copy_(x.float() * 2 + 1), x)[1:] * 2
    fusion.install(torch.nn.ModuleDict({"norm": other, "linear": Linear()}))
    assert not other._forward_method.is_plain
    first = layers["norm"](rows())
    second, _ = other(first, rows(seed=1))
    assert second is first
    assert torch.equal(layers["linear"](second), by_operator(layers["linear"], second))


@pytest.mark.parametrize(
    "x",
    [rows().float(), rows(0), rows()[:, :COLUMNS].to(torch.float32)],
    ids=["fp32", "empty", "other"],
)
def test_what_the_operator_does_not_take_is_sglangs(x: torch.Tensor) -> None:
    layers = learned()
    plain = norm()
    plain.weight.data = layers["norm"].weight.data
    assert torch.equal(layers["norm"](x), plain(x))


@pytest.mark.parametrize(
    ("options", "is_plain"),
    [
        ({}, True),
        ({"cast_x_before_out_mul": True}, False),
        ({"fp32_residual": True}, False),
        ({"var_hidden_size": 128}, False),
        ({"override_orig_dtype": torch.float32}, False),
    ],
    ids=["plain", "cast", "residual", "variance", "dtype"],
)
def test_which_norms_the_operator_computes(options: dict[str, Any], is_plain: bool) -> None:
    assert model(**options)["norm"]._forward_method.is_plain is is_plain


def test_models_without_our_layers_are_left_alone() -> None:
    made = torch.nn.ModuleDict({"norm": norm()})
    before = made["norm"]._forward_method
    fusion.install(made)
    assert made["norm"]._forward_method is before


@pytest.mark.parametrize(("ranks", "taken"), [(1, False), (2, True)])
@pytest.mark.usefixtures("two_ranks")
def test_nvfp4_alone_has_only_all_reduces_to_fuse(ranks: int, taken: bool, group: Group) -> None:
    group.world_size = ranks
    made = torch.nn.ModuleDict({"norm": norm(), "linear": Linear()})
    made["linear"].quant_method = object.__new__(NvFp4LinearMethod)
    fusion.install(made)
    assert isinstance(made["norm"]._forward_method, fusion.FusedNorm) is taken


@pytest.mark.parametrize("columns", [40, MAX_COLUMNS + BLOCK], ids=["no blocks", "too many"])
def test_norms_of_other_widths_stay_sglangs(columns: int) -> None:
    made = torch.nn.ModuleDict({"norm": RMSNorm(columns), "linear": Linear()})
    fusion.install(made)
    assert not made["norm"]._forward_method.is_plain


def test_what_torch_traces_stays_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    layers, plain = learned(), MagicMock(return_value=rows())
    layers["norm"]._forward_method._plain = plain
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert layers["norm"](rows()) is plain.return_value
    assert not hasattr(plain.return_value, fusion._MARK)


def test_it_can_be_switched_off(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("LLM_QUANT_ROCM_FUSION", "0")
    with caplog.at_level(logging.INFO, "llm_quant_rocm"):
        assert not isinstance(model()["norm"]._forward_method, fusion.FusedNorm)
    assert caplog.messages == ["norm fusion: off, by LLM_QUANT_ROCM_FUSION=0"]


# The all-reduce.


@pytest.fixture
def two_ranks(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks with the same x, of which this process is both."""
    group.world_size = 2
    ranks = SimpleNamespace(world=2, obstacle="a CPU", all_reduce=lambda x: x + x)
    monkeypatch.setitem(reduce_norm_quant._NAMED, "tp:0", ranks)
    monkeypatch.setattr(fusion, "_refusal", lambda: None)
    monkeypatch.setattr(fusion.communicator, "members", lambda group: group)
    monkeypatch.setattr(norm_ranks, "connect", lambda members, *options: members.unique_name)


def declining(batch_size: int) -> bool:
    return False


@pytest.mark.usefixtures("two_ranks")
def test_where_it_is_off_the_other_ranks_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """On another host it may be on, and they wait for this one."""
    told: list[str | None] = []
    monkeypatch.setattr(norm_ranks, "connect", lambda members, settings, refusal, *others: told.append(refusal))
    monkeypatch.setenv("LLM_QUANT_ROCM_FUSION", "0")
    model()
    assert told == ["LLM_QUANT_ROCM_FUSION=0 on one of its ranks"]


@pytest.mark.usefixtures("two_ranks")
def test_sums_are_left_to_norms_once_the_group_is_connected() -> None:
    assert not fusion.may_fuse(declining, 4)
    model()
    assert fusion.may_fuse(declining, 4)
    assert not fusion.may_fuse(declining, 0)
    assert fusion.may_fuse(lambda batch_size: True, 0)


@pytest.mark.usefixtures("two_ranks")
@pytest.mark.parametrize("kind", [RMSNorm, GemmaRMSNorm], ids=["llama", "gemma"])
def test_the_sum_its_norm_and_its_codes(kind: type) -> None:
    layers, x, residual = model(kind), rows(), rows(seed=1)
    normed, total = apart(x + x, residual, float(kind is GemmaRMSNorm))
    for _ in range(2):
        before = residual.clone()
        found = fusion.reduce_and_norm(fail, layers["norm"], x, residual, None, layers["norm"].weight, False)
        assert torch.equal(found[0], normed)
        assert torch.equal(found[1], total)
        assert torch.equal(residual, before)  # which SGLang may have captured
        output = layers["linear"](found[0])
        assert torch.equal(output, by_operator(layers["linear"], normed))
    assert getattr(found[0], fusion._MARK).codes is not None


@pytest.mark.usefixtures("two_ranks")
def test_a_norm_that_is_not_ours_gets_its_sum_all_the_same() -> None:
    model()
    plain, x, residual = norm(), rows(), rows(seed=1)
    kept, forward = residual.clone(), plain._forward_method or plain._resolve_forward_method()
    # SGLang's kernels on GPUs write over the residual, which it may have captured.
    plain._forward_method = lambda x, residual, post: (forward(x, residual, post)[0], residual.add_(x))
    found = fusion.reduce_and_norm(fail, plain, x, residual, None, plain.weight)
    expected = norm()(x + x, residual)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])
    assert torch.equal(residual, kept)


def test_the_groups_all_reduce_leaves_its_input_as_it_was() -> None:
    """On CPUs SGLang adds in place."""
    x = torch.ones(3)
    group = MagicMock(all_reduce=lambda x: x.mul_(2))
    assert fusion._all_reduce_of(weakref.ref(group))(x).tolist() == [2, 2, 2]
    assert x.tolist() == [1, 1, 1]


def fail(*arguments: Any) -> None:
    raise AssertionError("SGLang's own was called")


def test_without_a_group_of_ours_it_is_sglangs() -> None:
    layers, x = model(), rows()
    called = []
    for residual in (None, rows(seed=1)):
        fusion.reduce_and_norm(lambda *given: called.append(given), layers["norm"], x, residual, None, x)
    assert len(called) == 2


@pytest.mark.parametrize(
    ("arguments", "parallel", "reason"),
    [
        ({}, {}, None),
        # SGLang asks for it by itself, whether FlashInfer is there or not.
        ({"flashinfer_allreduce_fusion_backend": "auto", "has_flashinfer": False}, {}, None),
        ({"flashinfer_allreduce_fusion_backend": "auto"}, {}, "flashinfer-allreduce-fusion-backend serves"),
        ({"enable_aiter_allreduce_fusion": True}, {}, "enable-aiter-allreduce-fusion serves"),
        ({"enable_deterministic_inference": True}, {}, "enable-deterministic-inference is set"),
        ({"enable_two_batch_overlap": True}, {}, "--enable-two-batch-overlap lets batches run at once"),
        ({}, {"attn_tp_size": 1}, "over other groups"),
        ({}, {"moe_ep_size": 2, "moe_tp_size": 2, "tp_size": 4, "attn_tp_size": 4}, "over other groups"),
    ],
    ids=["nothing", "no flashinfer", "flashinfer", "aiter", "deterministic", "overlap", "attention", "experts"],
)
def test_why_sums_stay_apart(
    arguments: dict[str, Any], parallel: dict[str, int], reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"tp_size": 2, "attn_tp_size": 2, "moe_tp_size": 2, "moe_ep_size": 1, **parallel}
    monkeypatch.setattr(fusion.layernorm._forward_with_allreduce_fusion, "__wrapped__", None, raising=False)
    monkeypatch.setattr(fusion, "server_arguments", lambda: SimpleNamespace(**arguments))
    monkeypatch.setattr(fusion, "get_parallel", lambda: SimpleNamespace(**sizes))
    monkeypatch.setattr(fusion, "is_flashinfer_available", lambda: arguments.get("has_flashinfer", True))
    found = fusion._refusal()
    assert (found is None) if reason is None else (reason in found)


@pytest.mark.parametrize("is_gone", [False, True], ids=["not hooked", "gone"])
def test_norms_that_could_not_be_hooked_take_no_sums(is_gone: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang would look for its own kernels, and has none."""
    if is_gone:
        monkeypatch.delattr(fusion.layernorm, "_forward_with_allreduce_fusion")
    else:
        monkeypatch.setattr(fusion.layernorm, "_forward_with_allreduce_fusion", lambda *given: None)
    assert fusion._refusal() == "its norms could not be hooked"

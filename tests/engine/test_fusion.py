# SPDX-License-Identifier: Apache-2.0
"""The fusion pass on graphs as vLLM's compilation makes them, and in a vLLM that compiles on the CPU as on a GPU."""

import copy
import logging
import os
import pickle
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from checkpoints import dense as dense_checkpoint_of
from engines import Result, run
from torch import fx
from torch._inductor import config as inductor_config
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional
from vllm.compilation.passes.inductor_pass import pass_context
from vllm.compilation.passes.ir.inplace_functionalization import VllmIRInplaceFunctionalizationPass
from vllm.config import CompilationConfig, CompilationMode, VllmConfig, set_current_vllm_config
from vllm.config.utils import Range
from vllm.ir import ops as ir
from vllm.model_executor import custom_op
from vllm.model_executor.layers.layernorm import RMSNorm

from llm_quant_rocm import ops
from llm_quant_rocm.comm import norm_ranks
from llm_quant_rocm.comm.reduce_norm_quant import Ranks, connect, disconnect, predicted
from llm_quant_rocm.hardware import nvidia
from llm_quant_rocm.reference.rms_norm_quant import rms_norm
from llm_quant_rocm_vllm import fusion, reduce_norm
from llm_quant_rocm_vllm.fusion import HOOK, SWITCH, NormQuantFusion

K = 96
EPS = 1e-5
NORM, ADD_NORM = torch.ops.vllm_ir.rms_norm.default, torch.ops.vllm_ir.fused_add_rms_norm.default
REDUCE = torch.ops.vllm.all_reduce.default
QUANT = torch.ops.llm_quant_rocm.per_token_quant_fp8.default
FUSED = torch.ops.llm_quant_rocm.rms_norm_quant_fp8.default
ADD_FUSED = torch.ops.llm_quant_rocm.add_rms_norm_quant_fp8.default
REDUCE_FUSED = torch.ops.llm_quant_rocm.reduce_norm_quant.default
ALONE, TOGETHER = "RMSNorm + quantization", "all-reduce + RMSNorm + quantization"
GATED = "silu-and-mul + quantization"


class Weights(NamedTuple):
    """Of one norm and one linear layer."""

    norm: torch.Tensor | None
    codes: torch.Tensor
    scales: torch.Tensor

    @classmethod
    def random(cls, seed: int, norm_dtype: torch.dtype = torch.bfloat16) -> "Weights":
        generator = torch.Generator().manual_seed(seed)
        norm = (1 + torch.randn(K, generator=generator) / 4).to(norm_dtype)
        return cls(norm, *ops.per_token_quant_fp8(torch.randn(K, K, generator=generator)))

    def linear(self, x: torch.Tensor) -> torch.Tensor:
        return ops.ptpc_linear(x, self.codes, self.scales)


MODEL = tuple(Weights.random(seed) for seed in (1, 2, 3))


def layer(x: torch.Tensor, a: Weights, b: Weights, c: Weights) -> tuple[torch.Tensor, ...]:
    """Norms and linear layers as in a model: the residual of each norm is the sum of the one before."""
    y = a.linear(NORM(x, a.norm, EPS))
    y, x = ADD_NORM(y, x, b.norm, EPS)
    y, x = ADD_NORM(b.linear(y), x, c.norm, EPS, None)
    return c.linear(y), x


def rows(count: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Ordinary rows, and among the first ones: zeros, an outlier, small and large ones."""
    x = torch.randn(count, K, generator=torch.Generator().manual_seed(count))
    for row, (factor, outlier) in enumerate([(0, 0), (1, 1e4), (1e-6, 1e-6), (-1e3, 0)][:count]):
        x[row] *= factor
        x[row, 7] += outlier
    return x.to(dtype)


def given(x: torch.Tensor, model: tuple[Weights, ...] = MODEL) -> tuple[torch.Tensor, ...]:
    """A traced graph's inputs: activations and, as in vLLM, all weights."""
    return x, *chain.from_iterable(model)


def trace(function: Callable[..., Any], *inputs: torch.Tensor, mode: str = "fake") -> fx.GraphModule:
    """The graph of function(x, *weights) for inputs as `given` gives them."""

    def flat(x: torch.Tensor, *tensors: torch.Tensor) -> Any:
        return function(x, *(Weights(*tensors[start : start + 3]) for start in range(0, len(tensors), 3)))

    module = make_fx(flat, tracing_mode=mode)(*inputs)
    module.graph.eliminate_dead_code()
    return module


def fuse(module: fx.GraphModule, group: str | None = None) -> list[str]:
    fused = NormQuantFusion(group)(module.graph)
    module.graph.lint()
    nodes = len(module.graph.nodes)
    module.graph.eliminate_dead_code()
    assert len(module.graph.nodes) == nodes
    module.recompile()
    return fused


def calls(module: fx.GraphModule) -> Counter:
    """How often each operator of the pass is called."""
    known = (NORM, ADD_NORM, QUANT, REDUCE, FUSED, ADD_FUSED, REDUCE_FUSED)
    return Counter(node.target for node in module.graph.nodes if node.target in known)


class WithOurRounding(fx.Interpreter):
    """Runs a graph with the norms of our reference instead of vLLM's, which keep more bits of a sum."""

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target is NORM:
            return rms_norm(args[0], args[1], args[2], None)[0]
        if target is ADD_NORM:
            return rms_norm(args[0], args[2], args[3], args[1])
        if target is REDUCE:
            return args[0]  # of one rank
        return super().call_function(target, args, kwargs)


def bits(tensors: tuple[torch.Tensor, ...]) -> list[bytes]:
    return [tensor.contiguous().view(torch.uint8).numpy().tobytes() for tensor in tensors]


@pytest.mark.parametrize("norm_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_bits_are_those_of_the_separate_operators(dtype: torch.dtype, norm_dtype: torch.dtype) -> None:
    inputs = given(rows(9, dtype), tuple(Weights.random(seed, norm_dtype) for seed in (1, 2, 3)))
    apart = trace(layer, *inputs)
    fused = copy.deepcopy(apart)
    assert calls(fused) == {NORM: 1, ADD_NORM: 2, QUANT: 3}
    assert fuse(fused) == [ALONE] * 3
    assert calls(fused) == {FUSED: 1, ADD_FUSED: 2}
    assert bits(fused(*inputs)) == bits(WithOurRounding(apart).run(*inputs))


def test_against_vllms_own_norms() -> None:
    """They normalise a sum before it is rounded, and round again before they multiply by a 16-bit weight. Where neither
    has anything to round, codes are the same but for fp32's last bit; elsewhere a code may be the neighbour's."""

    def function(x: torch.Tensor, norm: Weights, residual: Weights) -> tuple[torch.Tensor, ...]:
        y, total = ADD_NORM(x, residual.norm, norm.norm, EPS)
        return *QUANT(y), total

    generator = torch.Generator().manual_seed(5)
    whole, more = (torch.randint(-100, 101, (64, K), generator=generator).bfloat16() for _ in range(2))
    ones = MODEL[0]._replace(norm=torch.ones(K, dtype=torch.bfloat16))
    for x, residual, norm, same in ((whole, more, ones, 0.999), (rows(64), rows(64).flip(0), MODEL[0], 0.9)):
        inputs = given(x, (norm, norm._replace(norm=residual)))
        apart = trace(function, *inputs)
        fused = copy.deepcopy(apart)
        assert fuse(fused) == [ALONE]
        codes, scales, total = fused(*inputs)
        their_codes, their_scales, their_total = apart(*inputs)
        assert torch.equal(total, their_total)
        share = (codes.view(torch.uint8) == their_codes.view(torch.uint8)).float().mean().item()
        print(f"{share:.5f} of the codes are the same")
        assert share >= same
        torch.testing.assert_close(scales, their_scales, rtol=2**-6, atol=0)
        ours, theirs = codes.float() * scales, their_codes.float() * their_scales
        torch.testing.assert_close(ours, theirs, rtol=2**-3 + 2**-6, atol=2 * 2**-9 * their_scales.max().item())


def test_the_number_of_rows_stays_open() -> None:
    module = trace(layer, *given(rows(5)), mode="symbolic")
    environment = next(node.meta["val"] for node in module.graph.nodes).fake_mode.shape_env
    guards = len(environment.guards)
    apart = copy.deepcopy(module)
    assert fuse(module) == [ALONE] * 3
    assert len(environment.guards) == guards
    for count in (1, 2, 33):
        inputs = given(rows(count))
        assert bits(module(*inputs)) == bits(WithOurRounding(apart).run(*inputs))


# Activations of gated layers.

GATES = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
}


def gated(x: torch.Tensor, activation: str = "silu") -> torch.Tensor:
    """As vLLM's layers write it."""
    width = x.shape[-1] // 2
    return GATES[activation](x[..., :width]) * x[..., width:]


class Passed(CustomGraphPass):
    """Ours, where Inductor runs it in vLLM, and what it says."""

    def __init__(self) -> None:
        self.fused: list[str] = []

    def __call__(self, graph: fx.Graph) -> None:
        self.fused += NormQuantFusion()(graph)
        graph.lint()
        nodes = len(graph.nodes)
        graph.eliminate_dead_code()
        assert len(graph.nodes) == nodes

    def uuid(self) -> bytes:
        return os.urandom(8)


def compiled(function: Callable[..., Any], *inputs: torch.Tensor) -> tuple[list[str], Any]:
    """What Inductor's code for `function` gives, the pass in it, and what that has fused; any number of rows."""
    seen = Passed()
    torch._dynamo.reset()
    with torch.no_grad(), inductor_config.patch(post_grad_custom_post_pass=seen):
        for rows in inputs:
            if rows.dim() == 2:
                torch._dynamo.mark_dynamic(rows, 0)
        return seen.fused, torch.compile(function, fullgraph=True)(*inputs)


@pytest.mark.parametrize("activation", GATES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "fp16", "fp32"])
def test_an_activation_as_inductor_decomposes_it(dtype: torch.dtype, activation: str) -> None:
    x = torch.cat([rows(9, dtype), rows(9, dtype).flip(0)], dim=1)
    fused, found = compiled(lambda x: QUANT(gated(x, activation)), x)
    assert fused == [f"{activation}-and-mul + quantization"]
    assert bits(found) == bits(ops.act_and_mul_quant_fp8(x, activation))


def test_activations_and_norms_of_a_layer_are_fused_together() -> None:
    def mlp(x: torch.Tensor, norm: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, ...]:
        normed, total = ADD_NORM(x, residual, norm, EPS)
        gate_up = ops.ptpc_linear(normed, *both)
        return ops.ptpc_linear(gated(gate_up), *MODEL[2][1:]), total

    both = ops.per_token_quant_fp8(torch.randn(2 * K, K, generator=torch.Generator().manual_seed(8)))
    fused, _ = compiled(mlp, rows(9), MODEL[0].norm, rows(9).flip(0))
    assert fused == [ALONE, GATED]


OTHERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "read by others": lambda x: (*QUANT(y := gated(x)), y + 1),
    "halves exchanged": lambda x: QUANT(functional.silu(x[:, K:]) * x[:, :K]),
    "two tensors": lambda x: QUANT(functional.silu(x[:, :K]) * (x + 1)[:, K:]),
    "another activation": lambda x: QUANT(functional.relu(x[:, :K]) * x[:, K:]),
    "clamped": lambda x: QUANT(functional.silu(x[:, :K].clamp(max=7)) * x[:, K:]),
    "a part of it": lambda x: QUANT(functional.silu(x[:, : K // 2]) * x[:, K // 2 : K]),
    "every other one": lambda x: QUANT(functional.silu(x[:, ::2]) * x[:, 1::2]),
    "nothing to activate": lambda x: QUANT(x),
}


@pytest.mark.parametrize("function", OTHERS.values(), ids=OTHERS)
def test_what_is_no_activation_that_we_have_stays(function: Callable[[torch.Tensor], Any]) -> None:
    x = torch.cat([rows(9), rows(9).flip(0)], dim=1)
    fused, found = compiled(function, x)
    assert fused == []
    torch.testing.assert_close(found[0].float() * found[1], (y := function(x))[0].float() * y[1], rtol=2**-3, atol=1e-2)


@pytest.fixture
def group() -> Iterator[str]:
    """Of one rank, so that its all-reduce changes nothing."""
    connect("tp:0", None, torch.device("cpu"))
    yield "tp:0"
    disconnect("tp:0")


def parallel_layer(x: torch.Tensor, a: Weights, b: Weights, c: Weights) -> tuple[torch.Tensor, ...]:
    """`layer` as one rank of several sees it: after an embedding, with sums to make; the last norm is not quantized."""
    x = REDUCE(x, "tp:0")
    y = a.linear(NORM(x, a.norm, EPS))
    y, x = ADD_NORM(REDUCE(y, group_name="tp:0"), x, b.norm, EPS)
    y, x = ADD_NORM(REDUCE(b.linear(y), "tp:0"), x, c.norm, EPS)
    return y, x


@pytest.mark.parametrize("function", [layer, parallel_layer], ids=lambda function: function.__name__)
@pytest.mark.parametrize("mode", ["fake", "symbolic"])
def test_inductor_learns_what_the_new_nodes_give(mode: str, function: Callable[..., Any], group: str) -> None:
    module = trace(function, *given(rows(6)), mode=mode)
    assert len(fuse(module, group)) == 3

    class Compare(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            result, expected = super().run_node(n), n.meta.get("val")
            if isinstance(result, torch.Tensor) and n.op == "call_function":
                assert result.dtype == expected.dtype, n
                assert tuple(result.shape) == tuple(map(int, expected.shape)), n
                assert result.stride() == tuple(map(int, expected.stride())), n
            return result

    Compare(module).run(*given(rows(6)))


def test_several_linear_layers_share_one_quantization() -> None:
    def function(x: torch.Tensor, a: Weights, b: Weights, c: Weights) -> tuple[torch.Tensor, ...]:
        y = NORM(x, a.norm, EPS)
        return a.linear(y), b.linear(y), c.linear(y)

    inputs = given(rows(4))
    module = trace(function, *inputs)
    apart = copy.deepcopy(module)
    assert calls(module)[QUANT] == 3
    assert fuse(module) == [ALONE]
    assert calls(module) == {FUSED: 1}
    assert bits(module(*inputs)) == bits(WithOurRounding(apart).run(*inputs))


def read_by_a_router(x: torch.Tensor, a: Weights) -> tuple[torch.Tensor, ...]:
    y, x = ADD_NORM(x, x, a.norm, EPS)
    return y.sum(-1), a.linear(y), x


def returned(x: torch.Tensor, a: Weights) -> tuple[torch.Tensor, ...]:
    y = NORM(x, a.norm, EPS)
    return a.linear(y), y, a.linear(y)


@pytest.mark.parametrize("function", [read_by_a_router, returned], ids=lambda function: function.__name__)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_others_read_the_norm_too(function: Callable[..., Any], dtype: torch.dtype) -> None:
    inputs = given(rows(7, dtype), MODEL[:1])
    module = trace(function, *inputs)
    apart = copy.deepcopy(module)
    assert fuse(module) == [ALONE]
    assert calls(module) == {REDUCE_FUSED: 1}
    assert bits(module(*inputs)) == bits(WithOurRounding(apart).run(*inputs))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mode", ["fake", "symbolic"])
def test_all_reduces_are_fused_with_the_norms_that_follow(dtype: torch.dtype, mode: str, group: str) -> None:
    module = trace(parallel_layer, *given(rows(5, dtype)), mode=mode)
    apart = copy.deepcopy(module)
    assert fuse(module, group) == [TOGETHER, TOGETHER, "all-reduce + RMSNorm"]
    assert calls(module) == {REDUCE_FUSED: 3}
    for count in (5,) if mode == "fake" else (1, 2, 33):
        inputs = given(rows(count, dtype))
        assert bits(module(*inputs)) == bits(WithOurRounding(apart).run(*inputs))


def test_all_reduces_of_groups_that_are_not_connected_stay() -> None:
    for group in (None, "tp:1"):
        module = trace(parallel_layer, *given(rows(5)))
        assert fuse(module, group) == [ALONE] * 2
        assert calls(module) == {REDUCE: 3, FUSED: 1, ADD_FUSED: 1, ADD_NORM: 1}


def test_an_all_reduce_that_others_read_stays(group: str) -> None:
    def function(x: torch.Tensor, a: Weights, b: Weights) -> tuple[torch.Tensor, ...]:
        early, late = REDUCE(x, group), REDUCE(x + 1, group)
        before = early * 2
        y = NORM(early, a.norm, EPS)
        z, total = ADD_NORM(late, x, b.norm, EPS)
        return before, a.linear(y), b.linear(z), total, late

    module = trace(function, *given(rows(5), MODEL[:2]))
    assert fuse(module, group) == [ALONE] * 2
    assert calls(module) == {REDUCE: 2, FUSED: 1, ADD_FUSED: 1}


def whose_sum_alone_is_read(x: torch.Tensor, a: Weights) -> torch.Tensor:
    return ADD_NORM(REDUCE(x + 1, "tp:0"), x, a.norm, EPS)[1]


def of_a_sum_with_itself(x: torch.Tensor, a: Weights) -> tuple[torch.Tensor, torch.Tensor]:
    total = REDUCE(x + 1, "tp:0")
    return ADD_NORM(total, total, a.norm, EPS)


@pytest.mark.parametrize("function", [whose_sum_alone_is_read, of_a_sum_with_itself], ids=lambda each: each.__name__)
def test_norms_that_stay_behind_their_all_reduce(function: Callable[..., Any], group: str) -> None:
    module = trace(function, *given(rows(5), MODEL[:1]))
    assert fuse(module, group) == []
    assert calls(module) == {REDUCE: 1, ADD_NORM: 1}


def of_a_part_of_the_row(x: torch.Tensor, a: Weights) -> torch.Tensor:
    return a.linear(NORM(x, a.norm, EPS, K // 2))


def without_a_weight(x: torch.Tensor, a: Weights) -> torch.Tensor:
    return a.linear(NORM(x, None, EPS))


def with_a_residual_of_another_dtype(x: torch.Tensor, a: Weights) -> torch.Tensor:
    return a.linear(ADD_NORM(x, x.float(), a.norm, EPS)[0])


def with_one_residual_for_all_rows(x: torch.Tensor, a: Weights) -> torch.Tensor:
    return a.linear(ADD_NORM(x, x[:1], a.norm, EPS)[0])


def with_one_weight_for_all_columns(x: torch.Tensor, a: Weights) -> torch.Tensor:
    return a.linear(NORM(x, a.norm[:1], EPS))


def of_columns_that_are_no_blocks(x: torch.Tensor, a: Weights) -> Any:
    normed = NORM(x[:, 8:], a.norm[8:], EPS)
    return torch.ops.llm_quant_rocm.per_token_quant_fp8(normed), normed + 1


def without_quantization(x: torch.Tensor, a: Weights) -> torch.Tensor:
    return NORM(x, a.norm, EPS) + 1


@pytest.mark.parametrize(
    "function",
    [
        of_a_part_of_the_row,
        without_a_weight,
        with_a_residual_of_another_dtype,
        with_one_residual_for_all_rows,
        with_one_weight_for_all_columns,
        of_columns_that_are_no_blocks,
        without_quantization,
    ],
    ids=lambda function: function.__name__,
)
def test_what_is_left_as_it_is(function: Callable[..., Any]) -> None:
    module = trace(function, *given(rows(4), MODEL[:1]))
    before = str(module.graph)
    assert fuse(module) == []
    assert str(module.graph) == before


@pytest.mark.parametrize("custom_ops", ["none", "all"])
def test_vllms_norms_on_rocm(custom_ops: str, group: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They stay what the pass looks for, also where AITER is to compute them: vLLM chooses that after the pass."""
    monkeypatch.setenv("VLLM_ROCM_USE_AITER", "1")
    monkeypatch.setattr(custom_op, "current_platform", SimpleNamespace(is_rocm=lambda: True))
    config = VllmConfig(compilation_config=CompilationConfig(custom_ops=[custom_ops]))
    with set_current_vllm_config(config):
        layer = RMSNorm(K, EPS, dtype=torch.bfloat16)

    def norm(weights: Weights, *x: torch.Tensor) -> Any:
        return functional_call(layer, {"weight": weights.norm}, x)

    def function(x: torch.Tensor, a: Weights, b: Weights) -> tuple[torch.Tensor, ...]:
        y, x = norm(b, REDUCE(a.linear(norm(a, x)), group), x)
        return b.linear(y), x

    module = trace(function, *given(rows(4), MODEL[:2]))
    with pass_context(Range(1, 8)):
        VllmIRInplaceFunctionalizationPass(config)(module.graph)
    assert fuse(module, group) == [ALONE, TOGETHER]


# How vLLM gets the pass.


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.LogCaptureFixture]:
    logger = logging.getLogger("llm_quant_rocm")
    monkeypatch.setattr(logger, "propagate", False)
    logger.addHandler(caplog.handler)
    caplog.set_level(logging.INFO, logger.name)
    fusion._log.cache_clear()
    yield caplog
    logger.removeHandler(caplog.handler)


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> VllmConfig:
    """One that compiles, as on a GPU; the CPU's way is another one."""
    monkeypatch.setattr(reduce_norm, "connect", lambda vllm_config, obstacle=None: None)
    config = VllmConfig()
    config.compilation_config = CompilationConfig(mode=CompilationMode.VLLM_COMPILE, backend="inductor")
    return config


def hook(config: VllmConfig) -> Any:
    return config.compilation_config.inductor_compile_config.get(HOOK)


def test_the_pass_is_a_part_of_the_key_of_vllms_cache(config: VllmConfig, log: pytest.LogCaptureFixture) -> None:
    without = config.compute_hash()
    fusion.enable(config)
    assert config.compute_hash() != without
    fusion.enable(config)
    assert [record.getMessage() for record in log.records] == [f"norm fusion: on; {SWITCH}=0 switches it off"]


def test_a_group_is_a_part_of_the_key_too(
    config: VllmConfig, log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    fusion.enable(config)
    alone = config.compute_hash()
    del config.compilation_config.inductor_compile_config[HOOK]
    monkeypatch.setattr(reduce_norm, "connect", lambda vllm_config, obstacle: "tp:0")
    config.compilation_config.pass_config.fuse_allreduce_rms = True
    fusion.enable(config)
    assert config.compute_hash() != alone
    assert hook(config).callable == NormQuantFusion("tp:0")
    assert config.compilation_config.pass_config.fuse_allreduce_rms is False
    assert "takes the place of vLLM's fuse_allreduce_rms" in log.text


@pytest.mark.parametrize("module", [fusion, fusion.gated, fusion.graphs], ids=["fusion", "gated", "graphs"])
def test_another_text_is_another_pass(module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = NormQuantFusion().uuid()
    (tmp_path / "text.py").write_text(Path(module.__file__).read_text() + "\n")
    monkeypatch.setattr(module, "__file__", str(tmp_path / "text.py"))
    assert NormQuantFusion().uuid() != before


@pytest.mark.parametrize("again", [lambda x: pickle.loads(pickle.dumps(x)), copy.deepcopy], ids=["pickle", "deepcopy"])
def test_the_pass_survives(again: Callable[[Any], Any], config: VllmConfig) -> None:
    fusion.enable(config)
    revived = again(hook(config))
    assert revived.uuid() == hook(config).uuid()
    module = trace(layer, *given(rows(2)))
    revived(module.graph)
    assert calls(module) == {FUSED: 1, ADD_FUSED: 2}


def _switched_off(config: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv(SWITCH, "0")
    return f"by {SWITCH}=0"


def _eager(config: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> str:
    config.compilation_config.mode = CompilationMode.NONE
    return "vLLM does not compile here"


def _another_pass(config: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> str:
    config.compilation_config.inductor_compile_config[HOOK] = "theirs"
    return "is another pass"


def _batch_invariant(config: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    return "by VLLM_BATCH_INVARIANT=1"


def _a_norm_gone(config: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.delattr(ir, "fused_add_rms_norm")
    return "no attribute 'fused_add_rms_norm'"


def _other_parameters(config: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(ir, "rms_norm", ir.fused_add_rms_norm)
    return "this vLLM's rms_norm has other parameters"


def _hook_gone(config: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.delattr("vllm.compilation.passes.inductor_pass.CallableInductorPass")
    return "cannot import name 'CallableInductorPass'"


@pytest.mark.parametrize(
    "obstacle",
    [_switched_off, _batch_invariant, _eager, _another_pass, _a_norm_gone, _other_parameters, _hook_gone],
    ids=lambda obstacle: obstacle.__name__,
)
def test_what_stands_in_the_way_gets_one_line(
    obstacle: Callable[..., str], config: VllmConfig, log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    reason = obstacle(config, monkeypatch)
    there = hook(config)
    for _ in range(2):
        fusion.enable(config)
    assert hook(config) is there
    assert len(log.records) == 1
    assert log.records[0].getMessage().startswith("norm fusion: off")
    assert reason in log.text


def test_where_it_is_off_the_other_ranks_are_told(config: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """On another host it may be on, and they wait for this one before they fuse an all-reduce."""
    told: list[str | None] = []
    monkeypatch.setattr(reduce_norm, "connect", lambda vllm_config, obstacle: told.append(obstacle))
    monkeypatch.setenv(SWITCH, "0")
    fusion.enable(config)
    monkeypatch.setenv(SWITCH, "1")
    fusion.enable(config)
    assert told == [f"{SWITCH}=0 on one of its ranks", None]


def test_the_switch_is_0_or_1(config: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "off")
    with pytest.raises(ValueError, match=f"{SWITCH} is 0 or 1, not 'off'"):
        fusion.enable(config)


def test_places_are_counted(log: pytest.LogCaptureFixture, group: str) -> None:
    for _ in range(2):
        fuse(trace(lambda x, *model: (*parallel_layer(x, *model), *returned(x, model[0])), *given(rows(4))), group)
    assert [record.getMessage() for record in log.records] == [
        f"norm fusion: in a compiled graph became one kernel each: 2 x {TOGETHER}, 1 x all-reduce + RMSNorm, "
        f"1 x {ALONE} (layers alike share a graph)"
    ]


# Which groups are served.


class Group:
    """As much of vLLM's GroupCoordinator as is read."""

    def __init__(self, world_size: int = 2, device: str = "cpu", transport: Any = None) -> None:
        self.world_size, self.device, self.rank_in_group = world_size, torch.device(device, 0), 0
        self.unique_name, self.cpu_group, self.device_group = "tp:0", None, None
        self.device_communicator = SimpleNamespace(quantized=SimpleNamespace(transport=transport))


@pytest.fixture
def connections(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What `comm.connect` is given for memory, call by call; it gives Ranks with the obstacle that the test sets. One
    host, and one rank that speaks for all."""
    given: list[Any] = []

    def connect(name: str, group: Any, device: Any, codec: Any, memory: Any, *others: Any) -> Ranks:
        given.append(memory)
        ranks = Ranks(2, predicted(2), memory=memory, obstacle=getattr(connect, "obstacle", None))
        monkeypatch.setitem(norm_ranks.reduce_norm_quant._NAMED, name, ranks)
        return ranks

    monkeypatch.setattr(norm_ranks.reduce_norm_quant, "connect", connect)
    monkeypatch.setattr(norm_ranks, "hosts_of", lambda group, same_host: [[0, 1]])
    monkeypatch.setattr(norm_ranks, "first_refusal", lambda refusal, group: refusal)
    monkeypatch.setattr(norm_ranks, "unreachable", lambda *facts: None)
    monkeypatch.setattr(norm_ranks, "detect", lambda device: nvidia(9, 0))
    monkeypatch.setattr(norm_ranks.dist, "all_gather_object", as_of_all)
    monkeypatch.setattr(norm_ranks.dist, "get_rank", lambda group: 0)
    return given


def as_of_all(everyone: list[Any], fact: Any, group: Any) -> None:
    everyone[:] = [fact] * len(everyone)


def connect_as_vllm(group: Group, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> str | None:
    monkeypatch.setattr(reduce_norm, "get_tp_group", lambda: group)
    monkeypatch.setattr(norm_ranks.dist, "get_world_size", lambda _: group.world_size)
    parallel = SimpleNamespace(use_ubatching=settings.get("use_ubatching", False))
    model = SimpleNamespace(enable_sleep_mode=settings.get("enable_sleep_mode", False))
    monkeypatch.setattr(reduce_norm.envs, "VLLM_BATCH_INVARIANT", settings.get("batch_invariant", False), raising=False)
    obstacle = "it is switched off" if settings.get("switched_off") else None
    return reduce_norm.connect(SimpleNamespace(parallel_config=parallel, model_config=model), obstacle)


def test_a_group_is_connected_once_and_its_successor_anew(
    connections: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = Group(), Group()
    assert [connect_as_vllm(group, monkeypatch) for group in (first, first, second)] == ["tp:0"] * 3
    assert connections == [None, None]


def test_one_rank_needs_no_group(
    connections: list[Any], log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert connect_as_vllm(Group(1), monkeypatch) is None
    assert not connections
    assert not log.records


def test_the_quantized_all_reduces_memory_is_shared(connections: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norm_ranks, "Watch", None)  # its own communicator watches it
    memory = SimpleNamespace(mailbox=...)
    assert connect_as_vllm(Group(2, "cuda", memory), monkeypatch) == "tp:0"
    assert connect_as_vllm(Group(2, "cpu", object()), monkeypatch) == "tp:0"
    asleep = {"enable_sleep_mode": True}  # that memory is there before the model is built
    assert connect_as_vllm(Group(2, "cuda", memory), monkeypatch, **asleep) == "tp:0"
    assert connections == [memory, None, memory]


@pytest.mark.parametrize(
    ("group", "change", "reason"),
    [
        (Group(9), {}, "it has 9 ranks, and up to 8 are served"),
        (Group(2), {"switched_off": True}, "it is switched off"),
        (Group(2), {"use_ubatching": True}, "halves of a batch run at once"),
        (Group(2), {"batch_invariant": True}, "VLLM_BATCH_INVARIANT is set"),
        (Group(2), {"enable_sleep_mode": True}, "--enable-sleep-mode takes away what is allocated"),
        (Group(2), {"hosts_of": lambda group, same_host: [[0], [1]]}, "its ranks are on several hosts"),
        (Group(2, "cuda"), {"unreachable": lambda *facts: "GPU 1 is far away"}, "GPU 1 is far away"),
        (Group(2, "cuda"), {"obstacle": "no memory"}, "no memory"),
    ],
    ids=["ranks", "switch", "ubatches", "batch-invariant", "sleep", "hosts", "peers", "memory"],
)
def test_groups_left_to_vllm(
    group: Group, change: dict[str, Any], reason: str, connections: list[Any], log: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    if "obstacle" in change:
        norm_ranks.reduce_norm_quant.connect.obstacle = change["obstacle"]
    for name in {"hosts_of", "unreachable"} & change.keys():
        monkeypatch.setattr(norm_ranks, name, change[name])
    settings = {name: value for name, value in change.items() if isinstance(value, bool)}
    assert [connect_as_vllm(group, monkeypatch, **settings) for _ in range(2)] == [None, None]
    assert len(log.records) == 1
    assert reason in log.text


# A real engine: two layers, so three graphs, of 1, 2 and 1 norms before a quantization.


@pytest.fixture(scope="module")
def checkpoint(folder: Path) -> Path:
    """Norm weights other than 1."""
    return dense_checkpoint_of(folder / "fusion")


@pytest.fixture(scope="module")
def engines(folder: Path, checkpoint: Path) -> dict[str, Result]:
    """An engine with the pass, another one that finds its graphs in the cache, and one without the pass."""
    return {
        name: run(
            folder / f"fusion-{name}",
            checkpoint,
            {"COMPILE_AS_ON_A_GPU": "1", "VLLM_CACHE_ROOT": str(folder / "fusion-cache"), SWITCH: switch},
            quantization="ptpc_fp8",
            enforce_eager=False,
        )
        for name, switch in (("on", "1"), ("cached", "1"), ("off", "0"))
    }


def test_an_engine_fuses(engines: dict[str, Result]) -> None:
    result = engines["on"]
    assert result.returncode == 0, result.log[-6000:]
    for places in (f"1 x {ALONE} (layers", f"2 x {ALONE}, 1 x {GATED} (layers"):
        assert f"one kernel each: {places}" in result.log


def test_an_engine_finds_fused_graphs_in_the_cache(engines: dict[str, Result]) -> None:
    result = engines["cached"]
    assert result.returncode == 0, result.log[-6000:]
    assert "norm fusion: on" in result.log
    assert "in a compiled graph" not in result.log
    assert torch.equal(result.logprobs, engines["on"].logprobs)


def test_an_engine_without_the_pass_compiles_anew_and_says_nearly_the_same(engines: dict[str, Result]) -> None:
    result = engines["off"]
    assert result.returncode == 0, result.log[-6000:]
    assert f"norm fusion: off, by {SWITCH}=0" in result.log
    assert "saved AOT compiled function" in result.log
    difference = (result.logprobs - engines["on"].logprobs).abs()
    print(f"mean {difference.mean():.4f} largest {difference.max():.4f}")
    assert 0 < difference.mean() < 0.2


def test_two_ranks_fuse_their_all_reduces(folder: Path, checkpoint: Path, engines: dict[str, Result]) -> None:
    """A codec makes vLLM's all-reduces on a CPU operators, which they always are on GPUs; FP is exact."""
    variables = {"COMPILE_AS_ON_A_GPU": "1", "VLLM_CACHE_ROOT": str(folder / "fusion-tp2-cache")}
    # Ranks share Inductor's caches: what the other rank compiled first, the one that logs would take from there unsaid.
    variables |= {f"TORCHINDUCTOR_{cache}_CACHE": "0" for cache in ("FX_GRAPH", "AUTOGRAD")}
    variables["VLLM_DISABLE_COMPILE_CACHE"] = "1"  # which would save what is in those
    variables["VLLM_ROCM_QUICK_REDUCE_QUANTIZATION"] = "FP"
    settings = {"quantization": "ptpc_fp8", "enforce_eager": False, "tensor_parallel_size": 2}
    result = run(folder / "fusion-tp2", checkpoint, variables, **settings)
    assert result.returncode == 0, result.log[-6000:]
    last = f"1 x {TOGETHER}, 1 x {GATED}, 1 x all-reduce + RMSNorm ("
    for places in (f"1 x {TOGETHER} (", f"2 x {TOGETHER}, 1 x {GATED} (", last):
        assert result.log.count(f"one kernel each: {places}") == 1
    difference = (result.logprobs - engines["on"].logprobs).abs()
    print(f"mean {difference.mean():.4f} largest {difference.max():.4f}")
    assert difference.mean() < 0.2

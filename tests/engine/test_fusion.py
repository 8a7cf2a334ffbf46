# SPDX-License-Identifier: Apache-2.0
"""The fusion pass on graphs as vLLM's compilation makes them, and in a vLLM that compiles on the CPU as on a GPU."""

import copy
import logging
import pickle
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from checkpoints import dense as dense_checkpoint_of
from engines import Result, run
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from vllm.config import CompilationConfig, CompilationMode, VllmConfig
from vllm.ir import ops as ir

from llm_quant_rocm import ops
from llm_quant_rocm.reference.rms_norm_quant import rms_norm
from llm_quant_rocm_vllm import fusion
from llm_quant_rocm_vllm.fusion import HOOK, SWITCH, NormQuantFusion

K = 96
EPS = 1e-5
NORM, ADD_NORM = torch.ops.vllm_ir.rms_norm.default, torch.ops.vllm_ir.fused_add_rms_norm.default
QUANT = torch.ops.llm_quant_rocm.per_token_quant_fp8.default
FUSED = torch.ops.llm_quant_rocm.rms_norm_quant_fp8.default
ADD_FUSED = torch.ops.llm_quant_rocm.add_rms_norm_quant_fp8.default


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


def fuse(module: fx.GraphModule) -> int:
    fused = NormQuantFusion()(module.graph)
    module.graph.lint()
    module.recompile()
    return fused


def calls(module: fx.GraphModule) -> Counter:
    """How often each operator of the pass is called."""
    known = (NORM, ADD_NORM, QUANT, FUSED, ADD_FUSED)
    return Counter(node.target for node in module.graph.nodes if node.target in known)


class WithOurRounding(fx.Interpreter):
    """Runs a graph with the norms of our reference instead of vLLM's, which keep more bits of a sum."""

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target is NORM:
            return rms_norm(args[0], args[1], args[2], None)[0]
        if target is ADD_NORM:
            return rms_norm(args[0], args[2], args[3], args[1])
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
    assert fuse(fused) == 3
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
        assert fuse(fused) == 1
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
    assert fuse(module) == 3
    assert len(environment.guards) == guards
    for count in (1, 2, 33):
        inputs = given(rows(count))
        assert bits(module(*inputs)) == bits(WithOurRounding(apart).run(*inputs))


@pytest.mark.parametrize("mode", ["fake", "symbolic"])
def test_inductor_learns_what_the_new_nodes_give(mode: str) -> None:
    module = trace(layer, *given(rows(6)), mode=mode)
    fuse(module)

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
    assert fuse(module) == 1
    assert calls(module) == {FUSED: 1}
    assert bits(module(*inputs)) == bits(WithOurRounding(apart).run(*inputs))


def read_by_a_router(x: torch.Tensor, a: Weights) -> tuple[torch.Tensor, ...]:
    y, x = ADD_NORM(x, x, a.norm, EPS)
    return a.linear(y), y.sum(-1), x


def returned(x: torch.Tensor, a: Weights) -> tuple[torch.Tensor, ...]:
    y = NORM(x, a.norm, EPS)
    return a.linear(y), y


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


def without_quantization(x: torch.Tensor, a: Weights) -> torch.Tensor:
    return NORM(x, a.norm, EPS) + 1


@pytest.mark.parametrize(
    "function",
    [
        read_by_a_router,
        returned,
        of_a_part_of_the_row,
        without_a_weight,
        with_a_residual_of_another_dtype,
        with_one_residual_for_all_rows,
        with_one_weight_for_all_columns,
        without_quantization,
    ],
    ids=lambda function: function.__name__,
)
def test_what_is_left_as_it_is(function: Callable[..., Any]) -> None:
    module = trace(function, *given(rows(4), MODEL[:1]))
    before = str(module.graph)
    assert fuse(module) == 0
    assert str(module.graph) == before


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
def config() -> VllmConfig:
    """One that compiles, as on a GPU; the CPU's way is another one."""
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


def test_another_text_is_another_pass(config: VllmConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = NormQuantFusion().uuid()
    (tmp_path / "fusion.py").write_text(Path(fusion.__file__).read_text() + "\n")
    monkeypatch.setattr(fusion, "__file__", str(tmp_path / "fusion.py"))
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
    [_switched_off, _eager, _another_pass, _a_norm_gone, _other_parameters, _hook_gone],
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


def test_the_switch_is_0_or_1(config: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "off")
    with pytest.raises(ValueError, match=f"{SWITCH} is 0 or 1, not 'off'"):
        fusion.enable(config)


def test_left_places_are_counted(log: pytest.LogCaptureFixture) -> None:
    fuse(trace(lambda x, *model: (*layer(x, *model), *returned(x, model[0])), *given(rows(4))))
    assert "one kernel in 3 places of a compiled graph, not in 1, where others read" in log.text


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
    for places in (1, 2):
        assert f"one kernel in {places} places of a compiled graph (layers" in result.log


def test_an_engine_finds_fused_graphs_in_the_cache(engines: dict[str, Result]) -> None:
    result = engines["cached"]
    assert result.returncode == 0, result.log[-6000:]
    assert "norm fusion: on" in result.log
    assert "places of a compiled graph" not in result.log
    assert torch.equal(result.logprobs, engines["on"].logprobs)


def test_an_engine_without_the_pass_compiles_anew_and_says_nearly_the_same(engines: dict[str, Result]) -> None:
    result = engines["off"]
    assert result.returncode == 0, result.log[-6000:]
    assert f"norm fusion: off, by {SWITCH}=0" in result.log
    assert "saved AOT compiled function" in result.log
    difference = (result.logprobs - engines["on"].logprobs).abs()
    print(f"mean {difference.mean():.4f} largest {difference.max():.4f}")
    assert 0 < difference.mean() < 0.2

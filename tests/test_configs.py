# SPDX-License-Identifier: Apache-2.0
"""What configs/ ships is what serves by default, and what benchmarks/results measured to be fast."""

import json
import re
from collections.abc import Iterator
from importlib import import_module, resources
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from llm_quant_rocm import hardware, tuning
from llm_quant_rocm.comm.policy import Algorithm, Choice, Policy, Settings
from llm_quant_rocm.comm.reduce_norm_quant import Plan
from llm_quant_rocm.formats.wire import CODECS
from llm_quant_rocm.tune.shapes import WELL_KNOWN, WELL_KNOWN_EXPERTS

ROOT = Path(__file__).parent.parent
DOCS, RESULTS = ROOT / "docs", ROOT / "benchmarks" / "results"
OTHERS = ("NCCL", "symm one-shot", "symm two-shot")
SLOWER = 1.03  # than the fastest of the others may be what serves, at most
HOPPER = hardware.nvidia(9, 0)
needs_triton = pytest.mark.skipif(not find_spec("triton"), reason="needs Triton")


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing of the user's counts."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cached = [tuning.shapes, tuning.lookup]
    operators = {"nvfp4_gemm": ("_config", "_fp8_config"), "nvfp4_moe": ("_config",), "ptpc_moe": ("_config",)}
    for name, functions in operators.items():
        cached += [getattr(import_module(f"llm_quant_rocm.ops.{name}"), function) for function in functions]
    for function in cached:
        function.cache_clear()
    yield
    for function in cached:
        function.cache_clear()


def results(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text())


def shipped(operator: str) -> dict[str, Any]:
    return json.loads((resources.files("llm_quant_rocm") / "configs" / operator / "sm_90.json").read_text())


def crossovers(operator: str) -> list[tuple[int, str]]:
    """Numbers of ranks and codecs."""
    return [(entry["world_size"], entry["codec"]) for entry in shipped(operator)["crossovers"]]


# --- the all-reduce


def time_of(us: dict[str, float], choice: Choice) -> float:
    """Of the row of a table; the engine's all-reduce is taken to be the fastest of all that are not ours."""
    if choice.codec is None:
        return min(us[name] for name in OTHERS if name in us)
    return us[choice.codec.name + " one-shot" * (choice.algorithm is Algorithm.ONE_SHOT)]


@pytest.mark.parametrize(("world", "codec"), crossovers("quick_reduce"), ids=lambda value: str(value))
def test_the_policy_is_never_slower_than_the_others(world: int, codec: str) -> None:
    """At any size of the table, by more than 3%; and as fast as the fastest of its own, by as much."""
    policy = Policy(Settings(CODECS[codec]), world, "sm_90")
    assert policy.measured and "configs" in policy.source and "quick_reduce" in policy.source
    table = results(f"quick_reduce_sm_90_tp{world}")["rows"]
    assert (table[0]["bytes"], table[-1]["bytes"]) == (4 << 10, 1 << 30)
    for row in table:
        us, choice = row["us"], policy.choose(row["bytes"], torch.bfloat16)
        ours = [time for name, time in us.items() if name.removesuffix(" one-shot") in ("FP", codec)]
        fastest = min(*ours, time_of(us, Choice(Algorithm.ENGINE)))
        assert time_of(us, choice) <= SLOWER * fastest, (row["bytes"], choice)


@pytest.mark.parametrize("codec", ["FP4", "INT4"])
@pytest.mark.parametrize(("world", "first", "at_16_mib", "at_1_gib"), [(2, 0, 2.7, 3.06), (4, 32768, 2.3, 3.0)])
def test_the_all_reduce(world: int, first: int, at_16_mib: float, at_1_gib: float, codec: str) -> None:
    """What README and docs say of it, in times NCCL's speed, and from which size on ours serves."""
    policy = Policy(Settings(CODECS[codec]), world, "sm_90")
    ratios = {}
    for row in results(f"quick_reduce_sm_90_tp{world}")["rows"]:
        choice = policy.choose(row["bytes"], torch.bfloat16)
        assert choice.algorithm is not Algorithm.ENGINE or row["bytes"] < first
        ratios[row["bytes"]] = row["us"]["NCCL"] / time_of(row["us"], choice)
    assert ratios[1 << 30] > at_1_gib and ratios[16 << 20] > at_16_mib


def test_from_which_size_on_four_ranks_are_served() -> None:
    """What docs/quick_reduce.md says."""
    sentence = r"Between four, FP4 serves from (\d+) KiB on and INT4 from (\d+) KiB on"
    found = re.search(sentence, (DOCS / "quick_reduce.md").read_text())
    assert found is not None
    for codec, kib in zip(("FP4", "INT4"), found.groups(), strict=True):
        steps = Policy(Settings(CODECS[codec]), 4, "sm_90").steps(torch.bfloat16)
        assert next(start for start, choice in steps if choice.codec is not None) == int(kib) << 10, codec


# --- all-reduce, residual, norm and quantization


# By ranks, what docs/fusion.md says of up to 64 rows, of more, and of 8192.
LEAST = {2: (1.7, 1.18, 1.329), 4: (1.65, 1.09, 1.22)}


@pytest.mark.parametrize(("world", "codec"), crossovers("reduce_norm_quant"), ids=lambda value: str(value))
def test_the_plan_is_faster_than_separate_operators(world: int, codec: str) -> None:
    plan = Plan.of(world, CODECS[codec], "sm_90", engine=True)
    assert "configs" in plan.source and "reduce_norm_quant" in plan.source
    for row in results(f"reduce_norm_quant_tp{world}_sm_90")["rows"]:
        us, choice = row["us"], plan.choose(2 * row["rows"] * row["columns"])
        ours = f"{choice.algorithm}{'' if choice.codec is CODECS['FP'] else f'_{codec}'}" if choice.codec else None
        ratio = us["separate"] / us[ours or "two_kernels"]
        few, some, many = LEAST[world]
        least = few if row["rows"] <= 64 else many if row["rows"] == 8192 else some
        assert ratio >= least, (row["rows"], row["columns"], ratio)


# --- launch configurations


@needs_triton
def test_fp8_at_prefill_is_what_was_measured() -> None:
    """Small products stay exact, and so do Llama's up to 96 rows; Llama-3-70B's gain from 128 rows."""
    from llm_quant_rocm.kernels import nvfp4_hopper

    llama = {shape for name, shape in WELL_KNOWN.items() if "llama" in name}
    module, shapes = import_module("llm_quant_rocm.ops.nvfp4_gemm"), tuning.shapes("nvfp4_gemm_fp8", "sm_90")
    assert {shape.weight for shape in shapes} == set(WELL_KNOWN.values())
    for shape in shapes:
        config = nvfp4_hopper.fp8_config_of(shape.config) if shape.backend == "triton" else None
        assert module._fp8_config(HOPPER, shape.rows, *shape.weight) == config
        assert shape.backend == "triton" or shape.weight not in llama or shape.rows <= 128
    assert module._fp8_config(HOPPER, 512, *WELL_KNOWN["qwen3-o"]) is None
    for weight in llama:
        assert all(module._fp8_config(HOPPER, m, *weight) is None for m in (65, 96))
        assert module._fp8_config(HOPPER, 128, *weight) is not None
    # What won with 512 rows took longer than the exact product with 300.
    assert module._fp8_config(HOPPER, 512, *WELL_KNOWN["qwen3-qkv"]) is not None
    assert module._fp8_config(HOPPER, 300, *WELL_KNOWN["qwen3-qkv"]) is None


@needs_triton
@pytest.mark.parametrize("operator", ["nvfp4_moe", "ptpc_moe"])
def test_experts_take_what_was_measured(operator: str) -> None:
    from llm_quant_rocm.kernels import nvfp4_hopper, ptpc_moe_hopper
    from llm_quant_rocm.kernels.pair_config import PairConfig

    config_of = {
        "nvfp4_moe": lambda fields: PairConfig.of(fields, nvfp4_hopper.config_of),
        "ptpc_moe": ptpc_moe_hopper.config_of,
    }[operator]
    module, shapes = import_module(f"llm_quant_rocm.ops.{operator}"), tuning.shapes(operator, "sm_90")
    known = {(experts, hidden, inner) for experts, _, hidden, inner in WELL_KNOWN_EXPERTS.values()}
    assert {shape.weight for shape in shapes} == known
    for shape in shapes:
        assert module._config(HOPPER, shape.slots, *shape.weight) == config_of(shape.config)


@needs_triton
def test_the_schedule_of_experts_takes_as_many_launches_as_were_faster() -> None:
    from benchmarks.routing import SHAPES
    from llm_quant_rocm.kernels.ptpc_moe import default_config
    from llm_quant_rocm.kernels.routing import MANY_READS, max_tiles

    for row in results("routing_sm_90")["rows"]:
        us = row["us"]
        if row["step"] != "schedule" or "one_launch" not in us:
            continue
        experts, topk, columns = SHAPES[row["model"]]
        slots = row["tokens"] * topk
        tiles = max_tiles(slots, experts, default_config(HOPPER, slots, experts, columns, columns).block_m)
        taken = us["one_launch" if slots * tiles <= MANY_READS else "two_launches"]
        assert taken == min(us["one_launch"], us["two_launches"]), (slots, tiles)

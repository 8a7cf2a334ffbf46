# SPDX-License-Identifier: Apache-2.0
"""For each operator: the backend that would run here, and why the others would not. The operators' own answers."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from importlib import import_module
from types import ModuleType
from typing import Any

import torch

from llm_quant_rocm import backends, environment, hardware, tuning
from llm_quant_rocm.cli.doctor.table import Part, Problem, heading
from llm_quant_rocm.comm import policy, reduce_norm_quant
from llm_quant_rocm.formats import fp8
from llm_quant_rocm.formats.nvfp4 import BLOCK, NvFp4Weight
from llm_quant_rocm.ops import prepare_nvfp4_weight, prepare_ptpc_weight
from llm_quant_rocm.ops._row_call import RowCall

# A layer of a large model, and the numbers of tokens of a decode and of a prefill.
_N = _K = 8192
_EXPERTS, _TOPK, _INNER = 128, 8, 2048
TOKENS = (16, 4096)
_DTYPE = torch.bfloat16
# For how a weight is arranged its values and its size do not matter.
_SMALL = 256


@dataclass(frozen=True)
class Choice:
    """What serves an operator's calls of some numbers of tokens.

    Attributes:
        runs_on: the backend.
        others: why each other backend does not, by name.
        measured: how many shapes were measured on this architecture; of the fused all-reduce, how many numbers of ranks
            with a codec. Without any, launch configurations and crossovers are guesses.
    """

    operator: str
    tokens: list[int]
    runs_on: str = field(metadata=heading("runs on"))
    others: dict[str, str]
    measured: int = field(metadata=heading("measured shapes"))


def examine(device: torch.device) -> Part:
    """All operators on `device`, and the policy of the all-reduce among the GPUs here."""
    facts = hardware.detect(device)
    rows: list[Choice] = []
    problems: list[Problem] = []
    for operator, calls in _calls(device, facts).items():
        module = import_module(f"llm_quant_rocm.ops.{operator}")  # in ops a function of the same name hides it
        for tokens, call in zip(TOKENS, calls, strict=True):
            try:
                row = _choice(operator, module, call, facts.arch)
            except (ValueError, NotImplementedError) as error:
                problems.append(_problem(operator, error))
                continue
            if rows and replace(row, tokens=rows[-1].tokens) == rows[-1]:
                rows[-1].tokens.append(tokens)
            else:
                row.tokens.append(tokens)
                rows.append(row)
    notes = [
        f"for {_DTYPE}, a layer of {_N} x {_K}, and {_EXPERTS} experts of {_INNER}, {_TOPK} a token",
    ]
    engines: dict[str, list[str]] = {}  # by what holds there
    for engine, settings in (("vLLM", policy.Settings.from_environment), ("SGLang", policy.Settings.for_sglang)):
        try:
            engines.setdefault(_all_reduce(facts.arch, settings()), []).append(engine)
        except policy.WrongVariables as error:
            problems += map(Problem.of, error.args)
        except ValueError as error:  # a broken file of crossovers
            problems.append(Problem.of(str(error)))
    notes += [f"{' and '.join(names)}, {said}" for said, names in engines.items()]
    return Part("operators", f"Operators on {device}", rows, notes, list(dict.fromkeys(problems)))


def _choice(operator: str, module: ModuleType, call: Any, arch: str) -> Choice:
    chosen = module._choose(call).backend.name
    others = {
        backend.name: backend.refusal(call) or f"comes after {chosen}"
        for backend in module.BACKENDS
        if backend.name != chosen
    }
    forced = " (forced)" if backends.forced(operator) else ""
    return Choice(operator, [], chosen + forced, others, _measured(operator, arch))


def _measured(operator: str, arch: str) -> int:
    if operator != reduce_norm_quant.OPERATOR:
        return len(tuning.shapes(operator, arch))
    return len(policy.known(arch, operator))


def _problem(operator: str, error: Exception) -> Problem:
    forced = backends.forced(operator)
    if forced:
        return Problem(str(error), f"unset {environment.backend_of(operator)}")
    if isinstance(error, NotImplementedError):
        return Problem(str(error), "run on a supported device")
    return Problem.of(str(error))


def _calls(device: torch.device, facts: hardware.Hardware) -> dict[str, list[Any]]:
    """Of every operator its calls for `TOKENS`."""
    from llm_quant_rocm.ops.nvfp4_gemm import GemmCall as NvFp4Call
    from llm_quant_rocm.ops.nvfp4_moe import MoeCall
    from llm_quant_rocm.ops.ptpc_gemm import GemmCall as PtpcCall
    from llm_quant_rocm.ops.reduce_norm_quant import Call as NormCall

    world, peers = _ranks()
    obstacle = None if peers else "the GPUs do not reach each other's memory"
    _, ptpc = prepare_ptpc_weight(torch.zeros(_SMALL, _SMALL, dtype=fp8.for_device(device).dtype, device=device))
    dense = prepare_nvfp4_weight(_zeros(device)).layout
    w13, w2 = (prepare_nvfp4_weight(_zeros(device, 1), gate_up=gate_up).layout for gate_up in (True, False))
    calls: dict[str, Callable[[int], Any]] = {
        "per_token_quant": lambda m: RowCall(facts, _K),
        "act_and_mul_quant": lambda m: RowCall(facts, _K),
        "rms_norm_quant": lambda m: RowCall(facts, _K),
        "reduce_norm_quant": lambda m: NormCall(facts, _K, world, obstacle),
        "ptpc_gemm": lambda m: PtpcCall(device, m, _N, _K, _DTYPE, None, ptpc),
        "ptpc_moe": lambda m: RowCall(facts, _K),
        "nvfp4_gemm": lambda m: NvFp4Call(facts, m, _N, _K, _DTYPE, dense, False, False),
        "nvfp4_moe": lambda m: MoeCall(facts, _EXPERTS, _K, _INNER, (w13, w2)),
    }
    return {operator: [make(m) for m in TOKENS] for operator, make in calls.items()}


def _zeros(device: torch.device, *experts: int) -> NvFp4Weight:
    n = k = _SMALL
    return NvFp4Weight(
        torch.zeros(*experts, n, k // 2, dtype=torch.uint8, device=device),
        torch.zeros(*experts, n, k // BLOCK, device=device).to(torch.float8_e4m3fn),
        torch.ones(*experts, n, device=device),
    )


def _ranks() -> tuple[int, bool]:
    """How many ranks the GPUs here make, and whether each reaches the others' memory."""
    gpus = range(torch.cuda.device_count())
    pairs = [(one, other) for one in gpus for other in gpus if one != other]
    return max(1, len(gpus)), bool(pairs) and all(torch.cuda.can_device_access_peer(*pair) for pair in pairs)


def _all_reduce(arch: str, settings: policy.Settings) -> str:
    world, peers = _ranks()
    world = max(2, world)
    return f"with {world} ranks: {policy.Policy(settings, world, arch, peers).describe()}"

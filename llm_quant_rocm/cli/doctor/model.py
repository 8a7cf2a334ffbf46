# SPDX-License-Identifier: Apache-2.0
"""What will happen to a checkpoint: how it can be served, how much memory each way takes, what of it would not work.

By the names and shapes of its tensors and what it says of itself; no weight is read and no engine asked.
"""

import math
import shlex
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch

from llm_quant_rocm.checkpoint import nvfp4_kinds, online_layers
from llm_quant_rocm.checkpoint.nvfp4_tensors import refuse_ragged
from llm_quant_rocm.checkpoint.quantize import IGNORE
from llm_quant_rocm.checkpoint.survey import FP8, NVFP4, OTHER, Module, Survey, survey
from llm_quant_rocm.cli._errors import CommandError
from llm_quant_rocm.cli.doctor.contradictions import contradictions
from llm_quant_rocm.cli.doctor.engines import HOSTS
from llm_quant_rocm.cli.doctor.packages import installed
from llm_quant_rocm.cli.doctor.shards import Shards, pattern
from llm_quant_rocm.cli.doctor.table import Part, Problem, heading
from llm_quant_rocm.formats.nvfp4 import BLOCK

_GIB = 2**30
_HALF = "16 bits"


@dataclass(frozen=True)
class Plan:
    """A way to serve the checkpoint.

    Attributes:
        memory: GiB of weights on each rank.
        fits: whether each rank's weights fit one of the GPUs here, None where there are not as many.
    """

    scheme: str
    quantized: int = field(metadata=heading("layers quantized"))
    kept: int = field(metadata=heading("kept"))
    memory: float = field(metadata=heading("GiB a rank"))
    fits: bool | None = field(metadata=heading("fits here"))
    command: str


@dataclass(frozen=True)
class Layers:
    """Modules whose names differ in numbers alone and whose shapes and kinds are the same."""

    layer: str
    count: int
    stored: str
    served: str
    shape: list[int]
    per_rank: list[int] = field(metadata=heading("a rank's"))


@dataclass(frozen=True)
class Scheme:
    """A way to serve: its name, what to type, and what becomes of a module (`_HALF`, FP8, NVFP4 or OTHER)."""

    name: str
    command: str
    served: Callable[[Module], str]


def examine(folder: Path, ranks: int) -> list[Part]:
    """How the checkpoint in `folder` can be served on so many tensor-parallel ranks, and its layers.

    Raises:
        CommandError: it is no checkpoint.
    """
    try:
        found = survey(folder)
    except ValueError as error:
        raise CommandError(str(error)) from error
    shards = Shards(found.config, ranks)
    schemes, refusal = _schemes(found, folder, ranks)
    messages = [*found.faults, *shards.refusals(), *contradictions(found), *_unfit(found.modules, shards, schemes[-1])]
    messages += [refusal] if refusal else []
    architectures = found.config.get("architectures") or ["an unnamed architecture"]
    says = "not quantized" if found.quantization is None else nvfp4_kinds.describe(found.quantization)
    notes = [f"{architectures[0]}, {says}; weights alone, on {ranks} tensor-parallel rank{'s' * (ranks > 1)}"]
    return [
        Part("serving", "How it can be served", [_plan(scheme, found.modules, shards) for scheme in schemes], notes,
             [Problem.of(message) for message in dict.fromkeys(messages)]),
        Part("layers", f"Its layers, as {schemes[-1].name}", _layers(found.modules, shards, schemes[-1])),
    ]  # fmt: skip


def _schemes(found: Survey, folder: Path, ranks: int) -> tuple[list[Scheme], str | None]:
    """The ways to serve a checkpoint, what it is for last, and why that one would be refused."""
    command = _serve(folder, ranks)
    before = Scheme(f"{_HALF}", "", lambda module: OTHER if module.kind == OTHER else _HALF)
    config = found.quantization
    if config is None or config.get("quant_method") == online_layers.NAME:
        ignored = online_layers.OnlineLayers((config or {}).get("ignored_layers") or [])
        flag = [] if config else ["--quantization", online_layers.NAME]

        def in_fp8(module: Module) -> str:
            return FP8 if module.is_linear and not ignored.is_ignored(module.name, {}) else _HALF

        def in_nvfp4(module: Module) -> str:
            ignored = any(fnmatchcase(module.name, pattern) for pattern in IGNORE)
            return NVFP4 if len(module.shape) == 2 and not ignored else _HALF

        target = f"{folder.name}-NVFP4"
        quantize = shlex.join(["llm-quant-rocm", "quantize", str(folder), target, "--scheme", "nvfp4"])
        schemes = [Scheme(_HALF, _serve(folder, ranks), before.served)]
        if not any(len(module.shape) == 3 for module in found.modules):  # experts in one tensor, which it does not take
            schemes.append(Scheme("NVFP4", f"{quantize}\n{_serve(Path(target), ranks)}", in_nvfp4))
        return [*schemes, Scheme("PTPC FP8", _serve(folder, ranks, *flag), in_fp8)], None

    def as_stored(module: Module) -> str:
        return module.kind if module.kind in (NVFP4, FP8, OTHER) else _HALF

    if nvfp4_kinds.checkpoint_kind(config) is None:
        return [before, Scheme("the engine's own", command, as_stored)], None
    try:
        nvfp4_kinds.check(config)
        refusal = None
    except ValueError as error:
        refusal = str(error)
    here = "NVFP4" if _served_here() else "NVFP4, on this GPU by the engine itself"
    return [before, Scheme(here, command, as_stored)], refusal


def _serve(folder: Path, ranks: int, *options: str) -> str:
    """The command lines of the engines that are installed, or vLLM's."""
    engines = [host.engine for host in HOSTS if installed(host.engine)] or ["vllm"]
    serve = {
        "vllm": (["vllm", "serve", str(folder)], "--tensor-parallel-size"),
        "sglang": (["python", "-m", "sglang.launch_server", "--model-path", str(folder)], "--tp-size"),
    }
    lines = []
    for engine in engines:
        command, size = serve[engine]
        lines.append(shlex.join([*command, *((size, str(ranks)) if ranks > 1 else ()), *options]))
    return "\n".join(lines)


def _served_here() -> bool:
    if not torch.cuda.is_available():
        return nvfp4_kinds.served_here("cpu", None)
    return nvfp4_kinds.served_here("rocm" if torch.version.hip else "cuda", torch.cuda.get_device_capability())


def _plan(scheme: Scheme, modules: Sequence[Module], shards: Shards) -> Plan:
    quantized = sum(scheme.served(module) != _HALF for module in modules)
    memory = sum(_bytes(module, scheme.served(module), shards) for module in modules)
    kept = sum(scheme.served(module) == _HALF for module in modules if module.is_linear)
    fits = _fits(memory, shards.ranks)
    return Plan(scheme.name, quantized, kept, memory / _GIB, fits, scheme.command)


def _bytes(module: Module, kind: str, shards: Shards) -> int:
    """What a rank's share of a module takes when it is served as `kind`."""
    shape = shards.shape(module)
    if kind == OTHER:  # of unknown layout
        return module.nbytes * math.prod(shape) // max(1, math.prod(module.shape))
    values, rows = math.prod(shape), math.prod(shape[:-1])
    if kind == FP8:
        return values + 4 * rows
    return values // 2 + values // BLOCK + 4 * rows if kind == NVFP4 else 2 * values


def _fits(memory: int, ranks: int) -> bool | None:
    if torch.cuda.device_count() < ranks:
        return None
    return memory < min(torch.cuda.get_device_properties(index).total_memory for index in range(ranks))


def _unfit(modules: Sequence[Module], shards: Shards, scheme: Scheme) -> Iterator[str]:
    """Why linear layers cannot be shared among the ranks, or not in whole blocks of NVFP4."""
    for module in modules:
        if not module.is_linear:
            continue
        reason = shards.refusal(module)
        if reason:
            yield reason
        elif scheme.served(module) == NVFP4:
            try:
                refuse_ragged(pattern(module.name), shards.shape(module)[-1], module.shape[-1])
            except ValueError as error:
                yield str(error)


def _layers(modules: Sequence[Module], shards: Shards, scheme: Scheme) -> list[Layers]:
    alike: defaultdict[tuple[Any, ...], list[Module]] = defaultdict(list)
    for module in modules:
        alike[pattern(module.name), module.kind, scheme.served(module), module.shape].append(module)
    return [
        Layers(name, len(group), kind, served, list(shape), list(shards.shape(group[0])))
        for (name, kind, served, shape), group in alike.items()
        if len(shape) > 1
    ]

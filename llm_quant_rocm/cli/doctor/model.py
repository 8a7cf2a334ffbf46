# SPDX-License-Identifier: Apache-2.0
"""What will happen to a checkpoint: how it can be served, how much memory each way takes, what of it would not work.

By the names and shapes of its tensors and what it says of itself; no weight is read and no engine asked.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from llm_quant_rocm.checkpoint.files import mistrals_files
from llm_quant_rocm.checkpoint.nvfp4_kinds import describe
from llm_quant_rocm.checkpoint.nvfp4_tensors import refuse_ragged
from llm_quant_rocm.checkpoint.survey import FP8, MXFP4, NVFP4, OTHER, Module, Survey, survey
from llm_quant_rocm.cli._errors import understood
from llm_quant_rocm.cli.doctor.contradictions import contradictions
from llm_quant_rocm.cli.doctor.schemes import HALF, Scheme, ways
from llm_quant_rocm.cli.doctor.shards import Shards, pattern
from llm_quant_rocm.cli.doctor.table import Part, Problem, below, heading
from llm_quant_rocm.formats.nvfp4 import BLOCK

_GIB = 2**30
_MXFP4_BLOCK = 32


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
    command: str = field(metadata=below())


@dataclass(frozen=True)
class Layers:
    """Modules whose names differ in numbers alone and whose shapes and kinds are the same."""

    layer: str
    count: int
    stored: str
    served: str
    shape: list[int]
    per_rank: list[int] = field(metadata=heading("a rank's"))


def examine(folder: Path, ranks: int) -> list[Part]:
    """How the checkpoint in `folder` can be served on so many tensor-parallel ranks, and its layers.

    Raises:
        CommandError: it is no checkpoint.
    """
    with understood(folder):
        return _examined(survey(folder), folder, ranks)


def _examined(found: Survey, folder: Path, ranks: int) -> list[Part]:
    shards = Shards(found.config, ranks)
    served = ways(found, folder, ranks)
    schemes = list(served.schemes)
    messages = [*found.faults, *shards.refusals(), *contradictions(found), *_unfit(found.modules, shards, schemes[-1])]
    messages += [served.refusal] if served.refusal else []
    architectures = found.config.get("architectures") or ["an unnamed architecture"]
    says = "not quantized" if found.quantization is None else describe(found.quantization)
    notes = [f"{architectures[0]}, {says}; weights alone, on {ranks} tensor-parallel rank{'s' * (ranks > 1)}"]
    notes += served.left_out
    theirs = mistrals_files(folder)
    if theirs:
        notes.append(
            f"{theirs[0].name} and params.json, Mistral's own format of the model, are not read here, and vLLM serves "
            "them: name --config-format hf --load-format hf, or move them away"
        )
    for scheme in served.schemes[:-1]:
        unfit = [reason for reason in _unfit(found.modules, shards, scheme) if reason not in messages]
        if unfit:
            schemes.remove(scheme)
            what = Problem.of(unfit[0]).what
            notes.append(f"not in {scheme.name}: {what}, unless `quantize --ignore` keeps it in 16 bits")
    return [
        Part("serving", "How it can be served", [_plan(scheme, found.modules, shards) for scheme in schemes], notes,
             [Problem.of(message) for message in dict.fromkeys(messages)]),
        Part("layers", f"Its layers, as {schemes[-1].name}", _layers(found.modules, shards, schemes[-1])),
    ]  # fmt: skip


def _plan(scheme: Scheme, modules: Sequence[Module], shards: Shards) -> Plan:
    quantized = sum(scheme.served(module) != HALF for module in modules)
    memory = sum(_bytes(module, scheme.served(module), shards) for module in modules)
    kept = sum(scheme.served(module) == HALF for module in modules if module.is_linear)
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
    if kind == MXFP4:
        return values // 2 + values // _MXFP4_BLOCK
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

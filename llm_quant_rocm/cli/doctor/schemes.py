# SPDX-License-Identifier: Apache-2.0
"""The ways to serve a checkpoint: what to type, and what becomes of its modules."""

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch

from llm_quant_rocm.checkpoint import nvfp4_kinds, online_layers
from llm_quant_rocm.checkpoint.kept import IGNORE, TRANSPOSED, holds_all_experts, in_mixers
from llm_quant_rocm.checkpoint.survey import FP8, MXFP4, NVFP4, OTHER, Module, Survey
from llm_quant_rocm.cli.doctor.engines import HOSTS
from llm_quant_rocm.versions import installed

HALF = "16 bits"


@dataclass(frozen=True)
class Scheme:
    """A way to serve: its name, what to type, and what becomes of a module (HALF, FP8, NVFP4, MXFP4 or OTHER)."""

    name: str
    command: str
    served: Callable[[Module], str]


@dataclass(frozen=True)
class Ways:
    """The ways to serve a checkpoint.

    Attributes:
        schemes: what the checkpoint is for last.
        refusal: why that one would be refused, or None.
        left_out: why others are none, a sentence each.
    """

    schemes: list[Scheme]
    refusal: str | None = None
    left_out: tuple[str, ...] = ()


def ways(found: Survey, folder: Path, ranks: int) -> Ways:
    """The ways to serve the checkpoint in `folder` on so many ranks."""
    command = _serve(folder, ranks)
    before = Scheme(HALF, "", lambda module: OTHER if module.kind == OTHER else HALF)
    config, lack = found.quantization, _lacking(found)
    if config is None or config.get("quant_method") == online_layers.NAME:
        ignored, refusal = _ignored(config or {})
        flag = [] if config else ["--quantization", online_layers.NAME]

        def in_fp8(module: Module) -> str:
            return FP8 if module.is_linear and not ignored.is_ignored(module.name, {}) else HALF

        mixers = in_mixers(module.name for module in found.modules)

        def in_nvfp4(module: Module) -> str:
            stays = module.name in mixers or any(fnmatchcase(module.name, entry) for entry in IGNORE)
            return NVFP4 if len(module.shape) == 2 and not stays else HALF

        target = f"{folder.resolve().name}-NVFP4"
        quantize = shlex.join(["llm-quant-rocm", "quantize", str(folder), target, "--scheme", "nvfp4"])
        # Served as it is, a checkpoint that names ptpc_fp8 is not in 16 bits.
        schemes = [before if config else Scheme(HALF, command, before.served)]
        left_out = []
        if lack and config is None:
            return Ways(schemes, left_out=(f"not in NVFP4 or PTPC FP8: neither serves experts with {lack}",))
        if config is not None:
            left_out.append("not in NVFP4: `quantize` takes no checkpoint with a quantization_config in config.json")
        elif found.config.get("model_type") in TRANSPOSED:
            left_out.append(
                f"not in NVFP4: `quantize` takes no {found.config['model_type']}, whose weights are transposed"
            )
        elif any(holds_all_experts(module.name, module.shape) for module in found.modules):
            left_out.append("not in NVFP4: `quantize` takes experts that have a tensor each")
        else:
            schemes.append(Scheme("NVFP4", f"{quantize}\n{_serve(Path(target), ranks)}", in_nvfp4))
        schemes.append(Scheme("PTPC FP8", _serve(folder, ranks, *flag), in_fp8))
        unserved = lack and (
            f"{online_layers.NAME} does not serve experts with {lack}: take quantization_config out of config.json to "
            "serve the checkpoint in 16 bits"
        )
        return Ways(schemes, refusal or unserved, tuple(left_out))

    def as_stored(module: Module) -> str:
        return module.kind if module.kind in (NVFP4, MXFP4, FP8, OTHER) else HALF

    if nvfp4_kinds.checkpoint_kind(config) is None:
        return Ways([before, Scheme("served by the engine itself", command, as_stored)])
    refusal = None
    # Experts in 16 bits are the engine's.
    if lack and any(".experts." in module.name and module.kind == NVFP4 for module in found.modules):
        refusal = (
            f"{nvfp4_kinds.NAME} does not serve experts with {lack}: leave the checkpoint to the engine with "
            f"{nvfp4_kinds.SWITCH}=0"
        )
    try:
        nvfp4_kinds.check(config)
    except ValueError as error:
        refusal = str(error)
    here = "NVFP4" if _served_here() else "NVFP4, on this GPU by the engine itself"
    return Ways([before, Scheme(here, command, as_stored)], refusal)


def _lacking(found: Survey) -> str | None:
    """What our operators lack to serve the model's routed experts, as far as its files say, or None."""
    if found.has_expert_biases:
        return "biases"
    config = found.config.get("text_config") or found.config
    experts = any(".experts." in module.name for module in found.modules)
    return "a clamped SwiGLU (swiglu_limit)" if experts and config.get("swiglu_limit") else None


def _ignored(config: Mapping[str, Any]) -> tuple[online_layers.OnlineLayers, str | None]:
    """The layers that ptpc_fp8 leaves, and why it would refuse what a checkpoint says of them, or None."""
    try:
        return online_layers.OnlineLayers(online_layers.read_ignored_layers(config)), None
    except ValueError as error:
        return online_layers.OnlineLayers(), str(error)


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

# SPDX-License-Identifier: Apache-2.0
"""Which checkpoints are NVFP4, by their `quantization_config`, and who serves them with what options."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llm_quant_rocm import environment
from llm_quant_rocm.checkpoint.layer_names import fused_names
from llm_quant_rocm.environment import NVFP4 as SWITCH
from llm_quant_rocm.formats.nvfp4 import BLOCK
from llm_quant_rocm.json_files import understood

NAME = "nvfp4_triton"
ALIAS = "petit_nvfp4"  # what engines called their own method of this kind

MODELOPT_ALGORITHMS = ("NVFP4", "W4A16_NVFP4")
MIXED_PRECISION = "MIXED_PRECISION"
COMPRESSED_TENSORS_FORMAT = "nvfp4-pack-quantized"
# What to say of a table of tokens that is quantized.
TABLES = "and engines read embeddings in 16 bits: export the model with them so"

# Tables of tokens; gemma's embedding_projection and some patch_embedding are linear layers.
_TABLE = re.compile(r"(^|\.)(embed_tokens\w*|((word|tok)_)?embeddings?|wte)$")


@dataclass(frozen=True)
class Options:
    """How NVFP4 layers compute.

    Attributes:
        activations: "16bit", or "nvfp4" to quantize them as hardware with NVFP4 units does: for evaluation, and slow.
        prefill: "exact", or "fp8" for FP8's speed in linear layers where many tokens come at once (`ops.nvfp4_gemm`).
    """

    activations: str = "16bit"
    prefill: str = "exact"

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> "Options":
        """From the environment, else from the keys `activations` and `prefill` of the checkpoint's configuration.

        Raises:
            ValueError: a value that is not known.
        """
        chosen = {}
        for option, default in (("activations", cls.activations), ("prefill", cls.prefill)):
            variable = f"{SWITCH}_{option.upper()}"
            values = environment.VARIABLES[variable].values
            chosen[option] = environment.read(variable) or config.get(option) or default
            if chosen[option] not in values:
                raise ValueError(
                    f"{variable} (or {option!r} in the quantization_config) is {' or '.join(values)}, "
                    f"not {chosen[option]!r}"
                )
        return cls(**chosen)


@understood()
def checkpoint_kind(config: Mapping[str, Any]) -> str | None:
    """ "modelopt", "modelopt_mixed" or "compressed-tensors" for an NVFP4 checkpoint's `quantization_config`, else None.

    ModelOpt's come in two shapes: {"quantization": {"quant_algo": ...}} and flat, with "quant_method" and "quant_algo".
    An algorithm that only sounds like NVFP4 counts as ModelOpt's, for `check` to name what is known.

    Raises:
        ValueError: values are not of the kinds that they have.
    """
    method = str(config.get("quant_method") or "").lower().replace("compressed_tensors", "compressed-tensors")
    if method == "compressed-tensors":
        groups = config.get("config_groups") or {}
        formats = {config.get("format"), *(group.get("format") for group in groups.values())}
        # A transform (a rotation of activations before the layer) belongs to the engine's own methods.
        return method if COMPRESSED_TENSORS_FORMAT in formats and not _transforms_activations(config) else None
    settings = modelopt_settings(config)
    if settings is None or not (method.startswith("modelopt") or "quantization" in config):
        return None
    algorithm = str(settings.get("quant_algo")).upper()
    if algorithm == MIXED_PRECISION:
        layers = settings.get("quantized_layers") or {}
        return (
            "modelopt_mixed"
            if any("NVFP4" in str(layer.get("quant_algo")).upper() for layer in layers.values())
            else None
        )
    return "modelopt" if "NVFP4" in algorithm else None


def modelopt_settings(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """The part of a ModelOpt `quantization_config`, of either shape, that holds `quant_algo`."""
    settings = config.get("quantization", config)
    return settings if isinstance(settings, dict) and settings.get("quant_algo") else None


@understood()
def check(config: Mapping[str, Any]) -> str:
    """The kind of the checkpoint that `config` describes, whose settings are such as we serve.

    Raises:
        ValueError: no NVFP4 checkpoint, an unknown algorithm, a group size other than 16, values that are not of the
            kinds that they have, or a table of tokens in NVFP4 or FP8, of which engines make one in 16 bits all the
            same.
    """
    kind = checkpoint_kind(config)
    if kind == "compressed-tensors":
        for name, group in (config.get("config_groups") or {}).items():
            if (group.get("format") or config.get("format")) == COMPRESSED_TENSORS_FORMAT:
                weights = group.get("weights") or {}  # a group of attention's inputs has none
                _refuse_group_size(weights.get("group_size"), f"{name} ({', '.join(group.get('targets') or ())})")
        return kind
    settings = modelopt_settings(config) or {}
    if kind == "modelopt":
        algorithm = str(settings.get("quant_algo")).upper()
        if algorithm not in MODELOPT_ALGORITHMS:
            raise ValueError(
                f"quant_algo {algorithm} is not known: {NAME} serves {', '.join(MODELOPT_ALGORITHMS)} and "
                f"{MIXED_PRECISION}; export the model with one of them"
            )
        _refuse_group_size(settings.get("group_size"), f"the checkpoint's {algorithm}")
        return kind
    if kind == "modelopt_mixed":
        for layer, recipe in settings["quantized_layers"].items():
            algorithm = str(recipe["quant_algo"]).upper()
            if is_table(layer) and algorithm in ("FP8", *MODELOPT_ALGORITHMS):
                raise ValueError(f"{layer} is in {algorithm}, {TABLES}")
            if "NVFP4" not in algorithm:
                continue
            if algorithm not in MODELOPT_ALGORITHMS:
                raise ValueError(
                    f"quant_algo {algorithm} of {layer} is not known: {NAME} serves {', '.join(MODELOPT_ALGORITHMS)}; "
                    "export the model with one of them"
                )
            _refuse_group_size(recipe.get("group_size"), layer)
        return kind
    raise ValueError(f"{NAME} serves no checkpoint with the quantization_config {describe(config)}")


def is_table(module: str) -> bool:
    """Whether a module of this name is a table of tokens."""
    return _TABLE.search(module) is not None


def excluded(prefix: str, fused: Mapping[str, Sequence[str]], is_excluded: Callable[[str], bool]) -> bool:
    """Whether a ModelOpt checkpoint keeps the layer `prefix` as it was, whose shards `fused` names.

    Args:
        is_excluded: the engine's answer for one name.

    Raises:
        ValueError: it keeps some shards of a fused layer and not others.
    """
    shards = {name: is_excluded(name) for name in fused_names(prefix, fused)}
    if any(shards.values()) and not all(shards.values()):
        kept = ", ".join(name for name, kept in shards.items() if kept)
        raise ValueError(
            f"the checkpoint keeps {kept} in 16 bits, but not all of {', '.join(shards)}, of which the engine makes "
            "one layer: export the model with all of them or none"
        )
    return any(shards.values()) or is_excluded(prefix)


def served_here(platform: str, capability: tuple[int, int] | None) -> bool:
    """Whether we serve NVFP4 better than engines do on a "cpu", or on a "rocm" or "cuda" device of this capability."""
    if platform == "cpu":
        return True
    if capability is None:
        return False
    if platform == "rocm":
        # CDNA, which has no units for NVFP4. gfx906 and gfx908 are 9.0 like gfx90a: `hardware.amd` refuses them.
        return capability[0] == 9
    # Of NVIDIA's GPUs Hopper has kernels here. Older ones are better served by engines', newer ones by their own units.
    return platform == "cuda" and capability == (9, 0)


def describe(config: Mapping[str, Any]) -> str:
    """A `quantization_config` in a word or two."""
    settings = modelopt_settings(config)
    method = config.get("quant_method") or "nameless"
    kind = settings["quant_algo"] if settings else config.get("format")
    return f"{method} ({kind})" if kind else str(method)


def takeover(kind: str, engine: str) -> str:
    """One line for the log: that a checkpoint of `kind` is served here, and what leaves it to the engine."""
    own = "modelopt_fp4" if kind == "modelopt" else kind  # what engines call their own method for it
    return f"NVFP4 checkpoint ({kind}): {NAME} serves it; {SWITCH}=0 or --quantization {own} leaves it to {engine}"


def summary(layers: Mapping[str, Sequence[str]], options: Options) -> str:
    """One line for the log: how many layers of each kind, and how they compute."""
    counts = [
        f"{len(names)} {kind} ({', '.join(names[:2])}{', ...' if len(names) > 2 else ''})"
        for kind, names in layers.items()
    ]
    prefill = "fp8 in linear layers" if options.prefill == "fp8" else options.prefill  # experts have none
    return f"{NAME}: {', '.join(counts)}; activations: {options.activations}, prefill: {prefill}"


def _transforms_activations(config: Mapping[str, Any]) -> bool:
    """Whether compressed-tensors' `transform_config` has more than what the weights hold, as SpinQuant's R1 and R2."""
    schemes = ((config.get("transform_config") or {}).get("config_groups") or {}).values()
    places = [place.get("location") for scheme in schemes for place in scheme.get("apply") or [{}]]
    return any(place not in ("weight_input", "weight_output") for place in places)


def _refuse_group_size(size: int | str | None, where: str) -> None:
    if size is not None and int(size) != BLOCK:
        raise ValueError(
            f"{where} has group_size {size}, and NVFP4 has blocks of {BLOCK}: quantize the model again, "
            f"or leave the checkpoint to the engine with {SWITCH}=0"
        )

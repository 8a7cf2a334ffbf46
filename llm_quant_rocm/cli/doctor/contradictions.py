# SPDX-License-Identifier: Apache-2.0
"""Where the tensors of a checkpoint are not what its quantization_config says of them."""

import re
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from typing import Any

from llm_quant_rocm.checkpoint import nvfp4_kinds
from llm_quant_rocm.checkpoint.files import several
from llm_quant_rocm.checkpoint.kept import fused_with
from llm_quant_rocm.checkpoint.survey import NVFP4, Module, Survey, one_of_each
from llm_quant_rocm.cli.doctor.schemes import HALF

# Parts of a model that quantizers leave alone without listing them.
_UNLISTED = ("vision", "visual", "audio")


def contradictions(found: Survey) -> Iterator[str]:
    """One message a kind of contradiction, with its first layer, how many there are, and the cure."""
    config, modules = found.quantization, found.modules
    if config is None:
        silent = [module for module in modules if module.is_quantized]
        if silent:
            yield (
                f"{_several(silent)} quantized ({silent[0].kind}), and neither config.json nor hf_quant_config.json "
                "says so: fetch the checkpoint again, with all its files"
            )
        return
    kind = nvfp4_kinds.checkpoint_kind(config)
    if kind is None:
        return
    tables = [module for module in modules if module.is_quantized and nvfp4_kinds.is_table(module.name)]
    if tables and kind != "modelopt_mixed":  # whose description names them, so that they are refused by it
        yield f"{_several(tables)} {tables[0].kind} in the checkpoint, {nvfp4_kinds.TABLES}"
    yield from one_of_each(_halves_of_fused_layers(modules))
    described = _describes(config)
    undescribed = [module for module in modules if _has_codes(module) and described and not described(module.name)]
    if undescribed:
        yield (
            f"{_several(undescribed)} {undescribed[0].kind} in the checkpoint, whose quantization_config does not call "
            "the layer quantized: fetch the checkpoint again, or export it with a description of all that is quantized"
        )
    kept = _keeps(config)
    if kept is None:
        return
    unlisted = [module for module in modules if _looks_unquantized(module) and not kept(module.name)]
    if unlisted:
        yield (
            f"{_several(unlisted)} {unlisted[0].kind} in the checkpoint, where its quantization_config promises NVFP4: "
            "if it is not quantized, the ignore list should name it"
        )
    listed = [module for module in modules if module.kind == NVFP4 and kept(module.name)]
    if listed:
        yield (
            f"{_several(listed)} NVFP4 in the checkpoint, and its ignore list names it: "
            "take it off the list, or export the model again"
        )


def _halves_of_fused_layers(modules: list[Module]) -> Iterator[str]:
    # Whether floats have 16 bits or 32 is all the same.
    kinds = {module.name: module.kind if module.is_quantized else HALF for module in modules}
    for together in dict.fromkeys(fused_with(module.name) for module in modules):
        present = [name for name in together if name in kinds]
        if len({kinds[name] for name in present}) > 1:
            yield (
                f"{', '.join(f'{name} ({kinds[name]})' for name in present)} are stored in different ways, and engines "
                "make one layer of them: export the model with all of them alike"
            )


def _looks_unquantized(module: Module) -> bool:
    # Some models have one tensor for all experts.
    matrices = len(module.shape) == 2 or (len(module.shape) == 3 and ".experts." in module.name)
    plain = module.is_linear and not module.is_quantized and matrices
    return plain and not any(part in module.name for part in _UNLISTED)


def _has_codes(module: Module) -> bool:
    return module.is_quantized and module.is_linear


def _describes(config: dict[str, Any]) -> Callable[[str], bool] | None:
    """Whether a list of what is quantized names a module, or may; None where there is none, or one of classes."""
    if nvfp4_kinds.checkpoint_kind(config) == "compressed-tensors":
        groups = (config.get("config_groups") or {}).values()
        targets = [target for group in groups for target in group.get("targets") or []]
        if not all(target.startswith("re:") or "." in target for target in targets):
            return None
        return lambda name: any(_names(target, name) for target in targets)
    settings = nvfp4_kinds.modelopt_settings(config) or {}
    if str(settings.get("quant_algo")).upper() != nvfp4_kinds.MIXED_PRECISION:
        return None
    # Looked up, not searched: a model may have 40,000 experts' layers, and its list as many entries.
    listed = {_from_layers(name) for name in settings.get("quantized_layers") or {}}
    with_experts = {block for block, is_expert, _ in (name.partition(".experts.") for name in listed) if is_expert}

    def described(name: str) -> bool:
        """Whether the list has `name`, what engines make one layer with it, a part of the model that it is in, or, of a
        routed expert, any of the layer's: called as experts are, or, Step-3.5's, after their block."""
        called = {_from_layers(part) for part in fused_with(name)}
        whole = _from_layers(name)
        called |= {whole[: dot.start()] for dot in re.finditer(r"\.", whole)}
        block, is_expert, _ = whole.partition(".experts.")
        if is_expert:
            called.add(f"{block}.{name.rpartition('.')[2]}")
        return not listed.isdisjoint(called) or (bool(is_expert) and block in with_experts)

    return described


def _from_layers(name: str) -> str:
    """A name without what stands before its layer's number, in which models and checkpoints differ."""
    return name[max(0, name.find("layers.")) :]


def _keeps(config: dict[str, Any]) -> Callable[[str], bool] | None:
    """Whether the ignore list names a module; None where the description is of another form than one for all."""
    if nvfp4_kinds.checkpoint_kind(config) == "compressed-tensors":
        groups = config.get("config_groups") or {}
        if any(group.get("targets") != ["Linear"] for group in groups.values()) or len(groups) != 1:
            return None
        patterns = config.get("ignore") or []
    else:
        settings = nvfp4_kinds.modelopt_settings(config) or {}
        if str(settings.get("quant_algo")).upper() == nvfp4_kinds.MIXED_PRECISION:
            return None
        patterns = settings.get("exclude_modules") or settings.get("ignore") or []

    def kept(name: str) -> bool:
        return any(_names(pattern, name) for pattern in patterns)

    return kept


def _names(pattern: str, name: str) -> bool:
    if pattern.startswith("re:"):
        return re.match(pattern.removeprefix("re:"), name) is not None
    return fnmatchcase(name, pattern) or name.startswith(f"{pattern}.") or name.endswith(f".{pattern}")


def _several(modules: list[Module]) -> str:
    return several([module.name for module in modules])

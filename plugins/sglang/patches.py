# SPDX-License-Identifier: Apache-2.0
"""Every hook into SGLang: what it changes, why no public interface serves, and on which versions it was checked.

All go through SGLang's own `HookRegistry`. One whose target is gone, or takes other arguments, is left out with one
line in the log, and SGLang runs without what it was for. tests/engine_sglang/test_patches.py has a test for each.

The tables of quantization methods and the choices of `--quantization`, which `register` extends, are SGLang's public
way and no hooks.
"""

import inspect
import logging
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from llm_quant_rocm.comm.policy import Settings
from llm_quant_rocm_sglang import communicator, fusion, model_loaders, nvfp4, output_heads, processes, ptpc_fp8

logger = logging.getLogger("llm_quant_rocm")


@dataclass(frozen=True)
class Patch:
    """One hook.

    Attributes:
        target: the dotted name of a function of SGLang.
        parameters: the names of the target's first parameters, which the hook relies on.
        hook: ours, which gets the target and its arguments: as many as the target has, or any.
        purpose: what does not work without it, for the log.
        why: why a hook.
        formerly: the target's names in older versions.
    """

    target: str
    parameters: tuple[str, ...]
    hook: Callable[..., Any]
    purpose: str
    why: str
    formerly: tuple[str, ...] = ()


def choose_quantization(original: Callable[..., None], model_config: Any) -> None:
    """`ModelConfig._verify_quantization`, after we have seen whether the checkpoint and the user's wish are ours.

    Raises:
        ValueError: as of `chosen`, or a variable of the quantized all-reduce is wrong. What a plugin raises when it
            registers, SGLang logs and goes on; what is raised here ends the server before it starts a process.
    """
    Settings.for_sglang()
    name = ptpc_fp8.chosen(model_config) or nvfp4.chosen(model_config)
    if name is None:
        original(model_config)
    else:
        model_config.quantization = name


PATCHES = (
    Patch(
        target="sglang.srt.configs.model_config.ModelConfig._verify_quantization",
        parameters=("self",),
        hook=choose_quantization,
        purpose="--quantization ptpc_fp8, and NVFP4 checkpoints without a flag",
        why="ROCm's list of allowed methods is a local variable of it, and ModelOpt's methods come first among those "
        "that may claim a checkpoint. Checked on 0.5.17, 0.5.21, 0.5.23. Can go when a plugin's method is allowed on "
        "ROCm and asked first.",
    ),
    Patch(
        target="sglang.srt.model_loader.loader.DefaultModelLoader._get_all_weights",
        parameters=("self", "model_config", "model"),
        hook=model_loaders.checkpoint_tensors,
        purpose="NVFP4 checkpoints of GLM-4.7-Flash, by ModelOpt, and of Llama-4 that have attention in it",
        why="The first one's model joins tensors of q_a_proj and kv_a_proj_with_mqa, and scalars have no dimension for "
        "it; the second one's reorders rows of q and k of 16-bit weights alone. Checked on 0.5.17, 0.5.21, 0.5.23. Can "
        "go when they know quantized ones.",
    ),
    Patch(
        target="sglang.srt.layers.logits_processor.LogitsProcessor._compute_lm_head",
        parameters=("self", "hidden_states", "lm_head"),
        hook=output_heads.logits,
        purpose="draft models of speculative decoding that take a quantized lm_head from their target",
        why="SGLang gives them its weight alone, and only a few models' drafts the layer. Checked on 0.5.17, 0.5.21, "
        "0.5.23. Can go when all drafts get the layer.",
    ),
    Patch(
        target="sglang.srt.managers.multi_tokenizer_mixin.write_data_for_multi_tokenizer",
        parameters=("port_args", "server_args", "scheduler_info"),
        hook=processes.write_data,
        purpose="--tokenizer-worker-num above 1 with a checkpoint or a method of ours",
        why="SGLang loads no plugins in those processes, which know the model's quantization method all the same. "
        "Checked on 0.5.17, 0.5.21, 0.5.23. Can go when SGLang loads them.",
    ),
    Patch(
        target="sglang.srt.distributed.parallel_state.GroupCoordinator.__init__",
        parameters=("self", "group_ranks", "local_rank"),
        hook=communicator.attach,
        purpose="the quantized all-reduce (ROCM_QUICK_REDUCE_QUANTIZATION)",
        why="SGLang makes its QuickReduce here, and has no name for another's. Checked on 0.5.17, 0.5.21, 0.5.23. Can "
        "go when a plugin may bring an all-reduce.",
    ),
    Patch(
        target="sglang.srt.distributed.parallel_state.GroupCoordinator._resolve_outplace_all_reduce_method",
        parameters=("self", "input_"),
        hook=communicator.resolve,
        purpose="the quantized all-reduce where SGLang's custom all-reduce serves too (up to 16 MiB)",
        why="SGLang asks its custom all-reduce first, whatever was measured. Checked on 0.5.17, 0.5.21, 0.5.23. Can go "
        "with the one before.",
    ),
    Patch(
        target="sglang.srt.distributed.parallel_state.GroupCoordinator.all_reduce",
        parameters=("self", "input_"),
        hook=communicator.all_reduce,
        purpose="the quantized all-reduce on CPUs",
        why="What is on a CPU it adds before it asks which method serves. Checked on 0.5.17, 0.5.21, 0.5.23. Can go "
        "with the first.",
    ),
    Patch(
        target="sglang.srt.model_executor.model_runner.ModelRunner.load_model",
        parameters=("self",),
        hook=fusion.load_model,
        purpose="norms fused with the quantization and the all-reduce around them, and a draft's own KV cache dtype",
        why="A quantization method sees its own layers alone, norms are none of them, and it is not told whether they "
        "are a draft's. Checked on 0.5.17, 0.5.21, 0.5.23. Can go when SGLang says so, and lets a method quantize in "
        "the norm before its layer, as it does for static scales.",
    ),
    Patch(
        target="sglang.srt.layers.layer_boundary.residual.add_norm.flashinfer_ar_fusion_applies",
        formerly=(
            "sglang.srt.layers.layer_boundary.residual.add_norm.apply_flashinfer_allreduce_fusion",
            "sglang.srt.layers.communicator.apply_flashinfer_allreduce_fusion",
        ),
        parameters=("batch_size",),
        hook=fusion.may_fuse,
        purpose="all-reduces fused with the norms behind them",
        why="It knows FlashInfer alone; what SGLang asks beside it knows AITER alone. Checked on 0.5.17, 0.5.21, "
        "0.5.23. Can go when a plugin may bring such a kernel.",
    ),
    Patch(
        target="sglang.srt.layers.layernorm._forward_with_allreduce_fusion",
        parameters=("norm_module", "x", "residual", "post_residual_addition", "weight", "use_attn_tp_group"),
        hook=fusion.reduce_and_norm,
        purpose="all-reduces fused with the norms behind them",
        why="It calls FlashInfer's kernel or AITER's by name. Checked on 0.5.17, 0.5.21, 0.5.23. Can go with the one "
        "before.",
    ),
)


def apply() -> None:
    """Register every hook whose target is as it was; log one line for every other."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for patch in PATCHES:
        target, trouble = _find(patch)
        if trouble is None:
            HookRegistry.register(target, patch.hook, HookType.AROUND)
        else:
            logger.error(
                "llm-quant-rocm cannot hook into this SGLang: %s. Without it does not work: %s. Install a supported "
                "SGLang for it",
                trouble,
                patch.purpose,
            )


def _find(patch: Patch) -> tuple[str, str | None]:
    """The target's name in this SGLang, and why the hook cannot be set, or None."""
    name, gone = patch.target, ""
    for name in (patch.target, *patch.formerly):
        try:
            target = pkgutil.resolve_name(name)
        except (ImportError, AttributeError) as error:
            gone = gone or f"{name} is gone ({error})"
            continue
        names = tuple(inspect.signature(target).parameters)
        found = names[: len(patch.parameters)]
        if found != patch.parameters:
            return name, f"{name} takes {', '.join(found)}, not {', '.join(patch.parameters)}"
        try:
            inspect.signature(patch.hook).bind(target, *names)
        except TypeError:
            return name, f"{name} takes {', '.join(names)}, and its hook not as many"
        return name, None
    return name, gone

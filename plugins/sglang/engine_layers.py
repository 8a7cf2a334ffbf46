# SPDX-License-Identifier: Apache-2.0
"""SGLang's classes of layers and parameters, for the library's loaders of checkpoint tensors; its groups."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial, wraps
from typing import Any

import torch
import torch.distributed as dist
from sglang.srt.arg_groups.overrides import resolved_view
from sglang.srt.distributed import parallel_state
from sglang.srt.environ import envs
from sglang.srt.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from sglang.srt.layers.parameter import BasevLLMParameter, ModelWeightParameter
from sglang.srt.layers.quantization.kv_cache import BaseKVCacheMethod
from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding
from sglang.srt.model_loader.weight_utils import default_weight_loader
from sglang.srt.runtime_context import get_server_args

from llm_quant_rocm.checkpoint.kv_scales import refusing_broken_scales
from llm_quant_rocm.checkpoint.linear_tensors import EngineLayers
from llm_quant_rocm.checkpoint.online import refusing_again, why_not_again
from llm_quant_rocm.checkpoint.warm_layers import warm_linear

Loader = Callable[..., Any]


class _KeepsLoader(BasevLLMParameter):
    """A parameter that keeps its loader, which sees and checks everything, where a model sets one of its own, as
    Qwen3-Next does for projections that its checkpoints fuse. `on_other_loader` is told of that one."""

    def __init__(self, on_other_loader: Callable[[Loader], None], **arguments: Any) -> None:
        self._on_other_loader = on_other_loader
        super().__init__(**arguments)

    @property
    def _weight_loader(self) -> Loader:
        return self._own

    @_weight_loader.setter
    def _weight_loader(self, loader: Loader) -> None:
        if hasattr(self, "_own"):
            self._on_other_loader(loader)
        else:
            self._own = loader


class Weight(_KeepsLoader, ModelWeightParameter):
    """A matrix whose rows or columns ranks share."""


def scalars(**arguments: Any) -> BasevLLMParameter:
    """Values that all ranks have: a model's loader of rows is not for them."""
    return _KeepsLoader(on_other_loader=lambda loader: None, **arguments)


ENGINE = EngineLayers(
    parameter=Weight,
    scalars=scalars,
    plain=(ColumnParallelLinear, MergedColumnParallelLinear, QKVParallelLinear, ReplicatedLinear, RowParallelLinear),
    embedding=VocabParallelEmbedding,
)

# What --load-format reads tensor by tensor; others fill parameters by themselves, or want them all alive.
_TENSOR_FORMATS = {"auto", "safetensors", "fastsafetensors", "pt", "npcache", "mistral", "runai_streamer"}

# What SGLang stored of a loaded model, which it copies into parameters of the same names.
_STORED = ("presharded", "sharded_state")
# A loaded model's parameters, from another server: SGLang prepares no layer for them.
_OF_A_SERVER = ("remote_instance",)

# Whether the model that is being loaded is a draft.
_loads_draft = ContextVar("loads_draft", default=False)

# What SGLang makes one layer of, MLA's first.
JOINED = ("q_a_proj", "kv_a_proj_with_mqa")
# Many models of SGLang do not say what they fuse.
_COMMON_FUSED = {
    "qkv_proj": ["q_proj", "k_proj", "v_proj"],
    "gate_up_proj": ["gate_proj", "up_proj"],
    "fused_qkv_a_proj_with_mqa": [*JOINED],
}


def with_common_fused(fused: Mapping[str, list[str]] | None) -> dict[str, list[str]]:
    """SGLang's packed_modules_mapping of a model, with what models leave out."""
    return {**_COMMON_FUSED, **(fused or {})}


def _refuse_updates(layer: torch.nn.Module, prefix: str) -> None:
    """Has SGLang refuse what is to be loaded later (`update_weights_from_disk` and its kin) into a model with `layer`.

    From 0.5.21 on it asks layers before it loads anything. Before, and where somebody loads without asking, the
    parameters that a method gave the layer refuse: what came before them is loaded then, and SGLang's way back, which
    loads the old checkpoint, refused too."""
    layer._derived_weight_cache_error = why_not_again(prefix)  # type: ignore[assignment]
    for name, param in layer.named_parameters(recurse=False):
        if not hasattr(param, "weight_loader"):
            param.weight_loader = refusing_again(f"{prefix}.{name}")  # type: ignore[attr-defined]


def once(prepare: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    """A method's `process_weights_after_loading`: a layer is prepared once, and takes no updates from then on. SGLang
    prepares all of them again at the end of a session of updates (`end_weight_update`), each of which was refused."""

    @wraps(prepare)
    def process(method: Any, layer: Any) -> None:
        if getattr(layer, "_derived_weight_cache_error", None) is None:
            prepare(method, layer)
            _refuse_updates(layer, method.prefix)

    return process


def hide_codes(layer: Any) -> torch.dtype:
    """Lets nobody but us know what a served layer's `weight` holds; returns the dtype that it is to be viewed in.

    SGLang's MLA on gfx950 takes uint8 for MXFP4 and, in 0.5.17, E4M3 for block-scaled FP8, and would hand the layer
    activations that it has quantized itself. On ROCm codes are int8 to it.
    """
    dtype = layer.weight.dtype
    if torch.version.hip:
        layer.weight = torch.nn.Parameter(layer.weight.view(torch.int8), requires_grad=False)
    return dtype


def hide_codes_to_come(layer: Any, prefix: str) -> None:
    """`hide_codes` of a `weight` that is still to be loaded, where SGLang looks at it before that: as it builds blocks
    of DeepSeek and GLM-4.7-Flash, it asks MLA's first layer in which codes their norm is to give the activations.

    Of other layers it stays: SGLang decodes kv_b_proj's FP8 by its dtype, when everything is loaded.
    """
    if torch.version.hip and prefix.endswith(".fused_qkv_a_proj_with_mqa") and layer.weight.dtype.itemsize == 1:
        # Zeros: SGLang's dummy weights leave integers as they are.
        layer.weight.data = torch.zeros_like(layer.weight.data, dtype=torch.int8)


def warm_up(layer: torch.nn.Module, method: Any) -> None:
    """Has the kernels compiled by which `method` will serve a linear layer, on a GPU."""
    if on_gpu(layer):
        product = partial(method.apply, layer)
        warm_linear(layer, product, method.dtype, method.columns, most_rows(), method.prefix)


def on_gpu(layer: torch.nn.Module) -> bool:
    """Whether the parameters of `layer` are on a GPU."""
    return next(layer.parameters()).is_cuda


def group_of(layer: Any, ranks: int) -> dist.ProcessGroup:
    """The `ranks` among which a linear layer is sharded: all of tensor parallelism, or those that share attention.

    Raises:
        ValueError: no group of SGLang's has as many ranks.
    """
    if own := getattr(layer, "tp_group", None):  # which 0.5.21 has not, and 0.5.23 has
        return own.device_group
    for get in (parallel_state.get_tp_group, parallel_state.get_attn_tp_group):
        group = get()
        if group.world_size == ranks:
            return group.device_group
    raise ValueError(f"a layer is sharded over {ranks} ranks, and no group of SGLang's has as many")


def device_type() -> str:
    """Where this SGLang computes: "cpu" or "cuda" (which ROCm is too)."""
    return str(parallel_state.get_tp_group().device.type)


def server_arguments() -> Any:
    """The server's arguments with what SGLang decides of them by itself, which from 0.5.21 on stands beside them."""
    return resolved_view(get_server_args())


@contextmanager
def loading(runner: Any) -> Iterator[None]:
    """While the model of SGLang's `runner` is loaded."""
    token = _loads_draft.set(runner.is_draft_worker)
    try:
        yield
    finally:
        _loads_draft.reset(token)


def cache_method(method: BaseKVCacheMethod, prefix: str, algorithm: str | None) -> BaseKVCacheMethod | None:
    """`method` for the attention layer `prefix`, which refuses broken scales of its cache; None where the cache is in
    16 bits. To that SGLang does not apply the scales when it writes, and some of its kernels do when they read.

    `algorithm` is what the checkpoint says of the cache, in ModelOpt's words, by which SGLang goes unless it is told
    (--kv-cache-dtype, and of a draft --speculative-draft-kv-cache-dtype)."""
    arguments = server_arguments()
    chosen = arguments.kv_cache_dtype
    if _loads_draft.get():
        chosen = getattr(arguments, "speculative_draft_kv_cache_dtype", None) or chosen  # 0.5.17 has one for both
    if chosen in ("bf16", "bfloat16") or (chosen == "auto" and str(algorithm).upper() != "FP8"):
        return None
    return refusing_broken_scales(method, prefix, default_weight_loader)


def is_inherited(model_config: Any) -> bool:
    """Whether a model's `quantization` is the target's, which SGLang gives a draft model where the user says nothing of
    it. SGLang holds no draft to it whose checkpoint is of another method. (0.5.17 does not say what the user said.)"""
    return model_config.is_draft_model and not getattr(model_config, "is_draft_quantization_explicit", False)


def is_dummy() -> bool:
    """Whether SGLang fills an NVFP4 checkpoint's tensors by itself (--load-format dummy).

    Raises:
        ValueError: they are to be what SGLang stored of a loaded model, or another server's. Layers are to have been
            prepared by then, and these cannot be without their tensors.
    """
    return _load_format(*_STORED, *_OF_A_SERVER) == "dummy"


def _load_format(*refused: str) -> str:
    """--load-format.

    Raises:
        ValueError: it is one of the `refused`.
    """
    load_format = server_arguments().load_format
    chosen = str(getattr(load_format, "value", load_format))
    if chosen in refused:
        raise ValueError(
            f"--load-format {chosen} cannot read layers that llm-quant-rocm serves, whose tensors are others once "
            "they are loaded: serve the checkpoint itself, without --load-format"
        )
    return chosen


def most_rows() -> int:
    """How many tokens a forward pass has at most."""
    arguments = server_arguments()
    chunk = arguments.chunked_prefill_size or -1
    return int(chunk if chunk > 0 else arguments.max_prefill_tokens)


def batch_invariant() -> bool:
    """Whether a row's bits may not depend on the rows beside it (--enable-deterministic-inference)."""
    return bool(envs.SGLANG_ENABLE_DETERMINISTIC_INFERENCE.get())


def loads_tensors() -> bool:
    """Whether SGLang hands every tensor of the checkpoint to our loaders, and keeps weights where it computes.

    Raises:
        ValueError: the layers are to be another server's.
    """
    arguments = server_arguments()
    formats = {_load_format(*_OF_A_SERVER), getattr(arguments, "speculative_draft_load_format", None)} - {None}
    others = (
        arguments.cpu_offload_gb > 0,
        getattr(arguments, "offload_group_size", -1) > 0,
        getattr(arguments, "weight_cache_mode", "off") != "off",
        getattr(arguments, "startup_weight_load_mode", "serial") != "serial",
    )
    return {str(getattr(name, "value", name)) for name in formats} <= _TENSOR_FORMATS and not any(others)


def is_in_transformers(layer: torch.nn.Module) -> bool:
    """Whether SGLang put a linear layer into a model of transformers' (--model-impl transformers, or where it has none
    of its own). There it replaces parameters on the meta device, and keeps no loader."""
    return type(layer).__module__ == "sglang.srt.models.transformers"


def moves_experts() -> bool:
    """Whether experts may be elsewhere than the checkpoint's order says, or more than once."""
    arguments = server_arguments()
    return (
        arguments.enable_eplb or arguments.ep_num_redundant_experts > 0 or arguments.init_expert_location != "trivial"
    )

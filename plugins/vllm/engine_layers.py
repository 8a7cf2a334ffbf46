# SPDX-License-Identifier: Apache-2.0
"""vLLM's classes of layers and parameters, for the library's loaders of checkpoint tensors."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from vllm.config import VllmConfig
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.models.utils import StageMissingLayer
from vllm.model_executor.parameter import BasevLLMParameter, ModelWeightParameter
from vllm.platforms import current_platform

from llm_quant_rocm.checkpoint.linear_tensors import EngineLayers
from llm_quant_rocm.checkpoint.online import refusing_again

Loader = Callable[..., Any]
# By --load-format: what vLLM stored of a loaded model, which it copies into parameters of the same names.
_STORED = ("sharded_state", "runai_streamer_sharded")
# What vLLM puts before the names of a draft model's layers, whose checkpoint has names of its own.
_DRAFT = "draft_model."
_RELOAD = "load weights by vLLM's reload_weights or update_weights, which prepare it again"


class _KeepsLoader(BasevLLMParameter):
    """A parameter that keeps its loader, which sees and checks everything, where a model sets one of its own, as
    Mamba-2 does for groups that all ranks have. `on_other_loader` is told of that one.

    vLLM's wrapper for quantization while loading comes and goes.
    """

    def __init__(self, on_other_loader: Callable[[Loader], None], **arguments: Any) -> None:
        super().__init__(**arguments)
        self._on_other_loader = on_other_loader
        self._own = self._last = super().weight_loader

    @property
    def weight_loader(self) -> Loader:
        return super().weight_loader

    @weight_loader.setter
    def weight_loader(self, loader: Loader) -> None:
        if _is_or_wraps(loader, self._own):
            self._last = loader
        else:
            self._on_other_loader(loader)
        self._weight_loader = self._last

    @weight_loader.deleter
    def weight_loader(self) -> None:
        self._weight_loader = None  # models that set one delete the one before


def _is_or_wraps(loader: Any, own: Loader) -> bool:
    while loader is not None and loader is not own:
        loader = getattr(loader, "__wrapped__", None)
    return loader is own


class Weight(_KeepsLoader, ModelWeightParameter):
    """A matrix whose rows or columns ranks share."""


def in_checkpoint(prefix: str) -> str:
    """The layer that vLLM calls `prefix` as the model is named whose checkpoint it is loaded from: of a draft model
    (--speculative-config), without what tells it from the target."""
    return prefix.removeprefix(_DRAFT)


def is_dummy(config: VllmConfig) -> bool:
    """Whether weights are random instead of a checkpoint's.

    Raises:
        ValueError: they are to be what vLLM stored of a loaded model. Our layers then hold other tensors than before.
    """
    chosen = config.load_config.load_format
    if chosen in _STORED:
        raise ValueError(
            f"--load-format {chosen} cannot read layers that llm-quant-rocm serves, whose tensors are others once they "
            "are loaded: serve the checkpoint itself"
        )
    return chosen == "dummy"


def refuse_offloading(config: VllmConfig, *names: str) -> None:
    """ValueError where vLLM is to move the parameters `names` to the host's memory, which have no data yet, being
    quantized as they arrive: it does so while it builds the model. Prefetching takes a whole layer's device from the
    first of its parameters, so it will not do for others beside them either."""
    uva, prefetch = config.offload_config.uva, config.offload_config.prefetch
    chosen = uva.cpu_offload_params
    moved = not chosen or any(f".{part}." in f".{name}." for part in chosen for name in names)
    if prefetch.offload_group_size or (uva.cpu_offload_gb and moved):
        option = "--offload-group-size" if prefetch.offload_group_size else "--cpu-offload-gb"
        raise ValueError(
            f"{option} moves weights before they are loaded, and ptpc_fp8 quantizes them as they arrive: leave it out, "
            "or serve what `llm-quant-rocm quantize MODEL OUT --scheme ptpc_fp8` makes of the checkpoint"
        )


def refuse_classifier(config: VllmConfig, head: str) -> None:
    """ValueError where vLLM is to make a classifier of rows of `head`, a quantized output head: it would load that into
    16 bits."""
    model = config.model_config
    if model is None or model.runner_type != "pooling":
        return
    text = model.hf_config.get_text_config()
    tokens = [getattr(part, "classifier_from_token", None) for part in (model.hf_config, text)]
    if any(tokens) and not text.tie_word_embeddings:
        raise ValueError(
            f"{head} is quantized, and classifier_from_token makes a classifier of its rows in 16 bits: export the "
            "checkpoint with this layer on its ignore list, as `llm-quant-rocm quantize` does"
        )


def scalars(**arguments: Any) -> BasevLLMParameter:
    """Values that all ranks have: a model's loader of rows is not for them."""
    return _KeepsLoader(on_other_loader=lambda loader: None, **arguments)


class PreparedOnce(ABC):
    """A method that turns the loaded weights of a layer into what it serves once, however often vLLM asks.

    Attributes:
        prefix: vLLM's name of the layer.
        uses_meta_device: vLLM's mark of methods that quantize while the checkpoint loads.
    """

    prefix: str
    uses_meta_device = False

    @abstractmethod
    def prepare(self, layer: Any) -> None:
        """Turns the layer's loaded weights into what is served."""

    @abstractmethod
    def warm_up(self, layer: Any) -> None:
        """Has the kernels compiled that will serve the layer, on a GPU."""

    def process_weights_after_loading(self, layer: Any) -> None:
        if isinstance(layer, StageMissingLayer):  # the output head of a model that embeds or classifies, never loaded
            return
        # vLLM sets this mark back when it reloads weights.
        prepared = getattr(layer, "_already_called_process_weights_after_loading", False)
        if not prepared:
            self.prepare(layer)
            if current_platform.is_cuda_alike():
                self.warm_up(layer)
            layer._already_called_process_weights_after_loading = True
            # Of a layer that is quantized as it arrives vLLM asks first when all is there that this rank takes, while
            # tensors of other ranks' experts are to come, and again when the model is loaded.
            if self.uses_meta_device:
                return
        # Who trains a model may call its load_weights. Where vLLM reloads weights it has the loaders of before.
        for name, param in layer.named_parameters(recurse=False):
            if name != "bias":  # served as it is
                param.weight_loader = refusing_again(f"{self.prefix}.{name}", _RELOAD)


ENGINE = EngineLayers(
    parameter=Weight,
    scalars=scalars,
    plain=(ColumnParallelLinear, MergedColumnParallelLinear, QKVParallelLinear, ReplicatedLinear, RowParallelLinear),
    embedding=VocabParallelEmbedding,
)

# SPDX-License-Identifier: Apache-2.0
"""The checkpoint tensors of a quantized linear layer, checked as they arrive."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from itertools import accumulate
from threading import Lock, get_ident
from typing import Any

import torch

from llm_quant_rocm.checkpoint.layer_names import shard_name, shard_numbers

_Shard = str | int | tuple[int, ...] | None


# What checkpoints call the weight of a layer that is not quantized.
UNQUANTIZED = "weight"


# What `survey` says of such tensors, too.
SIGNED_CODES = "int8 in the checkpoint, and NVFP4 codes are uint8: fetch or export the checkpoint again"
OTHER_BLOCK_SCALES = "in the checkpoint, and NVFP4's block scales are F8_E4M3: fetch or export the checkpoint again"


def another_dtype(name: str, dtype: torch.dtype, promised: torch.dtype) -> str:
    """What to say of a checkpoint tensor whose dtype is not what the quantization of its layer needs."""
    if name.endswith("_scale"):
        return f"{name} is {dtype} {OTHER_BLOCK_SCALES}"
    if (dtype, promised) == (torch.int8, torch.uint8):
        return f"{name} is {SIGNED_CODES}"
    return (
        f"{name} is {dtype} in the checkpoint, where its quantization_config promises {promised}: if the layer is not "
        "quantized, the ignore list should name it"
    )


def refuse_other_shape(name: str, shape: Sequence[int], expected: tuple[int, int]) -> None:
    """ValueError where the checkpoint tensor `name` has another `shape` than the model's configuration says: engines
    cut what is too large in silence."""
    if tuple(shape) != expected:
        raise ValueError(
            f"{name} has shape {tuple(shape)} in the checkpoint; the model's configuration needs {expected}: the "
            "checkpoint is broken, or made for another model"
        )


@dataclass(frozen=True)
class EngineLayers:
    """An engine's classes, by what `LinearTensors` needs of them.

    Attributes:
        parameter: makes a matrix's parameter of `data`, `input_dim`, `output_dim`, `weight_loader`, and
            `on_other_loader`, which is told of a loader that a model sets in its place.
        scalars: makes a parameter of `data` and `weight_loader`.
        plain: linear layers whose shards hold the checkpoint's rows in their order. Others have rules of their own.
        embedding: embeddings and output heads.
    """

    parameter: Callable[..., torch.nn.Parameter]
    scalars: Callable[..., torch.nn.Parameter]
    plain: tuple[type, ...]
    embedding: type[Any]


class WholeRowCounts:
    """How many rows the checkpoint tensors of `layer` have, on any number of ranks.

    Args:
        layer: a linear layer, or an output head.
        sizes: this rank's rows of each shard.
        output_size: all ranks' rows together.
        engine: the engine's classes.
    """

    def __init__(self, layer: Any, sizes: Sequence[int], output_size: int, engine: EngineLayers) -> None:
        self._layer, self._sizes, self._engine = layer, list(sizes), engine
        self._ranks = output_size // max(1, sum(sizes))

    def of(self, shard: _Shard) -> int | None:
        """The rows of the checkpoint tensor of `shard`, None where the engine alone knows."""
        if isinstance(self._layer, self._engine.embedding):
            return self._layer.org_vocab_size
        # SGLang's Grok may have a file for each rank.
        if type(self._layer) not in self._engine.plain or getattr(self._layer, "use_presharded_weights", False):
            return None
        return sum(self._whole(number) for number in shard_numbers(shard, len(self._sizes)))

    def _whole(self, number: int) -> int:
        """All ranks' rows of shard number `number`."""
        heads = getattr(self._layer, "total_num_kv_heads", None)
        if heads is None or number == 0:
            return self._sizes[number] * self._ranks
        return self._sizes[number] // self._layer.num_kv_heads * heads  # k or v: ranks may have the same heads


class LinearTensors:
    """Declares the parameters of `layer`, and refuses checkpoint tensors that do not fit them.

    Engines' loaders copy: they would convert another dtype, cut a tensor that is too large, and leave what never
    arrives as it was. Here each is an error with the tensor's name.

    Args:
        layer: a linear layer, or an output head.
        prefix: the engine's name of it.
        fused: the engine's packed_modules_mapping.
        sizes: this rank's rows of each shard.
        output_size: all ranks' rows together.
        loader: the engine's weight loader of the layer.
        engine: the engine's classes.
        on_complete: called when the last tensor that must be there is.
    """

    def __init__(
        self,
        layer: Any,
        prefix: str,
        fused: Mapping[str, Sequence[str]],
        sizes: Sequence[int],
        output_size: int,
        loader: Callable[..., Any],
        engine: EngineLayers,
        on_complete: Callable[[], None] = lambda: None,
    ) -> None:
        self._layer = layer
        self._sizes = list(sizes)
        self._row_counts = WholeRowCounts(layer, sizes, output_size, engine)
        self._loader = loader
        self._models_loader: Callable[..., Any] | None = None
        self._inside: set[int] = set()
        self._engine = engine
        self._shards = [shard_name(prefix, shard, fused) for shard in range(len(sizes))]
        self._prefix = prefix
        self._required: list[str] = []
        self._dtypes: dict[str, torch.dtype] = {}
        self._arrived: set[tuple[str, int]] = set()
        self._optional: list[dict[int, torch.Tensor]] = []
        self._on_complete = on_complete
        self._lock = Lock()

    def add_matrix(self, tensor: str, dtype: torch.dtype, columns: int, whole: int) -> None:
        """A parameter [rows, `columns`] of a checkpoint tensor with `whole` columns, loaded by the engine."""

        @wraps(self._loader)  # vLLM binds arguments by the loader's signature
        def load(param: torch.nn.Parameter, loaded_weight: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if get_ident() in self._inside:
                return self._loader(param, loaded_weight, *args, **kwargs)
            shard: _Shard = next(iter((*args, *kwargs.values())), None)
            name = self._name(tensor, shard)
            if loaded_weight.dtype != dtype:
                raise TypeError(another_dtype(name, loaded_weight.dtype, dtype))
            rows = None if self._models_loader else self._row_counts.of(shard)
            refuse_other_shape(name, loaded_weight.shape, (loaded_weight.shape[0] if rows is None else rows, whole))
            # As bytes, where an engine's plugin hides what they are.
            result = self._copy(param, loaded_weight.view(param.dtype), *args, **kwargs)
            self._note(tensor, shard)
            return result

        self._dtypes[tensor] = dtype
        data = torch.empty(sum(self._sizes), columns, dtype=dtype)
        self._register_matrix(tensor, data, load)
        self._required.append(tensor)

    def matrix(self, tensor: str) -> torch.Tensor:
        """What was loaded of a tensor that `add_matrix` declared."""
        return getattr(self._layer, tensor).data.view(self._dtypes[tensor])

    def add_scalars(self, tensor: str) -> None:
        """A parameter, fp32 [shards], of checkpoint tensors with one value for each shard."""

        def load(param: torch.nn.Parameter, loaded_weight: torch.Tensor, loaded_shard_id: _Shard = None) -> None:
            scalar = self._scalar(tensor, loaded_weight, loaded_shard_id)
            for number in shard_numbers(loaded_shard_id, len(self._sizes)):
                param.data[number].copy_(scalar)  # when vLLM reloads weights it counts what is copied so
            self._note(tensor, loaded_shard_id)

        self._register(tensor, torch.full((len(self._sizes),), torch.nan, dtype=torch.float32), load)
        self._required.append(tensor)

    def add_optional_scalars(self, tensor: str) -> dict[int, torch.Tensor]:
        """The values by shard number, to be filled while loading, of tensors that a checkpoint may lack.

        Their parameter is empty: vLLM insists on the checkpoint's having every other one. It is fp32 as the values are:
        of another dtype vLLM warns.
        """
        values: dict[int, torch.Tensor] = {}

        def load(param: torch.nn.Parameter, loaded_weight: torch.Tensor, loaded_shard_id: _Shard = None) -> None:
            scalar = self._scalar(tensor, loaded_weight, loaded_shard_id)
            values.update(dict.fromkeys(shard_numbers(loaded_shard_id, len(self._sizes)), scalar))

        self._register(tensor, torch.empty(0, dtype=torch.float32), load)
        self._optional.append(values)
        return values

    def add_refused(self, tensor: str) -> None:
        """A parameter, empty, whose checkpoint tensor says that the layer is not quantized."""

        def load(param: torch.nn.Parameter, loaded_weight: torch.Tensor, loaded_shard_id: _Shard = None) -> None:
            if get_ident() in self._inside:
                self._loader(param, loaded_weight, loaded_shard_id)
                return
            raise TypeError(another_dtype(self._name(tensor, loaded_shard_id), loaded_weight.dtype, torch.uint8))

        self._register_matrix(tensor, torch.empty(0), load)

    def pieces(self) -> list[tuple[str, slice]]:
        """(the checkpoint's name of its weight, its rows in the layer) of every shard."""
        rows = [slice(end - size, end) for end, size in zip(accumulate(self._sizes), self._sizes, strict=True)]
        return [(f"{shard}.weight", place) for shard, place in zip(self._shards, rows, strict=True)]

    @property
    def is_empty(self) -> bool:
        """Whether nothing has arrived that must."""
        return not self._arrived

    def forget(self) -> None:
        """To be called when what arrived is served: when vLLM reloads weights, all of them must arrive again."""
        self._arrived.clear()
        for values in self._optional:
            values.clear()

    def refuse_missing(self) -> None:
        """ValueError where a tensor of a shard never arrived."""
        for tensor, number in self._missing():
            raise ValueError(
                f"{self._shards[number]}.{tensor} is missing from the checkpoint: if the layer is not quantized, the "
                "ignore list should name it; else fetch or export the checkpoint again"
            )

    def _missing(self) -> list[tuple[str, int]]:
        """The tensors that must still arrive, each with its shard's number."""
        wanted = [(tensor, number) for tensor in self._required for number in range(len(self._shards))]
        return [each for each in wanted if each not in self._arrived]

    def _scalar(self, tensor: str, value: torch.Tensor, shard: _Shard) -> torch.Tensor:
        # SGLang's DeepSeek models give what they make one layer of the scales of both.
        if value.numel() > 1 and bool((value == value.flatten()[0]).all()):
            value = value.flatten()[0]
        if value.numel() != 1:
            raise ValueError(f"{self._name(tensor, shard)} has shape {tuple(value.shape)}; it is one value")
        return value.float().reshape(())

    def _note(self, tensor: str, shard: _Shard) -> None:
        """What has been loaded. Engines may load from several threads: one of them completes the layer."""
        with self._lock:
            before = len(self._arrived)
            self._arrived.update((tensor, number) for number in shard_numbers(shard, len(self._sizes)))
            is_last = len(self._arrived) > before and not self._missing()
        if is_last:
            self._on_complete()

    def _name(self, tensor: str, shard: _Shard) -> str:
        names = {self._shards[number] for number in shard_numbers(shard, len(self._sizes))}
        return f"{names.pop() if len(names) == 1 else self._prefix}.{tensor}"

    def _use(self, loader: Callable[..., Any]) -> None:
        """A model's own loader, of one matrix and so of all: they have the same rows."""
        self._models_loader = loader

    def _copy(self, *args: Any, **kwargs: Any) -> Any:
        """Has the engine, or the model, copy a tensor. A model's loader may leave it to the engine's: to the one that
        it found at one of our parameters."""
        if self._models_loader is None:
            return self._loader(*args, **kwargs)
        self._inside.add(get_ident())
        try:
            return self._models_loader(*args, **kwargs)
        finally:
            self._inside.discard(get_ident())

    def _register_matrix(self, name: str, data: torch.Tensor, loader: Callable[..., Any]) -> None:
        parameter = self._engine.parameter(
            data=data, input_dim=1, output_dim=0, weight_loader=loader, on_other_loader=self._use
        )
        self._layer.register_parameter(name, parameter)

    def _register(self, name: str, data: torch.Tensor, loader: Callable[..., Any]) -> None:
        self._layer.register_parameter(name, self._engine.scalars(data=data, weight_loader=loader))

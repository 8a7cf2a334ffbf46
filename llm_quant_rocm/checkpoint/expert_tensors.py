# SPDX-License-Identifier: Apache-2.0
"""The NVFP4 tensors of routed experts in a checkpoint, checked as they arrive."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch

from llm_quant_rocm.checkpoint.linear_tensors import UNQUANTIZED, another_dtype, refuse_other_shape
from llm_quant_rocm.checkpoint.nvfp4_tensors import Piece, TensorNames, input_global_scale
from llm_quant_rocm.checkpoint.online import refuse_missing
from llm_quant_rocm.formats.nvfp4 import BLOCK

# The parameters' stems, and which of an expert's projections each holds, by engines' names, in the order of their rows.
STEMS = {"w13_": ("w1", "w3"), "w2_": ("w2",)}
# How engines' loaders know a scale of which there are several a row.
_GROUP = "group"


@dataclass(frozen=True)
class ExpertNames:
    """Which experts are here, and what the checkpoint calls them.

    Attributes:
        name: the checkpoint's name of a projection ("w1", "w2" or "w3") of an expert, by the checkpoint's number.
        local: this rank's number of the checkpoint's expert number, or -1.
        whole: the checkpoint's number of this rank's expert number.
    """

    name: Callable[[int, str], str]
    local: Callable[[int], int]
    whole: Callable[[int], int]

    def of_row(self, parameter: str, rows: int, row: int) -> str:
        """The checkpoint's name of the weight in row number `row` of "w13_weight" or "w2_weight", of which each of this
        rank's experts has so many rows."""
        shards = STEMS[parameter.removesuffix("weight")]
        expert, place = divmod(row, rows)
        return f"{self.name(self.whole(expert), shards[place * len(shards) // rows])}.weight"


class ExpertTensors:
    """Declares the parameters of `layer`, and refuses checkpoint tensors that do not fit them.

    Each is an error with the tensor's name, where an engine's loader would convert another dtype, cut a tensor that is
    too large, and leave what never arrives as it was.

    Args:
        layer: routed experts.
        prefix: the engine's name of them.
        experts: which are here, and the checkpoint's names of them.
        names: what the checkpoint calls an expert's tensors.
        loader: the engine's weight loader of the layer.
        attributes: further attributes of parameters that the engine asks for.
    """

    def __init__(
        self,
        layer: torch.nn.Module,
        prefix: str,
        experts: ExpertNames,
        names: TensorNames,
        loader: Callable[..., Any],
        attributes: dict[str, Any],
    ) -> None:
        self._layer = layer
        self._prefix = prefix
        self._experts = experts
        self._names = names
        self._loader = loader
        self._attributes = attributes
        self._arrived: set[tuple[str, int, str]] = set()
        self._input_scales: dict[tuple[int, str], torch.Tensor] = {}

    def add(self, stem: str, experts: int, shape: tuple[int, int], whole: tuple[int, int]) -> None:
        """The parameters of `stem`: `experts` weights of `shape` [N, K] on this rank.

        `whole` is the shape of one projection in the checkpoint.
        """
        names = self._names
        for tensor, dtype, pack in ((names.codes, torch.uint8, 2), (names.scales, torch.float8_e4m3fn, BLOCK)):
            load = self.matrix_loader(tensor, dtype, (whole[0], whole[1] // pack))
            attributes = {**self._attributes, "weight_loader": load}
            if tensor == names.scales:
                attributes["quant_method"] = _GROUP
            self._register(stem + tensor, torch.empty(experts, shape[0], shape[1] // pack, dtype=dtype), attributes)
        scalars = torch.full((experts, len(STEMS[stem])), torch.nan, dtype=torch.float32)
        self._register(stem + names.global_scale, scalars, {"weight_loader": self._global_scale_loader()})
        # The rest is empty, as vLLM insists on the checkpoint's having every other parameter.
        self._register(stem + names.input_scale, torch.empty(0), {"weight_loader": self.input_scale_loader()})
        if names.codes != UNQUANTIZED:
            # No codes have this name: whatever arrives is refused.
            refuse = self.matrix_loader(UNQUANTIZED, torch.uint8, (0, 0))
            self._register(stem + UNQUANTIZED, torch.empty(0), {"weight_loader": refuse})

    @property
    def is_empty(self) -> bool:
        """Whether nothing has arrived that must."""
        return not self._arrived

    def forget(self) -> None:
        """To be called when what arrived is served: when vLLM reloads weights, all of them must arrive again."""
        self._arrived.clear()
        self._input_scales.clear()

    def remove(self, stem: str) -> None:
        """Drop the parameters of `stem`."""
        names = self._names
        for tensor in {names.codes, names.scales, names.global_scale, names.input_scale, UNQUANTIZED}:
            delattr(self._layer, stem + tensor)

    def matrix_loader(self, tensor: str, dtype: torch.dtype, shape: tuple[int, int]) -> Callable[..., Any]:
        """The engine's loader, refusing what it would convert, cut or load in part."""

        @wraps(self._loader)  # vLLM binds arguments by the loader's signature
        def load(
            param: torch.nn.Parameter,
            loaded_weight: torch.Tensor,
            weight_name: str,
            shard_id: str,
            expert_id: int,
            *args: Any,  # vLLM gives options by their names, and when it reloads weights by their places
            **options: Any,
        ) -> Any:
            name = f"{self._experts.name(expert_id, shard_id)}.{tensor}"
            if loaded_weight.dim() == 3:
                raise NotImplementedError(one_for_all(self._prefix, tuple(loaded_weight.shape)))
            if loaded_weight.dtype != dtype:
                raise TypeError(another_dtype(name, loaded_weight.dtype, dtype))
            refuse_other_shape(name, loaded_weight.shape, shape)
            self._arrived.add((tensor, expert_id, shard_id))
            return self._loader(param, loaded_weight, weight_name, shard_id, expert_id, *args, **options)

        return load

    def _global_scale_loader(self) -> Callable[..., Any]:
        """Loads one value for each expert and shard into a parameter [E, shards]."""

        def load(
            param: torch.nn.Parameter,
            loaded_weight: torch.Tensor,
            weight_name: str,
            shard_id: str,
            expert_id: int,
            return_success: bool = False,
        ) -> bool | None:
            tensor = self._names.global_scale
            value = self._one_value(tensor, loaded_weight, shard_id, expert_id)
            self._arrived.add((tensor, expert_id, shard_id))
            expert = self._experts.local(expert_id)
            if expert >= 0:
                param.data[expert, int(shard_id == "w3")] = value.to(param.device)
            return expert >= 0 if return_success else None

        return load

    def input_scale_loader(self) -> Callable[..., Any]:
        """Remembers one value for each expert and shard, which a checkpoint may lack."""

        def load(
            param: torch.nn.Parameter,
            loaded_weight: torch.Tensor,
            weight_name: str,
            shard_id: str,
            expert_id: int,
            return_success: bool = False,
        ) -> bool | None:
            value = self._one_value(self._names.input_scale, loaded_weight, shard_id, expert_id)
            self._input_scales[expert_id, shard_id] = value
            return True if return_success else None

        return load

    def _one_value(self, tensor: str, value: torch.Tensor, shard: str, expert: int) -> torch.Tensor:
        """A copy of the checkpoint's `value`, fp32 []."""
        if value.numel() != 1:
            name = f"{self._experts.name(expert, shard)}.{tensor}"
            raise ValueError(f"{name} has shape {tuple(value.shape)}; it is one value")
        return value.float().reshape(()).clone()

    def input_global_scales(self, stem: str, experts: int) -> torch.Tensor:
        """The scales, fp32 [E], that the inputs of `stem` are encoded with."""
        scales = []
        for expert in range(experts):
            number = self._experts.whole(expert)
            found = [
                self._input_scales[number, shard] for shard in STEMS[stem] if (number, shard) in self._input_scales
            ]
            name = self._experts.name(number, STEMS[stem][0])
            scales.append(input_global_scale(self._names, name, found))
        return torch.stack(scales)

    def pieces(self, stem: str) -> Iterator[Piece]:
        """The weights of `stem` as the checkpoint has them; ValueError where a tensor of one never arrived."""
        names = self._names
        global_scale = getattr(self._layer, stem + names.global_scale).data
        shards = STEMS[stem]
        rows = getattr(self._layer, stem + names.codes).shape[1] // len(shards)
        for expert in range(global_scale.shape[0]):
            number = self._experts.whole(expert)
            for index, shard in enumerate(shards):
                name = self._experts.name(number, shard)
                wanted = (names.codes, names.scales, names.global_scale)
                refuse_missing(f"{name}.{tensor}" for tensor in wanted if (tensor, number, shard) not in self._arrived)
                yield Piece(
                    f"{name}.weight", (expert, slice(index * rows, (index + 1) * rows)), global_scale[expert, index]
                )

    def _register(self, name: str, data: torch.Tensor, attributes: dict[str, Any]) -> None:
        parameter = torch.nn.Parameter(data, requires_grad=False)
        for key, value in attributes.items():
            setattr(parameter, key, value)
        self._layer.register_parameter(name, parameter)


def one_for_all(experts: str, shape: tuple[int, ...]) -> str:
    """Why experts are not served that have one tensor of this shape, and the cure."""
    return (
        f"{experts} has one tensor for all experts in the checkpoint (shape {shape}), and nvfp4_triton reads one for "
        "each: leave the checkpoint to the engine with LLM_QUANT_ROCM_NVFP4=0"
    )

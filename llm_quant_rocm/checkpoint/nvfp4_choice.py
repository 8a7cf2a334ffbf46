# SPDX-License-Identifier: Apache-2.0
"""Who serves each layer of an NVFP4 checkpoint: our methods, or the engine's own configuration of the format."""

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import TypeVar

import torch

from llm_quant_rocm.checkpoint.nvfp4_kinds import MODELOPT_ALGORITHMS, NAME, Options, excluded, summary, takeover
from llm_quant_rocm.checkpoint.undescribed import refusing_codes

Method = TypeVar("Method")

# What compressed-tensors' target "Linear" names.
_LINEAR = torch.nn.Linear(1, 1, device="meta")

logger = logging.getLogger("llm_quant_rocm")


@cache
def log_takeover(kind: str, engine: str) -> None:
    """Log once that checkpoints of `kind` are served here."""
    logger.info(takeover(kind, engine))


class LayerChoice:
    """The layers of one model, by who serves them.

    Args:
        engine: its name, for messages.
    """

    def __init__(self, engine: str) -> None:
        self._engine = engine
        # Those that `report` has not named yet.
        self._layers: defaultdict[str, list[str]] = defaultdict(list)

    def choose(
        self,
        prefix: str,
        algorithm: str | None,
        nvfp4: Callable[[], Method],
        fp8: Callable[[], Method] | None,
        engines: Callable[[], Method | None],
        unquantized: type[Method],
        fused: Mapping[str, Sequence[str]],
    ) -> Method | None:
        """The method that serves the layer `prefix`: ours for NVFP4, and for FP8 where we have one, else the engine's.

        Args:
            algorithm: ModelOpt's name of what the layer is quantized with, None for one that we do not know.
            nvfp4, fp8: make ours; `fp8` is None for a layer of experts.
            engines: makes that of the engine's configuration of the format.
            unquantized: the engine's method for linear layers that are not quantized, which refuses codes from now on.
            fused: the engine's packed_modules_mapping.

        Raises:
            ValueError: an algorithm that neither knows. The engine would take the layer for one that is not quantized.
        """
        if algorithm in MODELOPT_ALGORITHMS:
            self._layers["linear layers" if fp8 else "mixture-of-experts layers"].append(prefix)
            return nvfp4()
        if algorithm == "FP8" and fp8:
            self._layers["linear layers in FP8"].append(prefix)
            return fp8()
        method = engines()
        if algorithm is not None and (method is None or isinstance(method, unquantized)):
            raise ValueError(
                f"quant_algo {algorithm} of {prefix} is known neither to {NAME} nor to this {self._engine}: export the "
                f"model with {', '.join(MODELOPT_ALGORITHMS)} or FP8 there, or update {self._engine}"
            )
        self._layers[f"layers left to {self._engine}"].append(prefix)
        return refusing_codes(method, prefix, fused) if isinstance(method, unquantized) else method

    def report(self, options: Options) -> None:
        """Log once what is served and what is not. Call it when the whole model exists; layers that predict further
        tokens, which an engine makes later as a model of their own, get a line of their own."""
        if self._layers:
            logger.info(summary(self._layers, options))
            self._layers.clear()


class ModelOptExclusions:
    """ModelOpt's list of excluded modules, whose patterns engines compare with their own names of fused layers alone.

    To stand before an engine's configuration of ModelOpt's checkpoints among the bases of a class.
    """

    packed_modules_mapping: dict[str, list[str]]

    def is_layer_excluded(self, prefix: str) -> bool:
        """Whether the checkpoint keeps `prefix` as it was.

        Raises:
            ValueError: it keeps some shards of a fused layer and not others.
        """
        return excluded(prefix, self.packed_modules_mapping, super().is_layer_excluded)  # type: ignore[misc]


def as_targeted(head: torch.nn.Module, ignore: Iterable[str]) -> torch.nn.Module:
    """The module to compare compressed-tensors' targets with for an engine's output head.

    It was a Linear to who wrote the checkpoint, so that the target "Linear" means it, unless the list `ignore` speaks
    of heads, by whatever name: in Mistral's own format it is "output".
    """
    stays = any("lm_head" in entry or entry == "output" for entry in ignore)
    return head if stays else _LINEAR

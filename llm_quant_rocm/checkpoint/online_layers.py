# SPDX-License-Identifier: Apache-2.0
"""Which layers of a 16-bit checkpoint `ptpc_fp8` quantizes, and which it leaves: the user's list, routers, the rest."""

import logging
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from llm_quant_rocm.checkpoint.layer_names import fused_names

NAME = "ptpc_fp8"

LINEAR = "linear layers"
EXPERTS = "mixture-of-experts layers"
IGNORED = "layers named by ignored_layers"
ROUTERS = "router gates"
EMBEDDINGS = "embeddings and output heads"

_EXPRESSION = "re:"

logger = logging.getLogger("llm_quant_rocm")

# A router's logits choose experts: FP8 noise flips the choice. No model's projection (gate_proj, gate_up_proj,
# per_layer_input_gate) matches. The names are those of the engines' models.
_ROUTER = re.compile(r"(^|\.)(gate|(\w+_)?router|\w*experts?_gate)(\.|$)")
_EMBEDDING = re.compile(r"(^|\.)\w*embed\w*\.")
# Of classifiers and reward models; engines compute them in fp32. No layer within a model matches.
_HEAD = re.compile(r"(^|\.)(score|classifier)(\.\w+)?$")


def read_ignored_layers(config: Mapping[str, Any], known: Sequence[str] = ()) -> list[str]:
    """The `ignored_layers` of a `quantization_config`, in which an engine puts the keys `known` of its own.

    Raises:
        ValueError: another method's configuration, a key that is not known, or an entry that can match no layer.
    """
    if not isinstance(config, Mapping):
        raise ValueError(f"{NAME}'s configuration is {config!r}: it must be a JSON object with ignored_layers")
    method = config.get("quant_method") or NAME
    if method != NAME:
        raise ValueError(already_quantized(method))
    unknown = sorted(set(config) - {"quant_method", "ignored_layers", *known})
    if unknown:
        raise ValueError(f"{NAME} knows no setting {', '.join(unknown)}: it takes ignored_layers alone")
    ignored = config.get("ignored_layers") or []
    if not isinstance(ignored, list) or not all(isinstance(entry, str) and entry for entry in ignored):
        # Of a text, each letter would be taken for a name.
        raise ValueError(f"ignored_layers is {ignored!r}: it must be a list of layers' names")
    for entry in ignored:
        if entry.startswith(_EXPRESSION):
            try:
                re.compile(entry.removeprefix(_EXPRESSION))
            except re.error as error:
                raise ValueError(
                    f'{entry!r} in ignored_layers is no regular expression ({error}): mend it, or drop "re:"'
                ) from error
    return list(ignored)


def already_quantized(method: str | None) -> str:
    """What to say to a user who asks to quantize a checkpoint of `method` again."""
    named = method or "its quantization_config names no quant_method"
    return (
        f"the checkpoint is already quantized ({named}) and {NAME} quantizes BF16 and FP16 checkpoints: serve it "
        f"without --quantization {NAME}, or serve the unquantized checkpoint"
    )


def is_router(prefix: str) -> bool:
    """Whether a layer of this name chooses experts."""
    return _ROUTER.search(prefix) is not None


def is_embedding(prefix: str) -> bool:
    """Whether a layer of this name is a part of an embedding, to whose weight's dtype models convert images."""
    return _EMBEDDING.search(prefix) is not None


def is_head(prefix: str) -> bool:
    """Whether a layer of this name is what a classifier or a reward model answers with."""
    return _HEAD.search(prefix) is not None


class OnlineLayers:
    """The layers of one model, by what becomes of them.

    Args:
        ignored: layers to leave unquantized. Each entry is a layer's name, the name of a part of the model
            ("model.layers.0", all layers below it), the end of a name ("o_proj"), or "re:" and a regular expression
            that matches from a name's beginning. A fused layer (qkv_proj, gate_up_proj) goes by its own name or by
            the checkpoint's names of all its shards.
    """

    def __init__(self, ignored: Sequence[str] = ()) -> None:
        self.ignored = list(ignored)
        # What the engine calls each entry.
        self._called = {entry: [entry] for entry in ignored}
        # Those that `report` has not named yet.
        self._layers: defaultdict[str, list[str]] = defaultdict(list)
        self._reported = False

    def rename(self, names_in_engine: Callable[[list[str]], list[str]]) -> None:
        """Give the entries the engine's names where these are not the checkpoint's; expressions stay as they are."""
        names = [entry for entry in self._called if not entry.startswith(_EXPRESSION)]
        self._called |= {entry: names_in_engine(self._called[entry]) for entry in names}
        expressions = [entry for entry in self._called if entry.startswith(_EXPRESSION)]
        self.ignored = [name for entry in names for name in self._called[entry]] + expressions

    def note(self, kind: str, prefix: str) -> None:
        """Remember that the layer `prefix` is of `kind`."""
        self._layers[kind].append(prefix)

    def is_ignored(self, prefix: str, fused: Mapping[str, Sequence[str]]) -> bool:
        """Whether the user's list names the layer `prefix`, whose shards `fused` names.

        Raises:
            ValueError: it names some shards of a fused layer and not others.
        """
        names = _names(prefix, fused)
        whole, *shards = [any(_matches(entry, name) for entry in self.ignored) for name in names]
        if not whole and any(shards) and not all(shards):
            raise ValueError(
                f"ignored_layers names some shards of {prefix} and not others: name all of {', '.join(names[1:])}, "
                "or none"
            )
        return whole or (bool(shards) and all(shards))

    def kind(self, prefix: str, fused: Mapping[str, Sequence[str]]) -> str:
        """LINEAR of a linear layer that is quantized; of another IGNORED, ROUTERS or EMBEDDINGS.

        Raises:
            ValueError: as of `is_ignored`.
        """
        if self.is_ignored(prefix, fused):
            return IGNORED
        if is_router(prefix):
            return ROUTERS
        return EMBEDDINGS if is_head(prefix) or is_embedding(prefix) else LINEAR

    def report(self, fused: Mapping[str, Sequence[str]]) -> None:
        """Log once what is quantized and what is not. Call it when the whole model exists; layers that predict further
        tokens, which an engine makes later as a model of their own, get a line of their own."""
        layers, self._layers = self._layers, defaultdict(list)
        if not layers:
            return
        quantized = [f"{len(layers[kind])} {kind}" for kind in (LINEAR, EXPERTS) if layers[kind]]
        left = [
            f"{len(names)} {kind} ({_abbreviate(names)})"
            for kind, names in layers.items()
            if names and kind not in (LINEAR, EXPERTS)
        ]
        logger.info(
            "%s: quantizing %s to E4M3, one scale an output channel; left as they are: %s",
            NAME,
            " and ".join(quantized) or "nothing",
            "; ".join(left) or "none",
        )
        if self._reported:
            return
        self._reported = True
        seen = [name for prefix in layers[IGNORED] for name in _names(prefix, fused)]
        for entry, called in self._called.items():
            if not any(_matches(one, name) for one in called for name in seen):
                logger.warning(
                    "%s: ignored_layers names %r, which no layer of this process matches so far", NAME, entry
                )


def _names(prefix: str, fused: Mapping[str, Sequence[str]]) -> list[str]:
    """The names a layer goes by: the engine's, and those of its shards where it is fused."""
    return [prefix, *fused_names(prefix, fused)]


def _matches(entry: str, name: str) -> bool:
    if entry.startswith(_EXPRESSION):
        return re.match(entry.removeprefix(_EXPRESSION), name) is not None
    return name == entry or name.startswith(f"{entry}.") or name.endswith(f".{entry}")


def _abbreviate(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")

# SPDX-License-Identifier: Apache-2.0
"""What the checkpoint calls the layers of a model, where SGLang calls them otherwise and no mapper of it says so."""

from collections.abc import Iterable, Mapping
from typing import Any

# What SGLang calls the layer of a draft model (MTP, EAGLE), and what the checkpoint, in whose lists it stands; {} is
# how many layers come before it. Models whose names end so:
_DRAFT = "NextN", ("model.decoder.", "model.layers.{}.")
# And others:
_DRAFTS = {
    **dict.fromkeys(
        ("ExaoneMoEForCausalLMMTP", "Qwen3MoeForCausalLMMTP", "Qwen3NextForCausalLMMTP"),
        ("model.layers.0.", "mtp.layers.0."),
    ),
    **dict.fromkeys(("LlamaForCausalLMEagle", "Qwen2ForCausalLMEagle"), ("model.", "")),
    "DeepseekV4ForCausalLMNextN": ("model.decoder.", "mtp.0."),
    "Ernie4_5_MoeForCausalLMMTP": ("model.mtp_block.", "model.mtp_block.0."),
    "GlmOcrForConditionalGenerationNextN": ("model.decoder.", "model.language_model.layers.{}."),
    "HYV4ForCausalLMNextN": ("model.decoder.", "model.mtp_layers.0."),
    "IQuestQ1MTP": ("model.mtp_layer.", "mtp."),
    "LongcatFlashForCausalLMNextN": ("", "model.mtp.layers.0."),
    "MiMoMTP": ("", "model.mtp_layers.0."),
    "MiMoV2MTP": ("model.decoder.", "model.mtp.layers.0."),
}


class Names:
    """The names of one model's layers.

    Args:
        model: its configuration of transformers', whose architecture is what SGLang calls the model.
    """

    def __init__(self, model: Any = None) -> None:
        self.architecture = "" if model is None else str(model.architectures[0])
        # Whether it is a draft model that reads no output head, but takes its target's.
        self.is_headless = self.architecture.endswith("Eagle")
        # What SGLang rewrites the checkpoint's names in lists by.
        self.mapper: Any = None
        self.draft: tuple[str, str] | None = None
        ending, usual = _DRAFT
        if names := _DRAFTS.get(self.architecture, usual if self.architecture.endswith(ending) else None):
            layers = (getattr(model, "text_config", None) or model).num_hidden_layers
            self.draft = names[0], names[1].format(layers)

    def in_checkpoint(self, prefix: str) -> str:
        """The name of the layer that SGLang calls `prefix`, for messages: the checkpoint's if it is a draft's."""
        prefix = prefix.removeprefix(".")  # HunYuan's begin with the name of nothing
        if self.draft and prefix.startswith(self.draft[0]):
            return self.draft[1] + prefix.removeprefix(self.draft[0])
        return prefix

    def in_lists(self, name: str) -> str:
        """What lists call a layer `name`, as `in_checkpoint` names it."""
        return str(self.mapper.apply_list([name])[0]) if self.draft and self.mapper else name


class ListedNames:
    """A model's mapper, as SGLang's configurations ask it for the names in a checkpoint's lists.

    It rewrites the names of tensors, and not always to what the model calls its layers: Qwen3-VL's begin with
    model.language_model and model.visual, of which it makes language_model.model and visual, Qwen2.5-VL's with model.
    A part of a model ("model.visual*") it takes for another one, and in transformers' models it puts "model." before
    all that it does not know ("lm_head", "Linear", "*o_proj"). So an entry stays, beside what the mapper makes of it.

    Args:
        mapper: SGLang's.
    """

    def __init__(self, mapper: Any) -> None:
        self._mapper = mapper

    def apply_list(self, entries: Iterable[str]) -> list[str]:
        """All names by which layers may go that `entries` name."""
        return list(dict.fromkeys(name for entry in entries for name in self._names(entry)))

    def apply_dict(self, entries: Mapping[str, Any]) -> dict[str, Any]:
        """The same of a mapping's keys."""
        return {name: value for entry, value in entries.items() for name in self._names(entry)}

    def _names(self, entry: str) -> list[str]:
        stem = entry.removesuffix("*").removesuffix(".")
        below = self._mapper.apply_list([f"{stem}."])  # rules for beginnings end in a dot
        behind = self._mapper.apply_list([f".{entry}"])  # and behind one they match nothing, where others do
        made = self._mapper.apply_list([entry]) + [name.removesuffix(".") + entry.removeprefix(stem) for name in below]
        made += [name.removeprefix("language_model.") for name in made]
        return [entry, *made, *(name.removeprefix(".") for name in behind)]

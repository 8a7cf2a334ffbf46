# SPDX-License-Identifier: Apache-2.0
"""What demo, eval and bench compare: how a model is stored, and what vLLM is told."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from rich.console import Console

from llm_quant_rocm.cli import _vllm, _worker
from llm_quant_rocm.cli._arguments import config_at, listed
from llm_quant_rocm.cli._errors import CommandError, sentence, understood

_SECONDS = 300  # importing vLLM for the first time may compile


@dataclass(frozen=True)
class Method:
    """How the model is stored, and what vLLM is told.

    Attributes:
        layout: that of an NVFP4 checkpoint made of the model (`layouts.LAYOUTS` of `checkpoint`); None is the model
            as it is.
        quantization: vLLM's --quantization; None is no flag.
        environment: variables that the engine sees besides.
        folder: another checkpoint that is served in the model's place.
    """

    layout: str | None = None
    quantization: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    folder: Path | None = None

    def checkpoint(self, model: Path, scratch: Path) -> Path:
        """The folder to serve. An NVFP4 checkpoint is made in `scratch`, once a layout.

        Raises:
            CommandError: the model cannot become one.
        """
        if self.folder is not None:
            return self.folder
        if self.layout is None:
            return model
        from llm_quant_rocm.checkpoint.quantize import quantize_checkpoint

        try:
            quantize_checkpoint(model, scratch / self.layout, self.layout, search=True)
        except (ValueError, TypeError, OSError) as error:
            raise CommandError(f"{model} cannot become an NVFP4 checkpoint: {sentence(error)}.") from error
        return scratch / self.layout


# Under names of our own; every other name is one of vLLM's --quantization.
NAMED = {
    "bf16": Method(),
    "nvfp4": Method(layout="compressed-tensors"),
    "nvfp4_prefill_fp8": Method(layout="compressed-tensors", environment={"LLM_QUANT_ROCM_NVFP4_PREFILL": "fp8"}),
}


def methods_named(names: str) -> dict[str, Method]:
    """The methods of a list separated by commas: bf16, nvfp4, nvfp4_prefill_fp8, names of vLLM's --quantization, and
    folders of checkpoints that the model became.

    Raises:
        CommandError: an empty list, a name given twice, or the folder of no checkpoint.
    """
    methods: dict[str, Method] = {}
    for name in listed(names):
        if name in methods:
            raise CommandError(f"--quantization names {name} twice.")
        if "/" in name:
            if not Path(name, "config.json").is_file():
                raise CommandError(f"--quantization names {name}, which is no checkpoint's folder.")
            methods[name] = Method(folder=Path(name))
        else:
            methods[name] = NAMED.get(name) or Method(quantization=name)
    if not methods:
        raise CommandError("--quantization names nothing: name some, for example bf16,ptpc_fp8,nvfp4.")
    return methods


def config_of(
    model: Path,
    methods: Mapping[str, Method],
    cure: str = "give the 16-bit checkpoint as MODEL, and name this folder, with a /, in --quantization",
) -> dict[str, Any]:
    """What config.json says of the language model that `methods` are to be compared on.

    Raises:
        CommandError: it cannot be read, or the model is quantized already and one of the methods is made of it: an
            engine would serve it quantized under the name bf16. Not where all methods have folders of their own.
    """
    from llm_quant_rocm.checkpoint.survey import quantization_of

    config = config_at(model)
    with understood(model):
        quantized = quantization_of(model, config) is not None
        config = {**config, **(config.get("text_config") or {})}
    if quantized and any(method.folder is None for method in methods.values()):
        raise CommandError(f"{model} is quantized already, and would be measured as if it were not: {cure}.")
    return config


def longest_of(config: Mapping[str, Any]) -> int | None:
    """The longest sequence of a model, in tokens, where `config_of` it says so."""
    found = config.get("max_position_embeddings")
    return found if isinstance(found, int) else None


class Failures:
    """Of a list of methods those that failed, which cost the others nothing: engines take minutes to hours.

    Attributes:
        reasons: by method, what stopped it.
    """

    def __init__(self) -> None:
        self.reasons: dict[str, str] = {}

    @contextmanager
    def kept(self, name: str, found: Mapping[str, Any], messages: Console) -> Iterator[None]:
        """Keeps a CommandError, but that of the first method, with which the others of `found` are compared."""
        try:
            yield
        except CommandError as error:
            if not found:
                raise
            self.reasons[name] = str(error)
            messages.print(f"{name} failed; its log comes at the end", style="red", highlight=False)

    def report(self) -> None:
        """Raises a CommandError that holds all of them, where any failed."""
        if self.reasons:
            raise CommandError("\n".join(f"{name}: {reason}" for name, reason in self.reasons.items()))


def refuse_unknown(methods: Mapping[str, Method], messages: Console) -> None:
    """Ask the installed vLLM, in a process of its own, for its names of quantizations, where `methods` has any besides
    those of this package: an engine would say the same, behind the minutes that the methods before it take.

    Raises:
        CommandError: it has no such name.
    """
    asked = [method.quantization for method in methods.values() if method.quantization]
    if not any(name != _vllm.PTPC for name in asked):
        return
    with messages.status("asking vLLM which quantizations it knows"):
        known = _worker.run("llm_quant_rocm.cli._names_worker", {}, "vLLM, asked for its quantizations,", {}, _SECONDS)
    for name in asked:
        if name not in known:
            every = sorted({*NAMED, *known})
            near = ", ".join(get_close_matches(name, every) or every)
            raise CommandError(f"--quantization names {name}, which vLLM does not know: it could be {near}.")

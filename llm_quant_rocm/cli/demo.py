# SPDX-License-Identifier: Apache-2.0
"""`llm-quant-rocm demo`: serve a BF16 checkpoint as PTPC FP8, then show what PTPC and NVFP4 cost in accuracy."""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from llm_quant_rocm.cli import _evaluate, _vllm
from llm_quant_rocm.cli._errors import CommandError, reported
from llm_quant_rocm.cli._evaluate import Evaluation
from llm_quant_rocm.cli._json import print_json
from llm_quant_rocm.cli._methods import Method, config_of
from llm_quant_rocm.cli._server import complete, serving

PROMPT = "The following methods are supported by"
PROMPT_TOKENS = 48
CONTEXT = 512  # tokens
LARGEST_LOSS_PERCENT = 1.0  # what PTPC may add to the word perplexity of BF16
# What NVFP4 may add: 4-bit weights cost a model of this size, with outliers in its channels, some 8%.
LARGEST_NVFP4_LOSS_PERCENT = 10.0
# Of two checkpoints with the same values. Not 100: now and then vLLM on a CPU gives one checkpoint other last bits than
# the run before, and another most likely token at a few places.
LEAST_AGREEMENT_PERCENT = 99.5


BF16, PER_TENSOR, PTPC = "BF16", "per-tensor FP8", "PTPC FP8"
NVFP4 = ("NVFP4, compressed-tensors", "NVFP4, ModelOpt")
NVFP4_FP8 = "NVFP4, prefill in FP8"
# fp8_per_tensor is upstream's own, ptpc_fp8 the plugin's. NVFP4 checkpoints need no flag.
METHODS = {
    BF16: Method(),
    PER_TENSOR: Method(quantization="fp8_per_tensor"),
    PTPC: Method(quantization=_vllm.PTPC),
    NVFP4[0]: Method(layout="compressed-tensors"),
    NVFP4[1]: Method(layout="modelopt"),
    NVFP4_FP8: Method(layout="modelopt", environment={"LLM_QUANT_ROCM_NVFP4_PREFILL": "fp8"}),
}


@dataclass(frozen=True)
class Verdict:
    """Whether the demo passed, and the line that says so."""

    passed: bool
    line: str


def demo(
    model: Annotated[
        Path | None, typer.Option(help="A BF16 checkpoint's folder, with heldout.txt; by default examples/demo_model.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON instead of a table.")] = False,
) -> None:
    """Serve a model with `vllm serve --quantization ptpc_fp8`, and measure what PTPC and NVFP4 cost in accuracy."""
    output = Console()
    messages = Console(stderr=True) if as_json else output
    with reported("demo", messages):
        folder = find_model(model)
        _vllm.require()
        config_of(folder, METHODS, "name a 16-bit checkpoint by --model")
        start = time.monotonic()
        completion = _serve_and_complete(folder, messages)
        results = _evaluate.evaluate_all(folder, folder / "heldout.txt", METHODS, messages, context=CONTEXT)
        verdict = judge(results)
        if as_json:
            seconds = round(time.monotonic() - start, 1)
            print_json(output, figures(results, folder, completion, verdict) | {"seconds": seconds})
        else:
            output.print(table(results))
            output.print(verdict.line, highlight=False, soft_wrap=True)
    if not verdict.passed:
        raise typer.Exit(1)


def find_model(model: Path | None) -> Path:
    """The checkpoint's folder: the given one, or the demo model of the repository.

    Raises:
        CommandError: there is no checkpoint, or no held-out text beside it.
    """
    if model is None:
        places = (Path.cwd(), Path(__file__).resolve().parents[2])
        found = [place / "examples" / "demo_model" for place in places]
        model = next((place for place in found if place.is_dir()), None)
        if model is None:
            raise CommandError("the demo model is not here: start in the repository's folder, or name one by --model.")
    for name in ("config.json", "heldout.txt"):
        if not (model / name).is_file():
            raise CommandError(f"{model} has no {name}: --model names a checkpoint's folder that also holds it.")
    return model


def judge(results: Mapping[str, Evaluation]) -> Verdict:
    """Whether the losses are what they should be, and which are not.

    PTPC loses at most ``LARGEST_LOSS_PERCENT``, and less than upstream's per-tensor FP8. NVFP4 loses at most
    ``LARGEST_NVFP4_LOSS_PERCENT``, and both kinds of checkpoints choose the same tokens, up to what an engine's
    runs differ by: they hold the same values.
    """
    loss = {name: result.loss_percent(results[BF16]) for name, result in results.items()}
    nvfp4 = max((loss[name] for name in NVFP4), key=lambda x: (math.isnan(x), x))
    compared = (
        f"PTPC loses {loss[PTPC]:.2f}% word perplexity, per-tensor FP8 {loss[PER_TENSOR]:.2f}%, NVFP4 {nvfp4:.2f}%"
    )
    failures = []
    # Negated, so that NaN fails.
    if not loss[PTPC] <= LARGEST_LOSS_PERCENT:
        failures.append(f"PTPC may lose at most {LARGEST_LOSS_PERCENT:g}%")
    if not loss[PTPC] < loss[PER_TENSOR]:
        failures.append("PTPC must lose less than per-tensor")
    if not all(loss[name] <= LARGEST_NVFP4_LOSS_PERCENT for name in (*NVFP4, NVFP4_FP8)):
        failures.append(f"NVFP4 may lose at most {LARGEST_NVFP4_LOSS_PERCENT:g}%")
    if not results[NVFP4[0]].agreement_percent(results[NVFP4[1]]) >= LEAST_AGREEMENT_PERCENT:
        failures.append("the two NVFP4 checkpoints must choose the same tokens")
    if failures:
        return Verdict(False, f"demo: FAILED. {compared}; {'; '.join(failures)}")
    return Verdict(True, f"demo: passed. {compared}")


def table(results: Mapping[str, Evaluation]) -> Table:
    """The figures, one row a method."""
    flags = {name: METHODS[name].quantization or "(none)" for name in results}
    title = "Accuracy over the held-out text, measured in vLLM"
    return _evaluate.table(title, results, BF16, {"vLLM\n--quantization": flags})


def figures(results: Mapping[str, Evaluation], model: Path, completion: str, verdict: Verdict) -> dict[str, Any]:
    """The figures for ``--json``."""
    baseline = results[BF16]
    return {
        "model": str(model),
        "prompt": PROMPT,
        "completion": completion,
        "words": baseline.words,
        "tokens": len(baseline.greedy),
        "methods": {
            name: {
                "checkpoint": METHODS[name].layout or "bf16",
                "quantization": METHODS[name].quantization,
                "environment": dict(METHODS[name].environment),
                "word_perplexity": result.word_perplexity,
                "loss_percent": result.loss_percent(baseline),
                "greedy_agreement_percent": result.agreement_percent(baseline),
                "linear_methods": result.kernels,
            }
            for name, result in results.items()
        },
        "passed": verdict.passed,
        "verdict": verdict.line,
    }


def _serve_and_complete(model: Path, messages: Console) -> str:
    messages.print(f"[bold]vllm serve {escape(str(model))} --quantization {_vllm.PTPC}[/bold]", soft_wrap=True)
    with (
        messages.status("starting the server") as status,
        serving(
            model,
            CONTEXT,
            _vllm.PTPC,
            ["--gpu-memory-utilization", str(_vllm.memory_fraction()), "--enforce-eager"],
            on_wait=lambda waited: status.update(f"starting the server, {waited:.0f} s"),
        ) as url,
    ):
        status.update("completing a prompt")
        completion = complete(url, PROMPT, PROMPT_TOKENS)
        status.update("stopping the server")
    if not completion.strip():
        raise CommandError("the server completed the prompt with nothing.")
    messages.print(f"[dim]{escape(PROMPT)}[/dim]{escape(completion)}\n", highlight=False)
    return completion

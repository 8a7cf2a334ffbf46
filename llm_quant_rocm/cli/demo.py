# SPDX-License-Identifier: Apache-2.0
"""`llm-quant-rocm demo`: serve a BF16 checkpoint as PTPC FP8, then show what the quantization costs in accuracy."""

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from llm_quant_rocm.cli import _vllm
from llm_quant_rocm.cli._errors import CommandError
from llm_quant_rocm.cli._evaluate import Evaluation, evaluate
from llm_quant_rocm.cli._server import complete, serving

PROMPT = "The following methods are supported by"
PROMPT_TOKENS = 48
CONTEXT = 512  # tokens
LARGEST_LOSS_PERCENT = 1.0  # issue 2: what PTPC may add to the word perplexity of BF16

BF16, PER_TENSOR, PTPC = "BF16", "per-tensor FP8", "PTPC FP8"
# vLLM's names of the methods. fp8_per_tensor is upstream's own, ptpc_fp8 the plugin's.
METHODS = {BF16: None, PER_TENSOR: "fp8_per_tensor", PTPC: _vllm.PTPC}


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
    """Serve a model with `vllm serve --quantization ptpc_fp8`, complete a prompt, and measure the accuracy."""
    output = Console()
    messages = Console(stderr=True) if as_json else output
    try:
        folder = find_model(model)
        _vllm.require()
        start = time.monotonic()
        completion = _serve_and_complete(folder, messages)
        results = _evaluate_all(folder, messages)
    except CommandError as error:
        messages.print(f"[red]demo: FAILED[/red]. {escape(str(error))}", soft_wrap=True, highlight=False)
        raise typer.Exit(1) from None
    verdict = judge(results)
    if as_json:
        seconds = round(time.monotonic() - start, 1)
        output.print_json(json.dumps(figures(results, folder, completion, verdict) | {"seconds": seconds}))
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
    """Passed when PTPC loses at most ``LARGEST_LOSS_PERCENT`` and less than upstream's per-tensor FP8."""
    ptpc, per_tensor = (results[name].loss_percent(results[BF16]) for name in (PTPC, PER_TENSOR))
    compared = f"PTPC loses {ptpc:.2f}% word perplexity, per-tensor FP8 {per_tensor:.2f}%"
    if not ptpc <= LARGEST_LOSS_PERCENT:  # also when it is NaN
        return Verdict(False, f"demo: FAILED. {compared}; PTPC may lose at most {LARGEST_LOSS_PERCENT:g}%")
    if not ptpc < per_tensor:
        return Verdict(False, f"demo: FAILED. {compared}; PTPC must lose less than per-tensor")
    return Verdict(True, f"demo: passed. {compared}")


def table(results: Mapping[str, Evaluation]) -> Table:
    """The figures, one row a method."""
    rendered = Table(title="Accuracy over the held-out text, measured in vLLM")
    rendered.add_column("method")
    rendered.add_column("vLLM --quantization")
    for heading in ("word perplexity", "loss", "greedy agreement with BF16"):
        rendered.add_column(heading, justify="right")
    baseline = results[BF16]
    for name, result in results.items():
        compared = name != BF16
        rendered.add_row(
            name,
            METHODS[name] or "(none)",
            f"{result.word_perplexity:.2f}",
            f"{result.loss_percent(baseline):+.2f}%" if compared else "",
            f"{result.agreement_percent(baseline):.2f}%" if compared else "",
        )
    return rendered


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
                "quantization": METHODS[name],
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
        serving(model, CONTEXT, on_wait=lambda waited: status.update(f"starting the server, {waited:.0f} s")) as url,
    ):
        status.update("completing a prompt")
        completion = complete(url, PROMPT, PROMPT_TOKENS)
        status.update("stopping the server")
    if not completion.strip():
        raise CommandError("the server completed the prompt with nothing.")
    messages.print(f"[dim]{escape(PROMPT)}[/dim]{escape(completion)}\n", highlight=False)
    return completion


def _evaluate_all(model: Path, messages: Console) -> dict[str, Evaluation]:
    results = {}
    for number, (name, quantization) in enumerate(METHODS.items(), 1):
        began = time.monotonic()
        with messages.status(f"measuring {name} in vLLM ({number} of {len(METHODS)})"):
            results[name] = evaluate(model, model / "heldout.txt", quantization=quantization, context=CONTEXT)
        messages.print(f"measured {name} in {time.monotonic() - began:.0f} s", highlight=False)
    return results

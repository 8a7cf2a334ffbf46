# SPDX-License-Identifier: Apache-2.0
"""Accuracy of a model over a text, computed by a real vLLM."""

import math
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from llm_quant_rocm.cli import _vllm, _worker
from llm_quant_rocm.cli._methods import Failures, Method


@dataclass(frozen=True)
class Evaluation:
    """What a model says about a text.

    Attributes:
        loss: negative log-likelihood of all tokens, in nats.
        words: words of the text, as separated by white space.
        greedy: the most likely token at every position, given the text before it (teacher forcing).
        kernels: the classes of vLLM's quantization methods on its layers.
    """

    loss: float
    words: int
    greedy: tuple[int, ...]
    kernels: tuple[str, ...]

    @property
    def word_perplexity(self) -> float:
        """exp of the loss per word: does not depend on the tokenizer."""
        return _exp(self.loss / self.words)

    def loss_percent(self, baseline: "Evaluation") -> float:
        """By how much the word perplexity is above the baseline's, in percent."""
        return 100.0 * (_exp((self.loss - baseline.loss) / self.words) - 1.0)

    def agreement_percent(self, baseline: "Evaluation") -> float:
        """Share of the positions at which both choose the same token, in percent."""
        if len(self.greedy) != len(baseline.greedy):
            raise ValueError("the evaluations are of different texts")
        same = sum(a == b for a, b in zip(self.greedy, baseline.greedy, strict=True))
        return 100.0 * same / len(self.greedy)


def _exp(x: float) -> float:
    """exp, infinite where math.exp raises: a model may be as bad as that, and others' figures are still wanted."""
    return math.inf if x >= math.log(sys.float_info.max) else math.exp(x)


def evaluate(
    model: Path | str,
    text: Path,
    *,
    quantization: str | None,
    context: int,
    environment: Mapping[str, str] | None = None,
    ranks: int = 1,
    memory_fraction: float | None = None,
    timeout: float = 900.0,
    name: str | None = None,
    raised_by: str | None = None,
) -> Evaluation:
    """Run vLLM over ``text``.

    Args:
        model: a checkpoint.
        text: a UTF-8 file. It is cut into windows of ``context`` tokens, each behind the begin-of-text token.
        quantization: vLLM's name of the method; None leaves the checkpoint as it is.
        environment: variables of the engine's process, over those of this one.
        ranks: vLLM's tensor parallelism.
        memory_fraction: vLLM's ``gpu_memory_utilization``; None leaves room for other programs.
        timeout: seconds the engine may take.
        name: what messages call the method.
        raised_by: the option of the command that gives the engine more time.

    Raises:
        CommandError: the engine failed; holds the end of its log.
    """
    job = {
        "model": str(model),
        "text": str(text),
        "quantization": quantization,
        "context": context,
        "ranks": ranks,
        "memory_fraction": memory_fraction or _vllm.memory_fraction(),
    }
    variables = engine_variables() | dict(environment or {})
    what = f"vLLM on {name or quantization or model}"
    data = _worker.run("llm_quant_rocm.cli._evaluate_worker", job, what, variables, timeout, raised_by)
    return Evaluation(data["loss"], data["words"], tuple(data["greedy"]), tuple(data["kernels"]))


def engine_variables() -> dict[str, str]:
    """The environment of an engine that computes within the process that asks it."""
    # The worker hands a function of its own to each rank, by pickle.
    variables = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
    if _vllm.on_cpu() and "VLLM_DISABLED_KERNELS" not in _vllm.environment():
        # vLLM's kernels for AMX leave activations in BF16 or scale them per token under the name per-tensor.
        variables["VLLM_DISABLED_KERNELS"] = "CPUFp8PerTensorScaledMMLinearKernel,CPUFP8W8A8ScaledMMLinearKernel"
    return variables


def evaluate_all(
    model: Path,
    text: Path,
    methods: Mapping[str, Method],
    messages: Console,
    *,
    context: int,
    ranks: int = 1,
    memory_fraction: float | None = None,
    timeout: float = 900.0,
    raised_by: str | None = None,
    failures: Failures | None = None,
) -> dict[str, Evaluation]:
    """`evaluate` for every method, in turns. NVFP4 checkpoints are made in a temporary folder (TMPDIR). Methods that
    fail are kept in `failures`; without it, the first one ends the call."""
    results: dict[str, Evaluation] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for number, (name, method) in enumerate(methods.items(), 1):
            began = time.monotonic()
            with failures.kept(name, results, messages) if failures else nullcontext():
                with messages.status(f"measuring {name} in vLLM ({number} of {len(methods)})"):
                    results[name] = evaluate(
                        method.checkpoint(model, Path(scratch)),
                        text,
                        quantization=method.quantization,
                        context=context,
                        environment=method.environment,
                        ranks=ranks,
                        memory_fraction=memory_fraction,
                        timeout=timeout,
                        name=name,
                        raised_by=raised_by,
                    )
                messages.print(f"measured {name} in {time.monotonic() - began:.0f} s", highlight=False)
    return results


def table(
    title: str, results: Mapping[str, Evaluation], baseline: str, more: Mapping[str, Mapping[str, str]] | None = None
) -> Table:
    """The figures, one row a method. `more` has further columns: by heading, a cell a method."""
    rendered = Table(title=title)
    rendered.add_column("method", overflow="fold")
    # Broken here, so that 80 columns hold them.
    for heading in ("word\nperplexity", "loss", f"greedy\nagreement\nwith {baseline}"):
        rendered.add_column(heading, justify="right")
    more = more or {}
    for heading in more:
        rendered.add_column(heading)
    base = results[baseline]
    for name, result in results.items():
        compared = name != baseline
        rendered.add_row(
            name,
            f"{result.word_perplexity:.2f}",
            f"{result.loss_percent(base):+.2f}%" if compared else "",
            f"{result.agreement_percent(base):.2f}%" if compared else "",
            *(cells.get(name, "") for cells in more.values()),
        )
    return rendered

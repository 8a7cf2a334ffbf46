# SPDX-License-Identifier: Apache-2.0
"""Accuracy of a model over a text, computed by a real vLLM in a process of its own."""

import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from llm_quant_rocm.cli import _vllm
from llm_quant_rocm.cli._errors import CommandError

_LOG_LINES = 25


@dataclass(frozen=True)
class Evaluation:
    """What a model says about a text.

    Attributes:
        loss: negative log-likelihood of all tokens, in nats.
        words: words of the text, as separated by white space.
        greedy: the most likely token at every position, given the text before it (teacher forcing).
        kernels: the classes of vLLM's quantization methods on its linear layers.
    """

    loss: float
    words: int
    greedy: tuple[int, ...]
    kernels: tuple[str, ...]

    @property
    def word_perplexity(self) -> float:
        """exp of the loss per word: does not depend on the tokenizer."""
        return math.exp(self.loss / self.words)

    def loss_percent(self, baseline: "Evaluation") -> float:
        """By how much the word perplexity is above the baseline's, in percent."""
        return 100.0 * (self.word_perplexity / baseline.word_perplexity - 1.0)

    def agreement_percent(self, baseline: "Evaluation") -> float:
        """Share of the positions at which both choose the same token, in percent."""
        if len(self.greedy) != len(baseline.greedy):
            raise ValueError("the evaluations are of different texts")
        same = sum(a == b for a, b in zip(self.greedy, baseline.greedy, strict=True))
        return 100.0 * same / len(self.greedy)


def evaluate(
    model: Path | str,
    text: Path,
    *,
    quantization: str | None,
    context: int,
    environment: Mapping[str, str] | None = None,
    timeout: float = 900.0,
) -> Evaluation:
    """Run vLLM over ``text`` in a process of its own: engines do not share a process, nor leave memory behind.

    Args:
        model: a checkpoint.
        text: a UTF-8 file. It is cut into windows of ``context`` tokens, each behind the begin-of-text token.
        quantization: vLLM's name of the method; None leaves the checkpoint as it is.
        environment: variables of the engine's process, over those of this one.
        timeout: seconds the engine may take.

    Raises:
        CommandError: the engine failed; holds the end of its log.
    """
    with tempfile.TemporaryDirectory() as folder:
        result, log = Path(folder, "result.json"), Path(folder, "log.txt")
        job = {
            "model": str(model),
            "text": str(text),
            "quantization": quantization,
            "context": context,
            "memory_fraction": _vllm.memory_fraction(),
            "result": str(result),
        }
        command = [sys.executable, "-m", "llm_quant_rocm.cli._evaluate_worker", json.dumps(job)]
        variables = {**_vllm.environment(), "VLLM_ENABLE_V1_MULTIPROCESSING": "0", **(environment or {})}
        if _vllm.on_cpu():
            # vLLM's kernels for AMX leave activations in BF16 or scale them per token under the name per-tensor.
            variables.setdefault(
                "VLLM_DISABLED_KERNELS", "CPUFp8PerTensorScaledMMLinearKernel,CPUFP8W8A8ScaledMMLinearKernel"
            )
        with log.open("wb") as sink:
            try:
                code = subprocess.run(
                    command,
                    env=variables,
                    stdin=subprocess.DEVNULL,
                    stdout=sink,
                    stderr=subprocess.STDOUT,
                    timeout=timeout,
                    check=False,
                ).returncode
            except subprocess.TimeoutExpired:
                code = None
        if code != 0:
            how = f"ended with exit code {code}" if code is not None else f"was not done after {timeout:.0f} s"
            end = "\n".join(log.read_text(errors="replace").splitlines()[-_LOG_LINES:])
            raise CommandError(f"vLLM with quantization={quantization} {how}:\n{end}")
        data = json.loads(result.read_text())
    return Evaluation(data["loss"], data["words"], tuple(data["greedy"]), tuple(data["kernels"]))

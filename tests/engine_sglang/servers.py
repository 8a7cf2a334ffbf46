# SPDX-License-Identifier: Apache-2.0
"""SGLang servers in processes of their own: `python -m sglang.launch_server`, asked through its OpenAI-compatible API.

They run on a GPU where there is one. On a CPU most are forks of a process that has imported SGLang (forks.py).
stand_ins/ holds what is missing elsewhere: a platform, and two declarations for torchvision.
"""

import os
import pkgutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import forks
import ports
import torch
from openai import OpenAI

PROMPTS = (
    "def quantize(rows, bound):\n    return [[value / bound for value in row] for row in rows]\n",
    "The scale of a row is its largest magnitude over the largest code that the format has.",
    "0, 1, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233, 377, 610, 987, 1597, 2584, 4181",
)
# The tests' models. SGLang imports the modules of all its models at its start, unless it is told not to.
_MODELS = {"llama", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "registry", "utils"}
_START_S = 900  # they take 20 on a machine with nothing else to do
ON_CPU = ("--device=cpu", "--attention-backend=torch_native")
# Of prefills SGLang would capture dozens.
ON_GPU = ("--attention-backend=triton", "--cuda-graph-backend-prefill=disabled", "--mem-fraction-static=0.3")


@dataclass(frozen=True)
class Result:
    """What one server did.

    Attributes:
        log: what it wrote.
        logprobs: of all prompts' tokens but their first, in one row.
        texts: for each prompt, the greedy continuation.
        weights: for each rank, the tensors that its model holds; FP8 codes as bytes.
    """

    log: str
    logprobs: torch.Tensor
    texts: list[str]
    weights: list[dict[str, torch.Tensor]]


def environment(**variables: str) -> dict[str, str]:
    """An environment in which SGLang works on a CPU too."""
    return {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        **({} if torch.cuda.is_available() else {"SGLANG_PLATFORM": "llm_quant_rocm_test"}),
        "SGLANG_DISABLED_MODEL_ARCHS": other_models(),
        **variables,
    }


@cache
def other_models() -> str:
    """Modules of models that the tests do not serve, for SGLANG_DISABLED_MODEL_ARCHS."""
    spec = find_spec("sglang.srt.models")
    assert spec is not None
    modules = pkgutil.iter_modules(spec.submodule_search_locations)
    return ",".join(module.name for module in modules if module.name not in _MODELS)


def run(folder: Path, model: Path, *arguments: str, anew: bool = False, **variables: str) -> Result:
    """What the server `model` with `arguments` and environment variables answers to PROMPTS; `anew`, by no fork."""
    folder.mkdir(parents=True)
    log = folder / "log.txt"
    with serve(log, model, *arguments, anew=anew, SAVE_WEIGHTS=str(folder), **variables) as address:
        client = OpenAI(base_url=address, api_key="none")
        name = client.models.list().data[0].id
        logprobs, texts = [], []
        for prompt in PROMPTS:
            answer = client.completions.create(
                model=name, prompt=prompt, max_tokens=4, temperature=0.0, logprobs=1, echo=True
            )
            assert answer.usage is not None
            found = answer.choices[0].logprobs
            logprobs += found.token_logprobs[1 : answer.usage.prompt_tokens]
            texts.append(answer.choices[0].text.removeprefix(prompt))
    weights = [torch.load(file) for file in sorted(folder.glob("weights-*.pt"))]
    return Result(log.read_text(), torch.tensor(logprobs), texts, weights)


@contextmanager
def serve(log: Path, model: Path, *arguments: str, anew: bool = False, **variables: str) -> Iterator[str]:
    """The address of a `launch_server --model-path MODEL ARGUMENTS` that is up."""
    port = ports.free()
    python = sys.executable if anew or torch.cuda.is_available() else forks.python()  # GPUs are lost in forks
    command = [python, "-m", "sglang.launch_server", "--model-path", str(model), *arguments]
    command += ["--sampling-backend=pytorch", "--grammar-backend=none", "--host=127.0.0.1", f"--port={port}"]
    command += [f"--nccl-port={ports.free()}"]
    # Its default is most of the machine's memory.
    command += ["--max-total-tokens=1024", "--max-running-requests=4"]
    command += ON_GPU if torch.cuda.is_available() else ON_CPU
    with log.open("w") as output:
        process = subprocess.Popen(
            command, env=environment(**variables), stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            _wait(f"http://127.0.0.1:{port}/health", process, log)
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            # Its workers too, whatever state they are in: they are all of one session.
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _wait(address: str, process: subprocess.Popen, log: Path) -> None:
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise AssertionError(f"the server ended by itself:\n{log.read_text()[-6000:]}")
        try:
            with urllib.request.urlopen(address, timeout=30):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    raise AssertionError(f"the server was not up after {_START_S} s:\n{log.read_text()[-6000:]}")

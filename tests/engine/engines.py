# SPDX-License-Identifier: Apache-2.0
"""Starts vLLM in processes of its own, so that no engine's state reaches a test or another engine."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import ports
import torch

PROMPTS = (
    "def quantize(rows, bound):\n    return [[value / bound for value in row] for row in rows]\n",
    "The scale of a row is its largest magnitude over the largest code that the format has.",
    "Eine Zeile hat einen Maßstab, und jeder Wert der Zeile wird durch ihn geteilt.",
    "0, 1, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233, 377, 610, 987, 1597, 2584, 4181",
)

SETTINGS = {"enforce_eager": True, "gpu_memory_utilization": 0.3, "max_model_len": 128, "max_num_seqs": 4}
LIMIT = 900  # seconds for one engine: two ranks take 20 on a machine with nothing else to do


@dataclass(frozen=True)
class Result:
    """What one engine did.

    Attributes:
        returncode: of its process.
        log: what it wrote, both streams.
        prompt_token_ids: for each prompt.
        prompt_logprobs: for each prompt, the logprob of each of its tokens but the first.
        token_ids: for each prompt, the greedy continuation.
        weights: for each rank, the tensors that its model holds; FP8 codes as bytes.
    """

    returncode: int
    log: str
    prompt_token_ids: list[list[int]]
    prompt_logprobs: list[list[float]]
    token_ids: list[list[int]]
    weights: list[dict[str, torch.Tensor]]

    @property
    def logprobs(self) -> torch.Tensor:
        """All prompts' logprobs in one row."""
        return torch.tensor([logprob for logprobs in self.prompt_logprobs for logprob in logprobs])


def environment(**variables: str) -> dict[str, str]:
    """An environment in which vLLM works on any CPU with two cores or more."""
    return {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # apply_model sends a Python object to the workers
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the default asks for one NUMA node a rank
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_PORT": str(ports.free()),
        **variables,
    }


@cache
def _server() -> subprocess.Popen[str]:
    """It ends when this process closes its stdin, by ending."""
    command = [sys.executable, str(Path(__file__).with_name("engine_server.py"))]
    return subprocess.Popen(command, env=environment(), text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def _call(**request: object) -> int:
    """The exit status of one engine_process.main."""
    server = _server()
    assert server.stdin and server.stdout
    print(json.dumps(request), file=server.stdin, flush=True)
    reply = server.stdout.readline()
    if not reply:
        _server.cache_clear()  # the next engine gets a new one
        raise AssertionError(f"engine_server.py ended with {server.wait()}, on {request['arguments']}")
    return int(reply)


def run(folder: Path, model: Path, variables: dict[str, str] | None = None, **settings: object) -> Result:
    """Answer PROMPTS with the checkpoint `model`, environment variables and further arguments of vllm.LLM; also when
    the engine fails."""
    folder.mkdir(parents=True, exist_ok=True)
    request = {"settings": {"model": str(model), **SETTINGS, **settings}, "prompts": PROMPTS, "max_tokens": 4}
    (folder / "request.json").write_text(json.dumps(request))
    log = folder / "log.txt"
    # vLLM compiles what takes the logprobs of an eager engine too: half of its time, and nothing of ours.
    eager = {"TORCH_COMPILE_DISABLE": "1"} if request["settings"]["enforce_eager"] else {}
    returncode = _call(
        arguments=[str(folder / "request.json"), str(folder)],
        environment=environment(**eager, **(variables or {})),
        log=str(log),
        limit=LIMIT,
    )
    answer_file = folder / "answer.json"
    answers = json.loads(answer_file.read_text()) if answer_file.exists() else []
    return Result(
        returncode,
        log.read_text(),
        [answer["prompt_token_ids"] for answer in answers],
        [answer["prompt_logprobs"] for answer in answers],
        [answer["token_ids"] for answer in answers],
        [torch.load(file) for file in sorted(folder.glob("weights-*.pt"))],
    )


def refusals(folder: Path, requests: dict[str, dict[str, object]]) -> dict[str, str]:
    """What vLLM says to each of several requests (arguments of vllm.LLM but for SETTINGS), one after the other in one
    process; "" where it loads the checkpoint."""
    folder.mkdir(parents=True, exist_ok=True)
    requests_file, answers_file = folder / "requests.json", folder / "answers.json"
    requests_file.write_text(json.dumps({name: {**SETTINGS, **settings} for name, settings in requests.items()}))
    process = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("refusal_process.py")), requests_file, answers_file],
        env=environment(),
        text=True,
        capture_output=True,
        timeout=LIMIT,
        check=False,
    )
    assert process.returncode == 0, process.stderr[-4000:]
    return json.loads(answers_file.read_text())


@contextmanager
def serve(log: Path, model: Path, *arguments: str, **variables: str) -> Iterator[str]:
    """The address of a `vllm serve MODEL ARGUMENTS` that is up, with environment variables."""
    port = ports.free()
    command = [str(Path(sys.executable).with_name("vllm")), "serve", str(model), *arguments]
    options = ["--host=127.0.0.1", f"--port={port}", "--enforce-eager", "--gpu-memory-utilization=0.3"]
    options += ["--max-model-len=128", "--max-num-seqs=4"]
    environ = environment(VLLM_ENABLE_V1_MULTIPROCESSING="1", **variables)
    with log.open("w") as output:
        process = subprocess.Popen(
            [*command, *options], env=environ, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            _wait(f"http://127.0.0.1:{port}/health", process, log)
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(60)
            # Its engine and its workers too, if they are left: they are all of one session.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _wait(address: str, process: subprocess.Popen, log: Path) -> None:
    deadline = time.monotonic() + LIMIT
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise AssertionError(f"vllm serve ended by itself:\n{log.read_text()[-4000:]}")
        try:
            with urllib.request.urlopen(address, timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    raise AssertionError(f"vllm serve was not up after {LIMIT} s:\n{log.read_text()[-4000:]}")

# SPDX-License-Identifier: Apache-2.0
"""Starts vLLM in processes of its own, so that no engine's state reaches a test or another engine: they are forks of
one that has imported vLLM (forks.py)."""

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
from pathlib import Path

import forks
import ports
import torch

PROMPTS = (
    "def quantize(rows, bound):\n    return [[value / bound for value in row] for row in rows]\n",
    "The scale of a row is its largest magnitude over the largest code that the format has.",
    "Eine Zeile hat einen Maßstab, und jeder Wert der Zeile wird durch ihn geteilt.",
    "0, 1, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233, 377, 610, 987, 1597, 2584, 4181",
)

SETTINGS = {
    "enforce_eager": True,
    "gpu_memory_utilization": 0.3,
    "max_model_len": 128,
    "max_num_seqs": 4,
    "num_gpu_blocks_override": 64,  # vLLM clears the cache, which has a GiB at least
}
# vLLM compiles what takes the logprobs of an eager engine too: half of its time, and nothing of ours.
EAGER = {"TORCH_COMPILE_DISABLE": "1"}
# Where vLLM's attention on a CPU reads a KV cache in FP8.
FP8_KV_CACHE = torch.backends.cpu.get_cpu_capability().startswith("AVX512")
HERE = Path(__file__).parent
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
        "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS": "0",  # ranks end when they are told to, and not before
        **variables,
    }


def run(
    folder: Path,
    model: Path,
    variables: dict[str, str] | None = None,
    adapter: Path | None = None,
    **settings: object,
) -> Result:
    """Answer PROMPTS with the checkpoint `model`, environment variables, a LoRA adapter and further arguments of
    vllm.LLM; also when the engine fails."""
    folder.mkdir(parents=True, exist_ok=True)
    request = {"settings": {"model": str(model), **SETTINGS, **settings}, "prompts": PROMPTS, "max_tokens": 4}
    if adapter:
        request["adapter"] = str(adapter)
        request["settings"] |= {"enable_lora": True, "max_num_seqs": 1}  # on a CPU vLLM 0.32 fails with several
    (folder / "request.json").write_text(json.dumps(request))
    log = folder / "log.txt"
    eager = EAGER if request["settings"]["enforce_eager"] else {}
    command = [forks.python(), str(HERE / "engine_process.py"), str(folder / "request.json"), str(folder)]
    with log.open("w") as output:
        returncode = subprocess.run(
            command,
            env=environment(**eager, **(variables or {})),
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=LIMIT,
            check=False,
        ).returncode
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
    """What vLLM says to each of several requests (arguments of vllm.LLM but for SETTINGS); "" where it loads the
    checkpoint."""
    return {name: _refusal(folder / name, settings) for name, settings in requests.items()}


def _refusal(folder: Path, settings: dict[str, object]) -> str:
    folder.mkdir(parents=True)
    request, answer = folder / "request.json", folder / "answer.txt"
    request.write_text(json.dumps({**SETTINGS, **settings}))
    process = subprocess.run(
        [forks.python(), str(HERE / "refusal_process.py"), str(request), str(answer)],
        env=environment(),
        text=True,
        capture_output=True,
        timeout=LIMIT,
        check=False,
    )
    assert process.returncode == 0, process.stderr[-4000:]
    return answer.read_text()


@contextmanager
def serve(log: Path, model: Path, *arguments: str, anew: bool = False, **variables: str) -> Iterator[str]:
    """The address of a `vllm serve MODEL ARGUMENTS` that is up, with environment variables; `anew`, as a user starts
    it, by no fork."""
    port = ports.free()
    python = sys.executable if anew else forks.python()
    command = [python, str(Path(sys.executable).with_name("vllm")), "serve", str(model), *arguments]
    options = ["--host=127.0.0.1", f"--port={port}", "--enforce-eager", "--gpu-memory-utilization=0.3"]
    options += ["--max-model-len=128", "--max-num-seqs=4"]
    environ = environment(VLLM_ENABLE_V1_MULTIPROCESSING="1", **({} if anew else EAGER), **variables)
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

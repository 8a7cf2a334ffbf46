# SPDX-License-Identifier: Apache-2.0
"""What our code raises in a process of vLLM's is the last line that the front end writes; without an engine.

That a worker's error arrives there is seen where one is made: test_nvfp4_refusals.py.
"""

import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated

import pytest
from pydantic import AfterValidator, TypeAdapter

from llm_quant_rocm.environment import ERRORS
from llm_quant_rocm_vllm import last_line
from llm_quant_rocm_vllm.nvfp4 import NvFp4Config

BROKEN = {"quant_method": "modelopt", "quant_algo": "NVFP4_SVD"}
SENTENCE = "llm-quant-rocm: ValueError: quant_algo NVFP4_SVD is not known"


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A process in which vLLM starts; the file in which its children leave errors, which is gone after the test."""
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: print("the traceback", file=sys.stderr))
    last_line.install()
    file = Path(os.environ[ERRORS])
    yield file
    file.unlink(missing_ok=True)


def log(error: Exception) -> None:
    """As vLLM's workers and engine processes log what ends them."""
    logging.getLogger("vllm.v1.executor.multiproc_executor").error("WorkerProc failed to start.", exc_info=error)


def end(error: Exception, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """What the front end writes when `error` ends it."""
    sys.excepthook(type(error), error, error.__traceback__)
    return [line for line in capsys.readouterr().err.splitlines() if line]


def raised(engine: str, error: Exception) -> Exception:
    """`error`, as it comes through an engine's code, in any of its processes."""

    def start(vllm_config: SimpleNamespace) -> None:
        raise error

    with pytest.raises(type(error)) as caught:
        start(SimpleNamespace(instance_id=engine))
    return caught.value


def refusal(engine: str = "1") -> Exception:
    with pytest.raises(ValueError, match="is not known") as caught:
        NvFp4Config.from_config(BROKEN)
    return raised(engine, caught.value)


def failed(engine: str = "1") -> Exception:
    """What the front end raises."""
    return raised(engine, RuntimeError("Engine core initialization failed"))


def test_the_sentence_of_a_worker_comes_last_and_once(hook: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank in ("1_dp0", "1_dp1"):
        log(refusal(rank))
    log(RuntimeError("WorkerProc initialization failed"))
    lines = end(failed(), capsys)
    assert lines[-2] == "the traceback"
    assert lines[-1].startswith(SENTENCE)


def test_an_object_may_hold_the_configuration(hook: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Worker:
        def __init__(self) -> None:
            self.vllm_config = SimpleNamespace(instance_id="1")

        def fail(self) -> None:
            NvFp4Config.from_config(BROKEN)

    with pytest.raises(ValueError, match="is not known") as caught:
        Worker().fail()
    log(caught.value)
    assert end(failed(), capsys)[-1].startswith(SENTENCE)


def test_what_a_program_caught_is_not_repeated_below_another_error(
    hook: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log(refusal())
    assert end(failed("2"), capsys) == ["the traceback"]
    assert end(ZeroDivisionError("the user's own"), capsys) == ["the traceback"]


def test_what_a_program_raises_of_it_has_the_sentence(hook: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log(refusal())
    of_it = RuntimeError("no model")
    of_it.__cause__ = failed()
    assert end(of_it, capsys)[-1].startswith(SENTENCE)
    of_it.__cause__, of_it.__context__, of_it.__suppress_context__ = None, failed(), False
    assert end(of_it, capsys)[-1].startswith(SENTENCE)
    of_it.__suppress_context__ = True
    assert end(of_it, capsys) == ["the traceback"]
    of_it.__cause__ = of_it  # as `raise error from error` has it
    assert end(of_it, capsys) == ["the traceback"]


def test_what_pydantic_wraps_comes_last_too(hook: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="validation error") as caught:
        TypeAdapter(Annotated[dict[str, str], AfterValidator(NvFp4Config.from_config)]).validate_python(BROKEN)
    assert end(caught.value, capsys)[-1].startswith(SENTENCE)


def test_other_errors_are_not_ours_to_repeat(hook: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        _ = 1 // 0
    log(caught.value)
    assert not hook.exists()
    assert end(caught.value, capsys) == ["the traceback"]


def test_what_ends_no_process_of_vllm_is_not_repeated(hook: Path) -> None:
    logging.getLogger("vllm.v1.worker").warning("goes on without it", exc_info=refusal())
    logging.getLogger("a.library").error("caught", exc_info=refusal())
    assert not hook.exists()


def test_installed_once(hook: Path) -> None:
    before = sys.excepthook, os.environ[ERRORS], logging.getLogRecordFactory()
    last_line.install()
    assert before == (sys.excepthook, os.environ[ERRORS], logging.getLogRecordFactory())


def test_a_file_that_cannot_be_written_hurts_nobody(hook: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ERRORS, str(hook / "absent" / "file"))
    log(refusal())

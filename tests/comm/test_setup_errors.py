# SPDX-License-Identifier: Apache-2.0
"""What the log says of an error in which a group's set-up ended."""

import logging

import pytest

from llm_quant_rocm.comm.setup_errors import NoPeerMemory, refusal_of


def raised(error: Exception) -> Exception:
    try:
        raise error
    except Exception as caught:
        return caught


@pytest.mark.parametrize("kind", [NoPeerMemory, ValueError])
def test_answers_speak_for_themselves(kind: type[Exception], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "llm_quant_rocm"):
        assert refusal_of(raised(kind("GPU 1 is alone\nand more"))) == "GPU 1 is alone"
    assert not caplog.records


@pytest.mark.parametrize("kind", [RuntimeError, AssertionError, ImportError])
def test_what_nobody_expected_is_seen(kind: type[Exception], caplog: pytest.LogCaptureFixture) -> None:
    for text, reason in (
        ("this broke\nand more", "this broke"),
        ("\nthis broke", "this broke"),
        ("", "no reason given"),
    ):
        caplog.clear()
        with caplog.at_level(logging.INFO, "llm_quant_rocm"):
            assert refusal_of(raised(kind(text))) == f"setting it up failed with {kind.__name__}: {reason}"
        (record,) = caplog.records
        assert record.levelno == logging.WARNING and "report it" in record.getMessage()
        assert caplog.text.count("raise error") == 1  # the line that raised it

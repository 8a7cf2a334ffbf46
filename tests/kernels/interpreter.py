# SPDX-License-Identifier: Apache-2.0
"""Triton's interpreter for a program that does nothing else."""

from functools import cache

from triton.runtime import interpreter


def patch_language_once() -> None:
    """Triton's language is replaced for good, once for each function.

    The interpreter does it again in every call of a function of every program, and looks through all of the language,
    which takes longer than most functions do; and undoes it when a kernel ends.
    """
    interpreter._patch_lang = cache(interpreter._patch_lang)
    interpreter._LangPatchScope.restore = lambda scope: None

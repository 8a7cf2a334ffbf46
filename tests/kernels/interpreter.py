# SPDX-License-Identifier: Apache-2.0
"""Triton's interpreter for a program that does nothing else, without what takes most of its time to no end."""

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
from triton.runtime import interpreter


def make_fast() -> None:
    """Replaces parts of the interpreter, for good."""
    # Triton's language is replaced once for each function. The interpreter does it again in every call of a function of
    # every program, and looks through all of the language; and undoes it when a kernel ends.
    interpreter._patch_lang = cache(interpreter._patch_lang)
    interpreter._LangPatchScope.restore = lambda scope: None
    interpreter._get_np_dtype = numpy_type
    # Every integer operation is done again in 64 bits, for an assertion that is dropped: there is no debug.
    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = replace(builder.options, sanitize_overflow=False)
    interpreter.ReduceOps.generic_reduce = reduce_by_halves


_TYPES: dict[str, np.dtype[Any]] = {}
_numpy_type = interpreter._get_np_dtype


def numpy_type(dtype: Any) -> np.dtype[Any]:
    """What the interpreter looks up in a table that it makes in every call."""
    name = str(dtype.scalar)
    if name not in _TYPES:
        _TYPES[name] = _numpy_type(dtype)
    return _TYPES[name]


def reduce_by_halves(operation: Any, tensors: Any) -> list[Any]:
    """In place of the interpreter's, which takes one number after the other: combines both halves, and these again."""
    assert not operation.keep_dims
    tensors, axis = operation.unravel(tensors, operation.axis)
    dtypes = [tensor.dtype for tensor in tensors]
    values = [np.moveaxis(tensor.handle.data, axis, 0) for tensor in tensors]
    while len(values[0]) > 1:
        halves = [np.split(value, 2) for value in values]
        operands = [
            operation.to_tensor(half[n], dtype) for n in range(2) for half, dtype in zip(halves, dtypes, strict=True)
        ]
        combined = operation.combine_fn.fn(*operands)
        values = [tensor.handle.data for tensor in (combined if isinstance(combined, tuple) else (combined,))]
    return [operation.to_tensor(np.asarray(value[0]), dtype) for value, dtype in zip(values, dtypes, strict=True)]

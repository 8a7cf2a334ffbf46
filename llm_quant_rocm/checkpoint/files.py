# SPDX-License-Identifier: Apache-2.0
"""Whether a checkpoint's files are whole, before a model is built for them."""

import json
from pathlib import Path


def refuse_truncated(folder: Path) -> None:
    """Read the headers of the safetensors files in `folder` (which may not exist) and compare them with the sizes.

    A header is 8 bytes of length and a JSON text that gives the bytes of every tensor, counted from its end.

    Raises:
        ValueError: a file is shorter than its header says, or has none; the message names the file, and the first
            tensor that is cut off.
    """
    for file in sorted(folder.glob("*.safetensors")):
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            start = 8 + length
            if size < start:
                raise ValueError(f"{file} is truncated in its header, after {size} bytes: {_CURE}")
            try:
                header = json.loads(stream.read(length))
            except ValueError as error:
                raise ValueError(f"{file} is broken, its header is no JSON: {_CURE}") from error
        ends = {name: start + entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"}
        cut = sorted((end, name) for name, end in ends.items() if end > size)
        if cut:
            raise ValueError(
                f"{file} is truncated: it has {size} of {max(ends.values())} bytes, and {cut[0][1]} is the first of "
                f"{len(cut)} tensors that are cut off: {_CURE}"
            )


_CURE = "copy or download the file again"

# SPDX-License-Identifier: Apache-2.0
"""Python imports this module by itself at its start: lets torchvision, which SGLang imports, load beside a CPU's torch.

The registry has torchvision for CUDA's torch alone, whose own library then cannot load, and `import torchvision` looks
for two operators of it. Their declaration is enough: no test here sees a picture.
"""

import importlib.abc
import sys
from typing import Any


class _Declare(importlib.abc.MetaPathFinder):
    """Declares the operators when torchvision is first looked for, and finds nothing. On CUDA's torch does neither."""

    def find_spec(self, name: str, *args: Any) -> None:
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            if torch.version.cuda is not None:
                return
            library = torch.library.Library("torchvision", "DEF")
            for operator in ("nms", "qnms"):
                library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            sys._torchvision_operators = library  # which are gone with it


sys.meta_path.insert(0, _Declare())

# SPDX-License-Identifier: Apache-2.0
"""Whether a product of torch's has failed for want of a kernel, on ROCm."""

import torch


def lacks_kernel(error: RuntimeError) -> bool:
    """Whether `error` of a product of torch's says that hipBLASLt has no kernel for it, as far as that can be told: it
    is neither a lack of memory nor an error of the device's.

    Which shapes it knows depends on its release, the GPU and the number of rows. Torch asks it before it launches
    anything, so that nothing is lost in a graph that is being captured.
    """
    return bool(torch.version.hip) and not isinstance(error, torch.OutOfMemoryError | torch.AcceleratorError)

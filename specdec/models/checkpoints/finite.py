"""Finds weights that are NaN or infinite, on the device they were copied to, with one wait for the device per model.

Each tensor is read once, at the speed of memory, and only its least and greatest value are kept: both are finite only if all
values are, and NaN spreads to both.  Knows tensors and names, not files.
"""

from __future__ import annotations

import torch
from torch import Tensor


class FiniteCheck:
    """Collects one answer for each tensor on the device, and asks for all of them at the end."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._extremes: list[Tensor] = []

    def see(self, name: str, tensor: Tensor) -> None:
        """Looks at the tensor's values of now.  The host does not wait for the device."""
        tensor = tensor.detach()
        if not tensor.numel():  # a rank whose run of a small vocabulary is empty
            return
        if tensor.dtype.itemsize == 1:  # torch has no minimum of 8-bit floats; float16 holds every value of theirs but e8m0's
            tensor = tensor.to(torch.float16)
        self._names.append(name)
        self._extremes.append(torch.stack(torch.aminmax(tensor)))

    def not_finite(self) -> list[str]:
        """Names of the tensors seen that hold NaN or an infinity, in the order seen.  Forgets all tensors."""
        names, self._names = self._names, []
        extremes, self._extremes = self._extremes, []
        if not names:
            return []
        flags = torch.cat(extremes).isfinite().view(-1, 2).all(dim=1).tolist()
        return list(dict.fromkeys(name for name, is_finite in zip(names, flags, strict=True) if not is_finite))

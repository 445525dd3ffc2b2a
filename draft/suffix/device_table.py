"""A table of texts on a device, which captured rounds read: it has room for two, one that is read and one that is filled.

Shapes: N tokens of a table at most, S scopes at most.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.batch.transfer import host_memory
from specdec.draft.suffix.host_table import MAX_SCOPES, NO_TOKEN, Ints


class DeviceTable:
    """Two halves; of which one is read is said by `half_1`, so that rounds which are captured follow.

    text_2N, order_2N: int32.  keys_2S: int64, 0 for no scope.  bounds_2S2: int32.  See HostTable.
    """

    def __init__(self, capacity: int, device: torch.device) -> None:
        self.capacity, self.device = capacity, device
        self.text_2N = torch.full((2, capacity), NO_TOKEN, dtype=torch.int32, device=device)
        self.order_2N = torch.zeros(2, capacity, dtype=torch.int32, device=device)
        self.keys_2S = torch.zeros(2, MAX_SCOPES, dtype=torch.int64, device=device)
        self.bounds_2S2 = torch.zeros(2, MAX_SCOPES, 2, dtype=torch.int32, device=device)
        self.half_1 = torch.zeros(1, dtype=torch.int32, device=device)
        self._half = 0  # the same number on the host, which makes all changes

    def fill(self, first: int, text_T: Ints, order_T: Ints) -> None:
        """Writes a part of the next table, from this place on.  Both are int32 and not longer than what is left."""
        other = 1 - self._half
        for tensor_2N, values_T in ((self.text_2N, text_T), (self.order_2N, order_T)):
            self._copy(tensor_2N[other, first : first + len(values_T)], values_T)

    def use(self, keys_S: Ints, bounds_S2: Ints) -> None:
        """From now on rounds read the table that was filled."""
        self._half = 1 - self._half
        self.keys_2S[self._half].zero_()
        self._copy(self.keys_2S[self._half, : len(keys_S)], keys_S)
        self._copy(self.bounds_2S2[self._half, : len(keys_S)], bounds_S2)
        self.half_1.fill_(self._half)

    def _copy(self, target: Tensor, values: Ints) -> None:
        source = host_memory(target.shape, target.dtype, self.device)
        source.copy_(torch.from_numpy(values))
        target.copy_(source, non_blocking=True)

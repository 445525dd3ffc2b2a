"""Steps that bring tables of other texts to a runner, in parts, between rounds.

As steps.py, this module knows numbers only: they are arrays here, since a table has millions of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

TableName = Literal["corpus", "answers"]  # the sources that read tables, as `draft=` spells them
TABLES: tuple[TableName, ...] = ("corpus", "answers")
PART_TOKENS = 1 << 15  # of one step, for which a round waits: 165 us for 2**17 of them on an H200, most of it on the host


@dataclass(frozen=True, eq=False)
class FillTable:
    """Writes a part of a table that no round reads yet.

    first: the place of the part's first numbers.  text_T, order_T: int32; see HostTable.
    """

    table: TableName
    first: int
    text_T: NDArray[np.int32]
    order_T: NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class UseTable:
    """From now on rounds read the table that was filled last.

    keys_S: int64, of its scopes.  bounds_S2: int32; see HostTable.
    """

    table: TableName
    keys_S: NDArray[np.int64]
    bounds_S2: NDArray[np.int32]


TableStep = FillTable | UseTable

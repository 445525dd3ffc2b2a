"""What several MTP layers keep of each page: the state of its last token.

Shapes: P pages, X width of a state.
"""

from __future__ import annotations

import torch

from specdec.draft.mtp.worker import PageEnds
from specdec.limits import DUMMY_PAGE


def test_only_last_tokens_are_kept_and_only_the_first_group_s_pages_are_copied() -> None:
    """Keeps out: pages of a second group, which are numbered anew, whose copies put states into pages of the first; a token in
    the middle of a page whose state takes the last one's place; a copy that reads what it has just written."""
    ends, generator = PageEnds(6, 4, 3, torch.device("cpu"), torch.float64), torch.Generator().manual_seed(0)
    states_TX = torch.randn(5, 3, generator=generator, dtype=torch.float64)
    slots_T = torch.tensor([7, 9, 11, 15, 18])  # last ones of the pages 1, 2 and 3, and two that are not
    ends.write(slots_T, states_TX)
    assert torch.equal(ends.at(torch.tensor([7, 11, 15])), states_TX[[0, 2, 3]])
    kept_PX = ends.states_PX.clone()
    rest = [page for page in (4, 5) if page != DUMMY_PAGE]
    assert not kept_PX[rest].any()
    pages = torch.tensor([1, 2]), torch.tensor([2, 5])  # sources and targets overlap
    for group in (1, 2):
        ends.copy_pages(*pages, 4, group)
        assert torch.equal(ends.states_PX, kept_PX)
    ends.copy_pages(*pages, 4, 0)
    kept_PX[[2, 5]] = kept_PX[[1, 2]]
    assert torch.equal(ends.states_PX, kept_PX)

"""The page sizes of backends: whatever is refused, the size that the error names works."""

import pytest

from specdec.attention.capability import PageSizes

RULES = [PageSizes((64,)), PageSizes((16, 32)), PageSizes(multiple=256), PageSizes(unread=(80, 112)), PageSizes()]


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_the_nearest_size_works(rule: PageSizes) -> None:
    """Keeps out: an error that suggests pages of 0 tokens, or of a size that is refused too."""
    for size in (1, 2, 16, 17, 48, 64, 80, 112, 255, 256, 257, 1024):
        if (fault := rule.fault(size)) is not None:
            assert fault[1] > 0 and rule.fault(fault[1]) is None, (size, fault)
        else:
            assert str(rule) == "any" or rule.unread or size in rule.only or size % rule.multiple == 0

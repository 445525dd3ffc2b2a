"""Random combinations of a hybrid target, a drafter, a tree, a cache, options and traffic write what each request writes alone.

Keeps out: widths, orders of layers or settings that only together touch a state twice, or not at all.  More of them, by number:
`PYTHONPATH=tests python -m toolkit.traffic.hybrids 0 1000`.
"""

import pytest
from toolkit.traffic.hybrids import FAMILIES, run


@pytest.mark.slow_cases
@pytest.mark.parametrize("number", range(len(FAMILIES)))  # of each family one
def test_a_random_combination(number: int) -> None:
    said, requests, _ = run(number)
    assert list(FAMILIES)[number] in said and requests > 0

"""Numbers that several rooms must agree on.  Knows nothing else."""

MAX_STEPS = 64  # levels of a draft tree
MAX_AUTO_STEPS = 7  # levels that num_steps="auto" goes up to
MAX_PAUSE = 32  # tokens that a drafter may fall behind while "auto" does not speculate
DUMMY_PAGE = 0  # the page that padded rows of a batch read and write; no request ever owns it

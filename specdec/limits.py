"""Numbers that several parts of specdec must agree on."""

MAX_STEPS = 64  # the most levels of a draft tree
MAX_AUTO_STEPS = 10  # the most levels that num_steps="auto" chooses
MAX_PAUSE = 32  # the most tokens of a row that a drafter has not seen, while num_steps="auto" does not speculate
MAX_LOGPROBS = 20  # the most likeliest tokens whose log-probabilities a request may ask a server for that says nothing else
MOST_LOGPROBS = 1024  # the most that anybody may ask for
MAX_CHOICES = 1024  # the most generations of one prompt that one call may ask for
MAX_BAD_WORDS = 256  # the most bad words of several tokens that one request may name
MAX_BAD_WORD_TOKENS = 16  # the most tokens of one of them
DUMMY_PAGE = 0  # the page that padded rows of a batch read and write; no request ever owns it

# Numbers of recurrent states: the state before any text, which nobody writes, and what padding writes and nobody reads.  The
# others are those of rows, and after them those that are kept for later prompts.
ZEROS, TRASH = 0, 1
RESERVED_STATES = 2

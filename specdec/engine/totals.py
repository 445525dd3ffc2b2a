"""What an engine has done since its start, as plain counters: what monitoring reads.

The thread that runs the engine writes them; other threads may read at any time and see numbers of about the same moment.  This
module knows no clock: whoever measures time hands it in.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field

from specdec.engine.request import Request

# Upper bounds in seconds.  The first are about one round, the last are those of a long queue.
FIRST_TOKEN_BOUNDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
BETWEEN_TOKENS_BOUNDS = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.02, 0.03, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)
QUEUE_BOUNDS = (0.001, *FIRST_TOKEN_BOUNDS)  # below the time of a round: nobody waited
REQUEST_BOUNDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
ENDS = ("eos", "stop", "length", "error", "cancelled")  # how requests end
# Why the audit has not compared an answer that it chose: longer than audit_max_tokens; too many waited; its pass failed.
SKIPPED = ("long", "queue", "failed")


@dataclass
class Histogram:
    """counts[i]: values above bounds[i - 1] and at most bounds[i]; the last one counts those above every bound.

    total: the sum of all values.
    """

    bounds: tuple[float, ...]
    counts: list[int] = field(init=False)
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def add(self, value: float, times: int = 1) -> None:
        """Counts the value `times` times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times


@dataclass
class Totals:
    """Sums over all requests since the start, and what the engine holds now.

    Where layers with a span have pages of their own, `pages` are those of the layers that read all keys, `local_pages` theirs.
    between_tokens: seconds a token after the first; m tokens that a round gives a request after t seconds count t / m, m times.
    depths: how many levels the deepest tree has that a round may verify.
    """

    running: int = 0  # requests that hold a row
    waiting: int = 0  # requests that wait for one
    pages_used: int = 0  # that requests own or read
    pages_total: int = 0  # of the KV pool
    local_pages_used: int = 0
    local_pages_total: int = 0
    states_used: int = 0  # states of recurrent layers that are kept for later prompts
    states_total: int = 0  # that can be kept
    drafting_stopped: int = 0  # 1 while nothing is drafted for any request, because somebody stopped it
    depths: int = 0
    requests: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(ENDS, 0)))  # that have ended, by how
    rounds: int = 0  # passes over the batch whose tokens have been read
    chunks: int = 0  # passes over prompts, likewise
    stepped_back: int = 0  # rows that gave their pages to older ones, and entered again or will
    recomputed_tokens: int = 0  # that were read once more for it
    prompt_tokens: int = 0  # of requests that have entered
    cached_tokens: int = 0  # those of them that the prefix cache held
    output_tokens: int = 0  # that requests have kept
    drafted: int = 0  # draft tokens that were proposed, summed over rows
    audit_waiting: int = 0  # finished answers that the audit is to compare as soon as no request is there
    audit_waits_since: float | None = None  # when the first of them had come to its end, by time.monotonic
    audit_texts: int = 0  # finished answers that the audit has compared with the reference
    audit_tokens: int = 0  # their tokens
    audit_mismatch: int = 0  # those of them that rounding does not explain
    audit_interrupted: int = 0  # times that the audit made way for requests, to go on later
    audit_skipped: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(SKIPPED, 0)))  # answers, by why
    paths: Counter[tuple[int, int]] = field(default_factory=Counter)  # rows of rounds, by the tree's levels and those accepted
    first_token: Histogram = field(default_factory=lambda: Histogram(FIRST_TOKEN_BOUNDS))  # seconds from a request's arrival
    between_tokens: Histogram = field(default_factory=lambda: Histogram(BETWEEN_TOKENS_BOUNDS))
    queue: Histogram = field(default_factory=lambda: Histogram(QUEUE_BOUNDS))  # from arrival to the first row and pages
    request: Histogram = field(default_factory=lambda: Histogram(REQUEST_BOUNDS))  # from arrival to the end, however it ended

    def entered(self, request: Request) -> None:
        """A request has got its first row and pages."""
        self.prompt_tokens += len(request.given_ids)
        self.cached_tokens += request.stats.cached_tokens

    def ended(self, request: Request) -> None:
        """A request has finished, failed or been cancelled."""
        how = "cancelled" if request.cancelled else str(request.output.finish_reason)
        self.requests["error" if request.error is not None else how] += 1

    @property
    def accepted(self) -> int:
        """Draft tokens that were accepted, summed over rows."""
        return sum(accepted * rows for (_, accepted), rows in self._paths())

    @property
    def speculated(self) -> int:
        """Rounds of a request that verified a draft."""
        return sum(rows for _, rows in self._paths())

    @property
    def reached_by_depth(self) -> list[int]:
        """Entry i: how often all of the first i levels of a tree with more than i levels were accepted."""
        return self._by_depth(0)

    @property
    def accepted_by_depth(self) -> list[int]:
        """Entry i: how often level i + 1 was accepted too."""
        return self._by_depth(1)

    def _by_depth(self, more: int) -> list[int]:
        """Entry i: how many rows accepted i + more levels, of trees with more than i levels."""
        paths = self._paths()
        most = max((self.depths, *(depths for (depths, _), _ in paths)))
        return [sum(rows for (depths, accepted), rows in paths if accepted >= i + more and i < depths) for i in range(most)]

    def _paths(self) -> list[tuple[tuple[int, int], int]]:
        return list(self.paths.copy().items())  # the copy is made in one go, also while another thread counts

"""A prompt that many others begin with, and what it means that two runs of the same prompts agree."""

from specdec import Generation

SYSTEM = [(7 * i * i + 3 * i) % 40 for i in range(37)]


def prompts_after(system: list[int]) -> list[list[int]]:
    return [system + tail for tail in ([1, 2, 3], [1, 2, 9, 4, 4, 4, 4, 7], [5], [1, 2, 3, 4, 5, 6], [8] * 11)]


def assert_same(got: list[Generation], want: list[Generation]) -> None:
    """The same ids, and drafts that were accepted as far in every round."""
    assert [out.token_ids for out in got] == [out.token_ids for out in want]
    assert [out.stats.accepted_per_round for out in got] == [out.stats.accepted_per_round for out in want]

"""Splits a collection of children's stories that has no separators, and repairs its typographic signs.

The rules are made for TinyStories as it is commonly passed on: a story begins like a story, or after one that has ended.
"""

from __future__ import annotations

import re

# Typographic signs, also those of UTF-8 text that was decoded as cp1252 when the stories were collected, and their ASCII signs.
REPAIRS = {
    "â€œ": '"', "â€\x9d": '"', "â€™": "'", "â€˜": "'", "â€“": "-", "â€”": "-", "â€¦": "...", "â€": '"',
    "“": '"', "”": '"', "‘": "'", "’": "'", "…": "...", "\r\n": "\n",
}  # fmt: skip
BROKEN = re.compile("[âãÂÃ][\u0080-\u02ff\u2000-\u2122]")

# OPENING matches lines that always begin a story.  LIKELY_OPENING matches lines that do so if the story before is long enough.
OPENING = re.compile(r"once (upon a|there|a |in a)|once,|there once|(a )?long(, long)? time ago", re.I)
LIKELY_OPENING = re.compile(
    r"one (day|morning|night),? (an? |there|two )|\w+ and \w+ (are|were|like|liked|love|loved|live|lived) ", re.I
)
ENDING = re.compile(r"the end\W*$", re.I)


def split_stories(text: str) -> tuple[list[str], int]:
    """(the stories with their signs repaired, how many were left out because their encoding is broken)."""
    for wrong, right in REPAIRS.items():
        text = text.replace(wrong, right)
    # Some collections put one newline between stories and two between paragraphs; others put two in both places.
    single, double = len(re.findall(r"(?<!\n)\n(?!\n)", text)), text.count("\n\n")
    lines_separate = double and 0.1 < single / double < 1.0
    stories: list[str] = []
    for break_, line in re.findall(r"(^|\n+)([^\n]+)", text):
        if stories and not _opens(line, stories[-1], bool(lines_separate and break_ == "\n")):
            stories[-1] += break_ + line
        else:
            stories.append(line)
    kept = [re.sub(r" +(\n|$)", r"\1", story) for story in stories if not BROKEN.search(story)]
    return kept, len(stories) - len(kept)


def _opens(line: str, before: str, after_separator: bool) -> bool:
    if not line.strip() or ENDING.match(line):
        return False
    if OPENING.match(line) or ENDING.search(before[-12:]):
        return True
    likely = LIKELY_OPENING.match(line) or (after_separator and line[0] not in "\"'")
    return bool(likely and len(before) >= 400)

"""Texts that show how a tokenizer cuts: digits, cases, blanks, line ends, contractions, marks, scripts, and any characters."""

import random
import unicodedata

WORDS = [
    "the", "Hello", "HTTPServer", "iPhone", "don't", "WE'LL", "they'Re", "naïve", "cafe\u0301", "straße", "日本語", "Привет",
    "2024", "3.14159", "1000000", "x²", "½", "٣٤", "zqx", "a_b", "foo.bar()", "->", "!!!", "//", "…",
    "🙂👍🏽", "\u200d", "İ", "ǅ", "e\u0301\u0302",
]  # fmt: skip
BLANKS = [" ", "  ", "   ", "\n", "\n\n", "\r\n", "\t", " \n ", "\u00a0", "\u3000", ""]


def odd_texts(count: int, seed: int = 0) -> list[str]:
    drawn = random.Random(seed)
    texts = []
    for number in range(count):
        parts = [drawn.choice(WORDS) + drawn.choice(BLANKS) for _ in range(drawn.randrange(1, 30))]
        if number % 4 == 0:
            drawn_points = [drawn.choice([drawn.randrange(32, 0xD800), drawn.randrange(0xE000, 0x1F700)]) for _ in range(20)]
            # What a younger Unicode assigns is a letter for some libraries, and nothing yet for others.
            parts += [chr(point) for point in drawn_points if unicodedata.category(chr(point)) != "Cn"]
        drawn.shuffle(parts)
        texts.append(drawn.choice(BLANKS) + "".join(parts))
    return texts

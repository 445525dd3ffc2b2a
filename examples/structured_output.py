"""Texts that obey a JSON schema, a regular expression or a grammar: structured_output.py [TARGET DRAFT]."""

import json
import re
import sys

from specdec import SamplingParams, SpecDecoder, shipped

target, draft = sys.argv[1:3] if len(sys.argv) > 2 else (shipped.target_folder(), shipped.draft_folder())
decoder = SpecDecoder.from_pretrained(target, draft, dtype="float32")

# A schema as a dict.  A model that was not told of JSON needs bounds: the shipped one would write strings without end.
schema = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 1, "maximum": 99},
        "pet": {"enum": ["dog", "cat", "bird"]},
    },
    "required": ["name", "age", "pet"],
    "additionalProperties": False,
}
sampling = SamplingParams(max_tokens=150, temperature=0.8, seed=2, json_schema=schema)
(fast,) = decoder.generate("The girl and her pet:", sampling)
print("object:", json.loads(fast.text))

# The draft can't change the text.
(plain,) = decoder.generate("The girl and her pet:", sampling, speculate=False)
assert fast.token_ids == plain.token_ids
print(f"{fast.stats.accept_length:.2f} tokens a round")

# A regular expression of the whole text.
(answer,) = decoder.generate("It was on", SamplingParams(max_tokens=40, regex=r"(Mon|Tues|Sun)day, [0-9]{1,2} (May|June)"))
assert re.fullmatch(r"(Mon|Tues|Sun)day, [0-9]{1,2} (May|June)", answer.text)
print("expression:", answer.text)

# A grammar, in Lark's notation.
grammar = """
start: sum
sum: NUMBER (("+" | "-") NUMBER)~2
NUMBER: /[1-9][0-9]?/
"""
(answer,) = decoder.generate("Count:", SamplingParams(max_tokens=40, grammar=grammar))
print("grammar:", answer.text, "=", eval(answer.text))

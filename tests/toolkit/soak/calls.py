"""What the soak's clients send: calls of every kind, drawn from a seed.  This file imports neither torch nor specdec."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

# read: to the end.  before: leave without waiting for the first token.  midway: leave a stream.  slow: pause while reading.
Fate = Literal["read", "before", "midway", "slow"]
Kind = Literal["completion", "chat", "response"]  # by the path that a call is sent to

INVALID: tuple[dict[str, Any], ...] = (
    {"temperature": -1}, {"top_p": 0}, {"top_k": -2}, {"max_tokens": 0}, {"n": 0}, {"stop": [""]}, {"max_tokens": 100_000},
    {"model": "another-model"}, {"logit_bias": {"1": 200}}, {"speculate": "yes"}, {"seed": "one"}, {"no_such_field": 1},
    {"prompt": "", "messages": [], "input": []}, {"key": "wrong"},
    {"prompt": [1_000_000], "messages": [{"role": "user"}], "input": [{"role": "user"}]},
)  # fmt: skip

PROMPTS = ("prompt", "messages", "input")  # fields, of which every kind of call has one

STRUCTURED: tuple[dict[str, Any], ...] = (  # what a text must be, as a field of its own
    {"regex": "(The|A) [a-z]{2,7} [a-z]{2,7}\\."},
    {"grammar": 'start: word (", " word)~1..3\nword: "yes" | "no" | "maybe"'},
    {"json": {"type": "object", "properties": {"n": {"type": "integer", "minimum": 0}}, "required": ["n"]}},
)

UNIT = {"type": "object", "properties": {"unit": {"enum": ["c", "f"]}}, "required": ["unit"], "additionalProperties": False}
TOOLS = [{"name": "look", "description": "It looks.", "parameters": UNIT}, {"name": "now"}]  # functions that may be called
TOOL_TOKENS = 40  # more than a call of one of them takes


@dataclass(frozen=True)
class Call:
    """One request and what its client does with the answer.

    body: the request's fields; one that is "key" stands for the API key.  invalid: whether it must be refused.
    after: seconds ("before"), pieces read ("midway") or seconds between pieces ("slow").
    """

    number: int
    kind: Kind
    body: dict[str, Any]
    invalid: bool
    fate: Fate
    after: float

    @property
    def same_text(self) -> str | None:
        """Calls with the same one must get the same texts; None: the text is left to chance."""
        if self.invalid or (self.body["temperature"] and "seed" not in self.body):
            return None
        fields = {name: value for name, value in self.body.items() if name not in ("stream", "stream_options", "speculate")}
        return json.dumps([self.kind, fields], sort_keys=True)


@dataclass(frozen=True)
class Mix:
    """What calls are made of.

    texts: prompts are beginnings of these.  vocab_size: of the target.  max_tokens: the most tokens that a call asks for.
    questions: how many different calls there are that have one right text; each comes up again and again.
    structured: whether some texts must obey a grammar, and some chats have tools.
    marks: tokens that begin a call of a tool or end a thought; some chats have more of them than the model would write.
    """

    model: str
    texts: Sequence[str]
    vocab_size: int
    max_tokens: int
    questions: int = 60
    structured: bool = False
    marks: Mapping[str, int] = field(default_factory=dict)

    def calls(self, first: int, count: int, seed: int) -> list[Call]:
        """Calls number first, first + 1 ...: always the same for the same seed."""
        chance = random.Random(seed)
        questions = [self._question(chance) for _ in range(self.questions)]
        return [
            self._call(number, random.Random(seed * 1_000_003 + number), questions) for number in range(first, first + count)
        ]

    def _question(self, chance: random.Random) -> tuple[Kind, dict[str, Any]]:
        """(the call's kind, the fields that decide the text)."""
        kind: Kind = chance.choices(["completion", "chat", "response"], [60, 25, 15])[0]
        body: dict[str, Any] = {"model": self.model, "temperature": chance.choice([0, 0, 0.7, 1.0])}
        limits = {"completion": ["max_tokens"], "response": ["max_output_tokens"]}
        limit = chance.choice(limits.get(kind, ["max_tokens", "max_completion_tokens"]))
        body[limit] = chance.randint(1, self.max_tokens)
        if kind == "completion":
            body["prompt"] = self._prompt(chance)
        else:
            said = [{"role": "user", "content": self._text(chance)}]
            body["messages" if kind == "chat" else "input"] = said
            if chance.random() < 0.25:
                body["chat_template_kwargs"] = {"enable_thinking": True}
        if body["temperature"]:
            body |= chance.choice([{}, {"top_p": 0.9}, {"top_k": 20}, {"top_p": 0.8, "top_k": 50}])
            body["seed"] = chance.randrange(2**31)
        if chance.random() < 0.3:
            body["stop"] = chance.choice([".", ["\n", "the"], " a", ["e", "zz"]])
        if chance.random() < 0.15 and kind != "response":
            body["n"] = chance.randint(2, 3)
        if self.structured and kind != "completion" and chance.random() < 0.6:
            body[limit] += chance.choice([0, TOOL_TOKENS])
            body |= self._tools(kind, chance)
        elif self.structured and chance.random() < 0.2:
            body["structured_outputs"] = chance.choice(STRUCTURED)
        return kind, body

    def _tools(self, kind: Kind, chance: random.Random) -> dict[str, Any]:
        """Tools that the model calls where it likes (and it likes to), or must call."""
        is_chat = kind == "chat"
        tools = [{"type": "function", **({"function": each} if is_chat else each)} for each in TOOLS]
        named = {"type": "function", **({"function": {"name": "look"}} if is_chat else {"name": "look"})}
        found: dict[str, Any] = {"tools": tools, "tool_choice": chance.choice(["auto", "auto", "required", named, "none"])}
        if chance.random() < 0.3:
            found["parallel_tool_calls"] = False
        if found["tool_choice"] == "auto":
            found["logit_bias"] = {str(token): chance.choice([10, 20, 100]) for token in self.marks.values()}
        return found

    def _text(self, chance: random.Random) -> str:
        text = chance.choice(self.texts)
        return text[: chance.randint(1, len(text))]

    def _prompt(self, chance: random.Random) -> Any:
        """A text, ids, or a list of either."""

        def ids() -> list[int]:
            return [chance.randrange(self.vocab_size) for _ in range(chance.randint(1, 60))]

        one = chance.choice([self._text, self._text, lambda _: ids()])
        return [one(chance) for _ in range(2)] if chance.random() < 0.1 else one(chance)

    def _call(self, number: int, chance: random.Random, questions: list[tuple[Kind, dict[str, Any]]]) -> Call:
        kind, body = chance.choice(questions)
        body = dict(body)
        if body["temperature"] and chance.random() < 0.2:
            del body["seed"]  # drawn by the server
        if chance.random() < 0.3:
            body["speculate"] = chance.random() < 0.5
        invalid = chance.random() < 0.06
        if invalid:
            wrong = chance.choice(INVALID)
            body |= {name: value for name, value in wrong.items() if name not in PROMPTS or name in body}
        fate: Fate = chance.choices(["read", "before", "midway", "slow"], [70, 10, 12, 8])[0]
        if fate in ("midway", "slow") or chance.random() < 0.4:
            body["stream"] = True
            if chance.random() < 0.5 and kind != "response":
                body["stream_options"] = {"include_usage": True}
        after = {"read": 0.0, "before": chance.choice([0.0, 0.001, 0.01, 0.05]), "midway": chance.randint(1, 4), "slow": 0.02}
        return Call(number, kind, body, invalid, fate, after[fate])

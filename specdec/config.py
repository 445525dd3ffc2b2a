"""Settings: the tree's shape and how a request is sampled.  Every ValueError about a setting alone is raised here.

Knows no model, so limits that depend on one (vocabulary, context) are checked at the decoder's door.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from numbers import Integral
from typing import Any, Literal, get_args

from specdec.checks import distinct, is_array, is_number, require_bool, require_choice, require_float, require_int, store
from specdec.grammar.keywords import check_keywords
from specdec.limits import MAX_AUTO_STEPS, MAX_CHOICES, MAX_LOGPROBS, MAX_PAUSE, MAX_STEPS

LARGEST_SEED = 2**63 - 1
NOT_GREEDY = ("top_p", "top_k", "min_p", "seed")  # options of sampling that greedy decoding does not look at
AUTO_CHAINS, AUTO_TREES = (1, 2, 3, 4, 5, 7, 10), (3, 5, 7)  # the levels of the chains and trees that "auto" chooses from
LEAST_NODES = min(AUTO_TREES) + 2  # of a tree that "auto" chooses from: with one less, it is a chain
LEAST_AUTO_TREE = 8  # trees have as many nodes as allowed, half of them, and so on, but no fewer than this by halving
LogprobsMode = Literal["raw", "processed"]
GrammarKind = Literal["json_schema", "regex", "grammar"]  # the fields of SamplingParams that say what the text must be
GraphMode = Literal["round", "step", False]  # one CUDA graph a round, one a phase, or none


@dataclass(frozen=True, init=False)
class SpecConfig:
    """The shape of the draft tree, in EAGLE's three numbers.

    num_steps: S, levels of the tree (an accepted path holds at most S draft tokens).  "auto" chooses the shape of each round
    among `shapes`, or plain decoding, by batch size, from what rounds cost and how far drafts were accepted lately.
    topk: k, branches kept per level; 1 is a chain.  With "auto", the most of them; chains are chosen too.
    num_draft_tokens: nd, nodes verified per round, the root included; with "auto", the most of them.  None for what suits the
    other two: all of a chain, or the best 16 nodes of a tree, all if it has fewer.  Once made, it is always a number.
    """

    num_steps: int | Literal["auto"]
    topk: int
    num_draft_tokens: int

    def __init__(self, num_steps: int | Literal["auto"] = 5, topk: int = 4, num_draft_tokens: int | None = None) -> None:
        if isinstance(num_steps, str) and num_steps != "auto":
            number = num_steps.strip()
            near = min(max(int(number), 1), MAX_STEPS) if number.isdecimal() and len(number) < 10 else "auto"
            raise ValueError(f"num_steps must be an int or 'auto', got {num_steps!r}; nearest setting: {near!r}")
        if num_steps is None:
            raise TypeError("num_steps must be an int or 'auto', got None; nearest setting that works: 'auto'")
        S = num_steps if num_steps == "auto" else require_int("num_steps", num_steps, 1, MAX_STEPS)
        k = require_int("topk", topk, 1, 64)
        most = _candidates(MAX_AUTO_STEPS if S == "auto" else S, k) + 1
        if num_draft_tokens is None:
            nd = most if k == 1 else min(16, most)
        else:
            nd = require_int("num_draft_tokens", num_draft_tokens, 2, 1024)
        if k == 1 and nd != most and S != "auto":
            other = f", or num_steps={nd - 1}" if nd - 1 <= MAX_STEPS else ""
            raise ValueError(
                f"num_draft_tokens must be num_steps + 1 = {most} when topk=1 (a chain, and its root), got {nd}; "
                f"nearest setting that works: num_draft_tokens={most}{other}"
            )
        if nd > most:
            raise ValueError(
                f"num_draft_tokens - 1 must be at most topk + topk*topk*(num_steps-1) = {most - 1}, the candidates of a tree "
                f"with num_steps={S} and topk={k}; got num_draft_tokens={nd}; "
                f"nearest setting that works: num_draft_tokens={most}"
            )
        if S == "auto" and k > 1 and nd < LEAST_NODES:
            raise ValueError(
                f"topk={k} would do nothing with num_steps='auto' and num_draft_tokens={nd}: a tree among those it chooses "
                f"from has {LEAST_NODES} nodes at least; nearest settings that work: topk=1, or num_draft_tokens={LEAST_NODES}"
            )
        store(self, num_steps=S, topk=k, num_draft_tokens=nd)

    @property
    def is_auto(self) -> bool:
        return self.num_steps == "auto"

    @property
    def max_steps(self) -> int:
        """The most levels a tree can have."""
        return min(MAX_AUTO_STEPS, self.num_draft_tokens - 1) if self.num_steps == "auto" else self.num_steps

    @property
    def shapes(self) -> tuple[SpecConfig, ...]:
        """What "auto" chooses from, besides plain decoding; any other shape itself.

        Neighbours are so close that the best of them is hardly worse than the best of all.
        """
        if self.num_steps != "auto":
            return (self,)
        chains = [SpecConfig(levels, 1) for levels in AUTO_CHAINS if levels <= self.max_steps]
        trees, nodes, topk = list[SpecConfig](), self.num_draft_tokens, self.topk
        while topk > 1 and (nodes == self.num_draft_tokens or nodes >= LEAST_AUTO_TREE):
            for levels in AUTO_TREES:
                if levels <= self.max_steps and levels + 1 < nodes <= _candidates(levels, topk) + 1:
                    trees.append(SpecConfig(levels, topk, nodes))
            nodes //= 2
            topk = min(self.topk, max(2, nodes // 4))
        return (*chains, *trees)

    @property
    def label(self) -> str:
        """S,k,nd: how tables name a shape."""
        return f"{self.num_steps},{self.topk},{self.num_draft_tokens}"

    @property
    def lookahead(self) -> int:
        """How many KV slots after the last token that the host knows of must be free for rounds to write to.

        A round writes the nodes it verifies, the draft's branches, and the rows by which the draft follows the target.  It
        may begin num_steps + 1 tokens later than the host knows, since the round before it has not been read yet.
        """
        S = self.max_steps
        round_writes = max(self.num_draft_tokens, self.topk * (S - 1), S + 1, MAX_PAUSE if self.is_auto else 0)
        return round_writes + S + 1


def _candidates(steps: int, topk: int) -> int:
    """How many draft tokens a tree can choose from: topk at the first level, topk for each of topk branches at the others."""
    return topk + topk * topk * (steps - 1) if topk > 1 else steps


def idle_options(temperature: float, given: Collection[str]) -> list[str]:
    """Of the options that were given, those that this temperature leaves without effect: greedy decoding looks at none of
    NOT_GREEDY.  The command line refuses them, Python warns, and HTTP takes them, since clients send them with every request.
    """
    return [name for name in NOT_GREEDY if name in given] if temperature == 0 else []


@dataclass(frozen=True)
class SamplingParams:
    """How one request is sampled and when it ends.

    max_tokens: the most tokens to generate.  temperature: 0 is greedy; top_p, top_k, min_p and seed then change nothing.
    seed: equal seeds give equal text, whatever the batch and the draft; None draws one.
    stop: strings that end the text, and are not part of it.  stop_token_ids: ids that end it, besides the model's own EOS.
    ignore_eos: go on after the model's EOS.  min_tokens: nothing ends the text before so many tokens but max_tokens.

    These change the target's logits, in this order, and greedy decoding too:
    logit_bias: added to the logits of these ids.
    repetition_penalty: divides the logits above 0 of tokens in prompt or output, and multiplies those below 0.
    presence_penalty, frequency_penalty: taken off the logits of tokens in the output, once, and once for each occurrence.
    bad_words: texts, or lists of ids, that the output does not complete.

    These say what is sampled from, in the order temperature, top_k, top_p, min_p:
    top_k: the so many best tokens; 0 keeps all.  top_p: the smallest set that reaches this probability.
    min_p: tokens at least this many times as likely as the best one.

    These say what the text must be; one of them at most.  Tokens that do not go on towards such a text are banned, the model's
    own EOS too until the text is complete.  A text that max_tokens ends before that is not complete.
    json_schema: a JSON schema, as a dict or as JSON.  regex: a regular expression of the whole text.
    grammar: a context-free grammar in Lark's notation, or in GBNF.

    logprobs: give each token's log-probability, and those of so many likeliest tokens; None gives none.
    logprobs_mode: "raw" for the probabilities before all options, "processed" for those after them: of the distribution that
    was sampled from, or, in greedy decoding, of the changed logits.

    n: generations of each prompt; the one of number j, from 0 on, has the seed + j.  Greedy ones are all equal.
    """

    max_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)
    bad_words: Sequence[str] | Sequence[Sequence[int]] | None = None
    min_tokens: int = 0
    json_schema: str | Mapping[str, Any] | None = None
    regex: str | None = None
    grammar: str | None = None
    logprobs: int | None = None
    logprobs_mode: LogprobsMode = "raw"
    n: int = 1

    def __post_init__(self) -> None:
        max_tokens = require_int("max_tokens", self.max_tokens, 1)
        temperature = require_float("temperature", self.temperature, 0.0, 100.0)
        if 0 < temperature < 1e-4:
            raise ValueError(f"temperature must be 0 (greedy) or at least 0.0001, got {temperature}; nearest: 0")
        top_p = require_float("top_p", self.top_p, 0.0, 1.0, above_low=True)
        top_k = require_int("top_k", self.top_k, 0, 2**31 - 1)
        seed = None if self.seed is None else require_int("seed", self.seed, -(2**63), LARGEST_SEED)
        require_bool("ignore_eos", self.ignore_eos, False)
        store(self, max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed)
        store(self, min_p=require_float("min_p", self.min_p, 0.0, 1.0))
        store(self, repetition_penalty=require_float("repetition_penalty", self.repetition_penalty, 0.01, 100.0))
        for name in ("presence_penalty", "frequency_penalty"):
            store(self, **{name: require_float(name, getattr(self, name), -2.0, 2.0)})
        min_tokens = require_int("min_tokens", self.min_tokens, 0)
        if min_tokens > max_tokens:
            raise ValueError(
                f"min_tokens must be at most max_tokens = {max_tokens}, got {min_tokens}; nearest setting that works: "
                f"min_tokens={max_tokens}"
            )
        store(self, min_tokens=min_tokens)
        if self.logprobs is not None:
            store(self, logprobs=require_int("logprobs", self.logprobs, 0, MAX_LOGPROBS))
        require_choice("logprobs_mode", self.logprobs_mode, get_args(LogprobsMode), "raw")
        if self.logprobs is None and self.logprobs_mode != "raw":
            raise ValueError("logprobs_mode would do nothing without logprobs; nearest setting that works: logprobs=0")
        n = require_int("n", self.n, 1, MAX_CHOICES)
        if seed is not None and seed + n - 1 > LARGEST_SEED:
            nearest = f"nearest setting that works: seed={LARGEST_SEED - n + 1}"
            raise ValueError(f"seed + n - 1 must be at most {LARGEST_SEED}, got {seed} + {n} - 1; {nearest}")
        store(self, n=n)
        _check_stop(self.stop)
        if self.stop is not None and not isinstance(self.stop, str):
            store(self, stop=tuple(self.stop))
        if self.stop_token_ids is not None:
            store(self, stop_token_ids=_ids("stop_token_ids", self.stop_token_ids))
        if self.logit_bias is not None:
            store(self, logit_bias=_logit_bias(self.logit_bias))
        if self.bad_words is not None:
            store(self, bad_words=_bad_words(self.bad_words))
        self._check_grammar()
        defaults = {item.name: item.default for item in fields(self)}
        if idle := idle_options(temperature, {name for name in NOT_GREEDY if getattr(self, name) != defaults[name]}):
            _warn_caller(
                f"{' and '.join(idle)} would do nothing at temperature=0 (greedy); give a temperature, or leave it out"
            )
        if temperature == 0 and n > 1:
            _warn_caller(f"n={n} would give one text {n} times at temperature=0 (greedy); give a temperature")

    def _check_grammar(self) -> None:
        given = [name for name in get_args(GrammarKind) if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(
                f"{given[0]} and {given[1]} both say what the text must be; nearest setting that works: one of them"
            )
        for name in given:
            value = getattr(self, name)
            if name == "json_schema":
                store(self, json_schema=_json_schema(value))
            elif not isinstance(value, str):
                raise TypeError(f"{name} must be a string, got {value!r} of type {type(value).__name__}"[:400])
            elif not value or (name == "grammar" and not value.strip()):
                raise ValueError(f"{name} must not be empty; nearest setting that works: leave it out")
            else:
                _check_whole(name, value)
            if self.ignore_eos:
                raise ValueError(f"ignore_eos would go on after the end that {name} asks for; nearest: ignore_eos=False")

    @property
    def grammar_rule(self) -> tuple[GrammarKind, str] | None:
        """What the text must be, as the field that says it and its value; None: anything."""
        for name in get_args(GrammarKind):
            if (text := getattr(self, name)) is not None:
                return name, text
        return None

    def of_choice(self, number: int) -> SamplingParams:
        """The options of one of the n generations, from 0 on."""
        return self if self.n == 1 else replace(self, n=1, seed=None if self.seed is None else self.seed + number)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


def _warn_caller(message: str) -> None:
    """Warns at the line that made the options, unless that is one of specdec's own: a door has judged what it was given."""
    frame, level = sys._getframe(1).f_back, 3  # as warnings counts: this function is 1, its caller __post_init__ 2
    while frame is not None and frame.f_globals.get("__name__") in (__name__, "dataclasses", "copy"):
        frame, level = frame.f_back, level + 1
    if frame is not None and not str(frame.f_globals.get("__name__")).startswith("specdec."):
        warnings.warn(message, stacklevel=level)


def _json_schema(value: Any) -> str:
    """The schema as JSON.  What a text can be held to is for the library to say."""
    if isinstance(value, str):
        try:
            schema = json.loads(value, object_pairs_hook=distinct)
        except RecursionError:
            raise ValueError(_TOO_DEEP) from None
        except ValueError as error:
            raise ValueError(f"json_schema is not usable JSON: {error}; expected a schema such as {_EXAMPLE}") from None
    else:
        schema = value
    if not isinstance(schema, Mapping):
        got = f"{value!r} of type {type(value).__name__}"[:300]
        hint = ", for a class of pydantic its model_json_schema()" if hasattr(value, "model_json_schema") else ""
        raise TypeError(f"json_schema must be a dict, or JSON of an object, such as {_EXAMPLE}{hint}; got {got}")
    try:
        written = json.dumps(schema, ensure_ascii=False, allow_nan=False)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    except (TypeError, ValueError) as error:
        raise TypeError(f"json_schema must hold what JSON can hold: {error}") from None
    check_keywords(schema)
    return value if isinstance(value, str) else written


_EXAMPLE = '{"type": "object"}'
_TOO_DEEP = "json_schema is nested too deeply; nearest setting that works: its parts in $defs, with a $ref for each"


def _check_stop(stop: Any) -> None:
    """TypeError or ValueError for anything but a text or texts to stop at."""
    if stop is None:
        return
    for text in (stop,) if isinstance(stop, str | bytes) or not isinstance(stop, Sequence) else stop:
        if not isinstance(text, str):
            raise TypeError(f"stop must be a string or a list of strings, got {text!r} of type {type(text).__name__}")
        if not text:
            raise ValueError("stop must not hold an empty string: it would end every text at once; leave it out")
        _check_whole("stop", text)


def _check_whole(name: str, text: str) -> None:
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise ValueError(f"{name} holds {text!r}, which no text can hold: half of a surrogate pair is no character")


def _ids(name: str, value: Any) -> tuple[int, ...]:
    """The ids of a sequence or of a one-dimensional array of numpy or torch, checked.  name: what errors call them."""
    ids = value.tolist() if is_array(value) and value.ndim == 1 else value
    if not isinstance(ids, Sequence) or isinstance(ids, str | bytes):
        raise TypeError(f"{name} must be a list of ints, got {value!r} of type {type(value).__name__}")
    for i, token in enumerate(ids):
        if not is_number(type(token), Integral):
            raise TypeError(f"{name} must be a list of ints, got {token!r} of type {type(token).__name__} at index {i}")
    return tuple(require_int(f"{name}[{i}]", token, 0, 2**31 - 1) for i, token in enumerate(ids))


def _logit_bias(value: Any) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise TypeError(f"logit_bias must be a dict from token ids to numbers, got {value!r} of type {type(value).__name__}")
    for token in value:
        if not is_number(type(token), Integral):
            raise TypeError(f"logit_bias must have token ids as keys, got {token!r} of type {type(token).__name__}")
        if not 0 <= token < 2**31:
            raise ValueError(f"logit_bias must have token ids of at least 0 as keys, got {token}")
    return {
        require_int("logit_bias", token, 0, 2**31 - 1): require_float(f"logit_bias[{token}]", added, -100.0, 100.0)
        for token, added in value.items()
    }


def _bad_words(value: Any) -> tuple[str, ...] | tuple[tuple[int, ...], ...]:
    """Texts alone, or lists of ids alone."""
    expected = "bad_words must be a list of strings or a list of lists of ints"
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise TypeError(f"{expected}, got {value!r} of type {type(value).__name__}")
    if all(isinstance(word, str) for word in value):
        for word in value:
            _check_whole("bad_words", word)
        words: Any = tuple(value)
    else:
        for word in value:
            if not isinstance(word, Sequence) and not is_array(word) or isinstance(word, str | bytes):
                raise TypeError(f"{expected}, got {word!r} of type {type(word).__name__} among them")
        words = tuple(_ids(f"bad_words[{number}]", word) for number, word in enumerate(value))
    if not all(words):
        raise ValueError("bad_words must not hold an empty word: every text would hold it; leave it out")
    return words

"""Settings: how a request is sampled; trees/shape.py has trees.  Every ValueError about a setting alone is raised in both.

Knows no model, so limits that depend on one (vocabulary, context) are checked at the decoder's door.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial, wraps
from inspect import signature
from typing import Any, Literal, ParamSpec, TypeVar, get_args

from specdec import checks
from specdec.grammar.keywords import schema_as_json
from specdec.limits import MAX_CHOICES, MOST_LOGPROBS
from specdec.trees.shape import SpecConfig, require_shape

MAX_SEED = 2**63 - 1
OF_DRAFTS = ("prediction", "sources", "shape")  # the fields of SamplingParams that would do nothing without drafts
LogprobsMode = Literal["raw", "processed"]
GrammarKind = Literal["json_schema", "regex", "grammar"]  # the fields of SamplingParams that say what the text must be
GraphMode = Literal["round", "step", False]  # one CUDA graph a round, one a phase, or none
Asked = ParamSpec("Asked")  # arguments of a method
Given = TypeVar("Given")  # its result
MAKERS = (__name__, "dataclasses", "copy")  # modules that make options for whoever is to be warned


# ---- how a request is sampled ----


@dataclass(frozen=True)
class SamplingOption:
    """What a field of SamplingParams is, besides its name and type.  All who handle options follow from it."""

    default: Any
    check: Callable[[str, Any], Any]  # of the name and a value; None is allowed besides where it is the default
    meaning: str = ""  # what the command line says of an option that one flag gives as a number
    metavar: str = "N"
    column: type[float] | type[int] | None = None  # in the table of rows (see RowOptions); None: it is no number of a row
    step: str = ""  # of the pass over logits that it takes (see Needs), where it is not what it is by default; empty: none
    greedy: bool = True  # whether greedy decoding looks at it
    drafted: bool = False  # whether drafters look at its step

    def checked(self, name: str, value: Any) -> Any:
        """The value as it is kept; ValueError or TypeError, marked with the name, if it is not allowed."""
        try:  # and not `about`, since each request has all options checked
            return None if value is None and self.default is None else self.check(name, value)
        except (TypeError, ValueError, OverflowError) as error:
            checks.mark(error, name)
            raise


def option(default: Any, check: Callable[[str, Any], Any], meaning: str = "", *, hash: bool | None = None, **more: Any) -> Any:
    """A field of SamplingParams."""
    return field(default=default, hash=hash, metadata={"option": SamplingOption(default, check, meaning, **more)})


IDLE: dict[str, Any] = {"greedy": False}  # of an option that only sampling looks at
SAMPLED = {**IDLE, "drafted": True}  # of one that drafters look at too
SEED = partial(checks.require_int, low=-(2**63), high=MAX_SEED)


def number(default: float, bounds: tuple[float, float], step: str, metavar: str, meaning: str, **more: Any) -> Any:
    """A field that is a number of a row, of the type of its default and within the bounds."""
    kind: Any = checks.require_int if isinstance(default, int) else checks.require_float
    check = partial(kind, low=bounds[0], high=bounds[1])
    return option(default, check, meaning, metavar=metavar, column=type(default), step=step, **more)


def _zero_or_some(name: str, value: Any, zero: str) -> float:
    """A number that is 0, which has a meaning of its own, or large enough to be told from 0 in float32."""
    checked = checks.require_float(name, value, 0.0, 100.0)
    if 0 < checked < 1e-4:
        raise ValueError(f"{name} must be 0 ({zero}) or at least 0.0001, got {checked}; nearest: 0")
    return checked


@dataclass(frozen=True)
class SamplingParams:
    """How one request is sampled and when it ends.

    max_tokens: the most tokens to generate; 0, with prompt_logprobs, asks for the prompt alone.
    temperature: 0 is greedy; top_p, top_k, min_p, top_n_sigma and seed then change nothing.
    seed: equal seeds give equal text, whatever the batch and the draft; None draws one.
    stop: strings that end the text.  stop_token_ids: ids that end it, besides the model's own EOS.  Neither is part of the
    text, unless include_stop_str_in_output says so.
    ignore_eos: go on after the model's EOS.  min_tokens: nothing ends the text before so many tokens but max_tokens.

    These change the target's logits, in this order, and greedy decoding too:
    logit_bias: added to the logits of these ids.
    repetition_penalty: divides the logits above 0 of tokens in prompt or output, and multiplies those below 0.
    presence_penalty, frequency_penalty: taken off the logits of tokens in the output, once, and once for each occurrence.
    bad_words: texts, or lists of ids, that the output does not complete.

    These say what is sampled from, in the order top_n_sigma, temperature, top_k, top_p, min_p:
    top_n_sigma: tokens with logits within so many standard deviations (of those not banned) of the best one's; 0 keeps all.
    top_k: the so many best tokens; 0 keeps all.  top_p: the smallest set that reaches this probability.
    min_p: tokens at least this many times as likely as the best one.

    These say what the text must be; one of them at most.  Tokens that do not go on towards such a text are banned, the model's
    own EOS too until the text is complete.  A text that max_tokens ends before that is not complete.
    json_schema: a JSON schema, as a dict or as JSON.  regex: a regular expression of the whole text.
    grammar: a context-free grammar in Lark's notation, or in GBNF.

    logprobs: give each token's log-probability, and those of so many likeliest tokens; None gives none.
    logprobs_mode: "raw" for the probabilities before all options, "processed" for those after them: of the distribution that
    was sampled from, or, in greedy decoding, of the changed logits.
    prompt_logprobs: the same of the prompt's tokens, always raw.  Such a prompt is computed whole: it uses no kept pages.

    These change no text.  prediction: what the answer may well be, as a text or ids.  sources: who may draft, by the names of
    Generation.sources; None: all.  shape: of trees, one of those that the decoder's rounds may have, as a SpecConfig or its
    numbers; None: whatever the decoder's rounds have.  speculate: False: nobody drafts.
    n: generations of each prompt; the one of number j, from 0 on, has the seed + j.  Greedy ones are all equal.
    """

    max_tokens: int = option(128, partial(checks.require_int, low=0))
    temperature: float = option(0.0, partial(_zero_or_some, zero="greedy"), column=float, step="sampled", drafted=True)
    top_p: float = option(
        1.0,
        partial(checks.require_float, low=0.0, high=1.0, above_low=True),
        "sample from the likeliest tokens that together have this probability",
        **SAMPLED | {"metavar": "P", "column": float, "step": "filtered"},
    )
    top_k: int = number(0, (0, 2**31 - 1), "filtered", "N", "sample from the N likeliest tokens", **SAMPLED)
    seed: int | None = option(
        None, SEED, "bench samples with 0 unless told otherwise, generate with a random one", column=int, **IDLE
    )
    stop: str | Sequence[str] | None = option(None, checks.require_texts)
    stop_token_ids: Sequence[int] | None = option(None, checks.require_ids)
    ignore_eos: bool = option(False, partial(checks.require_bool, nearest=False))
    min_p: float = number(
        0.0, (0.0, 1.0), "min_p", "P", "sample from tokens at least P times as likely as the likeliest", **SAMPLED
    )
    repetition_penalty: float = number(
        1.0, (0.01, 100.0), "penalties", "X", "divide logits above 0 of tokens in prompt or output by X"
    )
    presence_penalty: float = number(0.0, (-2.0, 2.0), "penalties", "X", "take X off the logits of tokens in the output")
    frequency_penalty: float = number(
        0.0, (-2.0, 2.0), "penalties", "X", "take X off a token's logit for each time the output holds it"
    )
    logit_bias: Mapping[int, float] | None = option(None, checks.require_bias, step="bias", hash=False)
    bad_words: Sequence[str] | Sequence[Sequence[int]] | None = option(None, checks.require_words, step="bad_words")
    min_tokens: int = option(0, partial(checks.require_int, low=0), "nothing ends the text before N tokens", step="ends")
    json_schema: str | Mapping[str, Any] | None = option(None, schema_as_json, step="grammar")
    regex: str | None = option(None, checks.require_text, step="grammar")
    grammar: str | None = option(None, checks.require_text, step="grammar")
    logprobs: int | None = option(None, partial(checks.require_int, low=0, high=MOST_LOGPROBS))
    logprobs_mode: LogprobsMode = option(
        "raw", partial(checks.require_choice, choices=get_args(LogprobsMode), default="raw"), step="processed"
    )
    n: int = option(1, partial(checks.require_int, low=1, high=MAX_CHOICES))
    top_n_sigma: float = option(
        0.0,
        partial(_zero_or_some, zero="all tokens"),
        "sample from tokens within X standard deviations of the largest logit; 0 is all",
        metavar="X",
        column=float,
        step="top_n_sigma",
        **IDLE,
    )

    prediction: str | Sequence[int] | None = option(None, checks.require_prediction, step="prediction", drafted=True)
    sources: Sequence[str] | None = option(None, checks.require_names, step="sources", drafted=True)
    shape: SpecConfig | Sequence[int] | None = option(None, require_shape)
    speculate: bool = option(True, partial(checks.require_bool, nearest=True))
    prompt_logprobs: int | None = option(None, partial(checks.require_int, low=0, high=MOST_LOGPROBS))
    include_stop_str_in_output: bool = option(False, partial(checks.require_bool, nearest=False))

    def __post_init__(self) -> None:
        checks.store(self, **{name: declared.checked(name, getattr(self, name)) for name, declared in SAMPLING_OPTIONS.items()})
        for name, fault in self._faults():
            with checks.about(name):
                raise ValueError(fault)
        if idle := idle_options(self.temperature, changed_options(self)):
            said = f"{' and '.join(idle)} would do nothing at temperature=0 (greedy); give a temperature, or leave it out"
            checks.warn_caller(said, MAKERS)
        if self.temperature == 0 and self.n > 1:
            said = f"n={self.n} would give one text {self.n} times at temperature=0 (greedy); give a temperature"
            checks.warn_caller(said, MAKERS)

    def _faults(self) -> Iterator[tuple[str, str]]:
        """What is wrong with options that are right alone, and the option that is to be named."""
        if self.max_tokens == 0 and self.prompt_logprobs is None:
            also = "or prompt_logprobs=0, with which 0 asks for the prompt alone"
            yield "max_tokens", f"max_tokens must be >= 1, got 0; nearest setting that works: max_tokens=1, {also}"
        if self.min_tokens > (most := self.max_tokens):
            fault = f"min_tokens must be at most max_tokens = {most}, got {self.min_tokens}"
            yield "min_tokens", f"{fault}; nearest setting that works: min_tokens={most}"
        if self.logprobs is None and self.logprobs_mode != "raw":
            yield "logprobs_mode", "logprobs_mode would do nothing without logprobs; nearest setting that works: logprobs=0"
        if self.seed is not None and self.seed + self.n - 1 > MAX_SEED:
            fault = f"seed + n - 1 must be at most {MAX_SEED}, got {self.seed} + {self.n} - 1"
            yield "seed", f"{fault}; nearest setting that works: seed={MAX_SEED - self.n + 1}"
        if not self.speculate and (said := [name for name in OF_DRAFTS if getattr(self, name) is not None]):
            yield said[0], f"{said[0]} would do nothing with speculate=False; nearest setting that works: speculate=True"
        if self.sources is not None and self.prediction is not None and "prediction" not in self.sources:
            fits = f"nearest setting that works: sources={[*self.sources, 'prediction']}"
            yield "sources", f"sources leaves out the prediction that is given; {fits}"
        kinds = [name for name in get_args(GrammarKind) if getattr(self, name) is not None]
        if len(kinds) > 1:
            fault = f"{kinds[0]} and {kinds[1]} both say what the text must be"
            yield kinds[0], f"{fault}; nearest setting that works: one of them"
        if kinds and self.ignore_eos:
            yield kinds[0], f"ignore_eos would go on after the end that {kinds[0]} asks for; nearest: ignore_eos=False"

    @property
    def grammar_rule(self) -> tuple[GrammarKind, str] | None:
        """What the text must be, as the field that says it and its value; None: anything."""
        rules = ((name, getattr(self, name)) for name in get_args(GrammarKind))
        return next((rule for rule in rules if rule[1] is not None), None)

    def of_choice(self, number: int) -> SamplingParams:
        """The options of one of the n generations, from 0 on."""
        return self if self.n == 1 else replace(self, n=1, seed=None if self.seed is None else self.seed + number)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


_DECLARED: dict[str, SamplingOption] = {item.name: item.metadata["option"] for item in fields(SamplingParams)}
# Every option by its name, those first that say what is sampled from.
SAMPLING_OPTIONS = dict(sorted(_DECLARED.items(), key=lambda named: named[1].greedy or not named[1].step))
NOT_GREEDY = tuple(name for name, declared in SAMPLING_OPTIONS.items() if not declared.greedy)


def changed_options(sampling: SamplingParams) -> list[str]:
    """The options that are not what they are by default."""
    return [name for name, declared in SAMPLING_OPTIONS.items() if getattr(sampling, name) != declared.default]


def idle_options(temperature: float, given: Collection[str]) -> list[str]:
    """Of the options that were given, those without effect at this temperature: greedy decoding looks at none of NOT_GREEDY."""
    return [name for name in NOT_GREEDY if name in given] if temperature == 0 else []


# ---- arguments of a decoder's methods ----


def names_settings(call: Callable[Asked, Given]) -> Callable[Asked, Given]:
    """The method with an error of its own for an argument that it does not have: most are options of SamplingParams."""
    known = [name for name in signature(call).parameters if name != "self"]

    @wraps(call)
    def checked(*args: Asked.args, **kwargs: Asked.kwargs) -> Given:
        for name, value in kwargs.items():
            if name not in known:
                alike = checks.nearest_name(name, [*known, *SAMPLING_OPTIONS])
                option = alike if alike in SAMPLING_OPTIONS else ""
                works = f"SamplingParams({option}={checks.shown(value)}) as `sampling`" if option else alike or "leave it out"
                raise TypeError(f"{call.__name__} has no argument {name!r}; nearest thing that works: {works}")
        return call(*args, **kwargs)

    return checked

"""What each release of `speculators` (Red Hat, vLLM) wrote into a head's config: kinds of heads, keys, and what began when.

Releases are 0.1 to 0.9, and are told by the second number.  The library writes all keys of a class, whether they are set or
not; a file that a later release reads and saves again gets that release's keys, with values that change nothing, and keeps the
name of its own.  This module knows no tensors.
"""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

from specdec.draft.formats.body import only_keys
from specdec.models.checkpoints.config_values import text

NEWEST = 9
MARK = "speculators_model_type"
VERSION = "speculators_version"
AUX = "eagle_aux_hidden_state_layer_ids"


class ReleasedKey(NamedTuple):
    """first, last: the releases that wrote the key.

    absent: what a head of a release before the first one means; such a head may say it too.  only: the values that the library
    writes itself, where there are others that nobody computes; empty: any.
    """

    first: int
    last: int = NEWEST
    absent: Any = ...
    only: tuple[Any, ...] = ()


_EVERY = {
    **dict.fromkeys(
        "architectures auto_map dtype speculators_config speculators_model_type speculators_version torch_dtype "
        "transformer_layer_config transformers_version".split(),
        ReleasedKey(1),
    ),
    # Names of transformers' own classes, which got into the files until the library left them out.
    "has_no_defaults_at_init": ReleasedKey(1, 4, only=(False,)),
    "base_model_ep_plan": ReleasedKey(1, 4, only=(None,)),
    "tie_word_embeddings": ReleasedKey(5, absent=False, only=(False,)),
}
_EAGLE3 = {
    **_EVERY,
    **dict.fromkeys(("draft_vocab_size", "norm_before_residual", "target_hidden_size"), ReleasedKey(1)),
    AUX: ReleasedKey(2, absent=None),
    "embed_requires_grad": ReleasedKey(4, absent=False),
    "norm_before_fc": ReleasedKey(5, absent=False),
    "fc_norm": ReleasedKey(7, absent=False),
    "norm_output": ReleasedKey(7, absent=False),
}
_BLOCK = {
    **_EVERY,
    **dict.fromkeys(
        "draft_vocab_size block_size target_hidden_size aux_hidden_state_layer_ids mask_token_id".split(),
        ReleasedKey(5),
    ),
    "sliding_window_non_causal": ReleasedKey(6, absent=False),
    "sample_from_anchor": ReleasedKey(7, absent=False),
}
_EAGLE1 = dict.fromkeys(("transformer_layer_architecture", "layernorms", "fusion_bias"), ReleasedKey(1))
_PEAGLE = dict.fromkeys(("num_depths", "down_sample_ratio", "down_sample_ratio_min"), ReleasedKey(6, 6))
_MARKOV = dict.fromkeys(
    ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov"),
    ReleasedKey(7),
)


_SELECTION = dict.fromkeys(("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"), ReleasedKey(8))


class KindKeys(NamedTuple):
    """The releases that have a kind of head, and its keys; none: no reader here has the kind."""

    first: int
    last: int
    keys: dict[str, ReleasedKey]


KINDS = {
    "eagle": KindKeys(1, 6, {**_EVERY, **_EAGLE1}),
    "eagle3": KindKeys(1, NEWEST, _EAGLE3),
    "peagle": KindKeys(6, NEWEST, {**_EAGLE3, "mask_token_id": ReleasedKey(6), **_PEAGLE}),
    "dflash": KindKeys(5, NEWEST, {**_BLOCK, "max_anchors": ReleasedKey(5, 6)}),
    "dspark": KindKeys(7, NEWEST, {**_BLOCK, **_MARKOV}),
    "mtp": KindKeys(6, NEWEST, {}),
    "dflash2": KindKeys(8, NEWEST, {**_BLOCK, **_SELECTION}),
    "xpress": KindKeys(9, NEWEST, {}),
}
INSTEAD = {  # what can't be run of the layout, and what to do
    "mtp": "an MTP layer in a folder of its own; nearest thing that works: draft='mtp', with the layer put into its target's "
    "folder, as the library's own `stitch` does",
    "xpress": "an XPress head; nearest thing that works: a DFlash2 or DSpark head",
}
# Keys that no forward pass reads.
TRAINING = ("max_anchors", "down_sample_ratio", "down_sample_ratio_min", "embed_requires_grad")
LEAKED = ("has_no_defaults_at_init", "base_model_ep_plan")


class Release(NamedTuple):
    """The release that wrote a head, or the oldest and the newest that may have.  text: as its config names it."""

    oldest: int
    newest: int
    text: str

    def since(self, first: int, what: str, where: str) -> bool:
        """Whether the head is of that release or a later one.  ValueError, naming `what`, if it may be of either side."""
        if self.oldest < first <= self.newest:
            raise ValueError(
                f"{where}: {what} changed with speculators 0.{first}, and this head of {VERSION} {self.text} may have been "
                f"made before or after it; nearest thing that works: {VERSION} of the release that trained it"
            )
        return self.oldest >= first

    @property
    def said(self) -> str:
        if self.oldest == self.newest:
            return f"{self.text}: as release 0.{self.oldest} meant its keys"
        return f"{self.text}: a head of releases 0.{self.oldest} to 0.{self.newest}"


def release_of(raw: dict[str, Any], kind: str, where: str) -> Release:
    """The release, all of whose keys are known.

    kind: of the head, as this layout calls it.  ValueError for another kind, and for keys that are unknown, of another release,
    or of a value that is not computed.
    """
    if raw.get(MARK) != kind:
        raise ValueError(f"{where}: {MARK} must be {kind!r}, got {raw.get(MARK)!r}")
    first, last, keys = KINDS[kind]
    only_keys(raw, keys, where)
    release = _named(raw, where)
    if release.newest < first or release.oldest > last:
        began = f"began with speculators 0.{first}" if release.newest < first else f"ended with speculators 0.{last}"
        raise ValueError(f"{where}: {MARK} {kind!r} {began}, got {VERSION} {release.text!r}")
    saved_again = False
    for name, value in raw.items():
        if (key := keys.get(name)) is None:
            continue
        if key.only and not any(value is one for one in key.only):
            raise ValueError(f"{where}: {name} must be {' or '.join(map(_json, key.only))}, got {value!r}")
        if release.newest < key.first and value is key.absent:
            saved_again = True
        elif release.newest < key.first or release.oldest > key.last:
            also = "" if key.absent is ... or release.oldest > key.last else f", where only {_json(key.absent)} says the same"
            raise ValueError(
                f"{where}: {name} is a key of speculators {_span(key)}, got {VERSION} {release.text!r}, which does not have "
                f"it{also}"
            )
    return release._replace(newest=NEWEST) if saved_again else release


def refuse_kind(raw: dict[str, Any], where: str) -> None:
    """ValueError for a kind of head that no reader of this layout has."""
    kind = raw.get(MARK)
    if isinstance(kind, str) and kind in INSTEAD:
        raise ValueError(f"{where}: {MARK} {kind!r} is {INSTEAD[kind]}; this kind can't be run yet")
    readable = [name for name, known in KINDS.items() if known.keys]
    if kind not in readable:
        raise ValueError(f"{where}: {MARK} must be one of {', '.join(readable)}, got {kind!r}")


def passed_over(raw: dict[str, Any]) -> dict[str, str]:
    """What is made of the keys that change no forward pass, for users."""
    said = {name: f"{_json(raw[name])}: read in training alone" for name in TRAINING if name in raw}
    return said | {name: f"{_json(raw[name])}: a name of transformers' classes" for name in LEAKED if name in raw}


def _named(raw: dict[str, Any], where: str) -> Release:
    name = text(raw, VERSION, where)
    if name is None:
        raise ValueError(f"{where} lacks {VERSION}, by which its keys are read; expected 0.1 to 0.{NEWEST}")
    match = re.fullmatch(r"0\.(\d{1,4})((?:\.\d+)*)(\.?(?:dev|post|rc|a|b)\d*)?(?:[.+].*)?", name)
    if match is None or not (minor := int(match[1])):
        raise ValueError(f"{where}: {VERSION} must be 0.1 to 0.{NEWEST}, got {name!r}; its layout may be another one")
    oldest = newest = minor
    if match[3]:  # 0.4.1.dev3 and 0.4.0.post1 were made after a release, 0.4.0.dev3 before one
        is_after = bool(match[2].strip(".0")) or "post" in match[3]
        oldest, newest = (minor, minor + 1) if is_after else (minor - 1, minor)
    # A later release is read as the newest one that is known, with its keys.
    return Release(min(max(oldest, 1), NEWEST), min(newest, NEWEST), name)


def _span(key: ReleasedKey) -> str:
    if key.first == key.last:
        return f"0.{key.first}"
    return f"0.{key.first} and later" if key.last == NEWEST else f"0.{key.first} to 0.{key.last}"


def _json(value: Any) -> str:
    return json.dumps(value)

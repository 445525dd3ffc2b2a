"""Which of its target's tokens a drafter with a tokenizer of its own has: those with the same text behind them.

Where all ids mean the same, the drafter reads and writes ids; otherwise it goes by the text behind them.
"""

from __future__ import annotations

from pathlib import Path

from specdec.draft.kind import OpenDrafter
from specdec.draft.model.translation import Translation, translate
from specdec.models.config import ModelConfig
from specdec.prompts.token_bytes import bytes_of
from specdec.prompts.tokenizer import Tokenizer


def match_vocabulary(drafter: OpenDrafter, target_folder: Path, target: ModelConfig) -> None:
    """Has the drafter read its target's tokens by the text behind them, where their ids do not mean the same.

    Ids beyond either vocabulary are padding of the other, as are ids that have no token in one of them.  Without both
    tokenizers there is nothing to compare but the number of ids, which must then be equal.  ValueError if no token is common.
    """
    if drafter.own_text is None:
        return
    (config,) = drafter.model.needs.models
    sizes = f"{config.vocab_size} ids, and the target {target.vocab_size}"
    ours, theirs = Tokenizer(drafter.own_text), Tokenizer(target_folder)
    own, its = ours.tokens(), theirs.tokens()
    nearest = "nearest thing that works: a model with the target's tokenizer, or draft='ngram'"
    if own is None or its is None:
        without = drafter.own_text if own is None else target_folder
        if config.vocab_size != target.vocab_size:
            raise ValueError(
                f"draft: {drafter.own_text} has {sizes}, and {without} holds no tokenizer by which they could be told to mean "
                f"the same tokens; {nearest}"
            )
        return
    both = min(config.vocab_size, target.vocab_size)
    if all(own[token] == its[token] for token in own.keys() & its.keys() if token < both):
        return
    words = _translation(ours, theirs, drafter.own_text, target_folder, config, target)
    if not words.drafts:
        raise ValueError(f"draft: {drafter.own_text} has none of the target's tokens; it has {sizes}; {nearest}")
    drafter.translate(words)


def _translation(
    ours: Tokenizer, theirs: Tokenizer, own_folder: Path, target_folder: Path, config: ModelConfig, target: ModelConfig
) -> Translation:
    own, its = bytes_of(ours, own_folder), bytes_of(theirs, target_folder)
    own_ids = {text: token for text, token in own.ids.items() if token < config.vocab_size}
    ends = {token: own.end for token in (its.end, *target.eos_ids) if token is not None and own.end is not None}
    begins = {} if its.begin is None or own.begin is None else {its.begin: own.begin}
    return translate(own_ids, its.of, its.ids, target.vocab_size, begins | ends)

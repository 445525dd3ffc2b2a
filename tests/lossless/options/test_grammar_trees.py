"""What the target reads under a grammar, with each kind of drafter: no draft that breaks the grammar, and the same text."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from toolkit.checkpoints.grammars import allowed, letters_json, paths_of
from toolkit.driver import Driver
from toolkit.heads.block_zoo import HEADS  # noqa: F401  makes heads of one pass known to the Zoo
from toolkit.models import Zoo
from toolkit.mtp_layers.targets import MtpZoo

from specdec import SamplingParams, SpecConfig, SpecDecoder
from specdec.grammar.library import Grammars
from specdec.steps import Grammar, RunRound

V, EOS = 40, 39  # of the small targets
RULE = "([a-f]{1,9}[0-2]|gh(ij)+k){3,9}"
KINDS = [  # target, drafter, shape
    ("llama", "eagle3", (4, 1, 5)),
    ("llama", "eagle3", (4, 3, 12)),
    ("llama", "ngram", (3, 3, 10)),
    ("llama", "p-eagle", (4, 1, 5)),
    ("llama", "dspark", (4, 3, 14)),
    ("llama", "dflash2", (4, 3, 14)),
    ("mimo", "mtp", (3, 2, 8)),
]


def load(zoo: Zoo, root: Path, target: str, draft: str, spec: SpecConfig) -> SpecDecoder:
    settings: dict[str, Any] = {"max_batch_size": 3, "page_size": 4}
    if target == "mimo":
        decoder = MtpZoo(root).decoder(target, draft, spec, **settings)
    else:
        decoder = zoo.decoder(target, draft, spec, **settings)
    Driver(decoder).use_grammars(Grammars(lambda: letters_json(V), V, [EOS]))
    return decoder


@pytest.mark.slow_cases(keep=2)
@pytest.mark.parametrize(("target", "draft", "shape"), KINDS, ids=str)
def test_no_broken_draft_is_read(zoo: Zoo, tmp_path: Path, target: str, draft: str, shape: Any) -> None:
    """Three requests with a grammar and one without, greedy and with a seed.  Keeps out: a kind of drafter whose trees go
    past the grammar; a row that gets another row's tree; a free row whose tree is changed."""
    decoder = load(zoo, tmp_path, target, draft, SpecConfig(*shape))
    held = SamplingParams(max_tokens=12, regex=RULE, stop_token_ids=[EOS])
    params = [
        held,
        SamplingParams(max_tokens=12),
        replace(held, temperature=1.0, seed=4),
        replace(held, temperature=0.7, seed=5),
    ]
    prompts = [[3, 1, 4, 1, 5], [9, 2, 6, 5], [3, 5, 8, 9, 7, 9], [3, 2, 3, 8, 4]]
    plain = [out.token_ids for out in decoder.generate(prompts, params, speculate=False)]
    driver = Driver(decoder)
    with driver.watch_trees() as trees:
        outputs = decoder.generate(prompts, params)
    assert [out.token_ids for out in outputs] == plain
    rule, broken, added = Grammar("regex", RULE, (EOS,)), 0, 0

    @cache
    def may_follow(text: tuple[int, ...]) -> list[int]:
        mask_1X, matcher = np.zeros((1, -(-V // 32)), np.int32), decoder.grammars.matcher(rule)
        matcher.take(text)
        matcher.fill(mask_1X)
        return [] if matcher.is_over else allowed(mask_1X[0])

    def keeps(text: list[int], path: tuple[int, ...]) -> bool:
        return all(path[i] in may_follow((*text, *path[:i])) for i in range(len(path)))

    for tree in trees:
        read, drafted = (paths_of(*each) for each in ((tree.tokens, tree.parents), (tree.drafts, tree.drafts_above)))
        kept = [path for path in drafted if keeps(tree.text, path)]
        real = [path for path in read if keeps(tree.text, path)]
        assert read[: len(real)] == real and real[: len(kept)] == kept, "drafts that keep the grammar, others that do, padding"
        last = real[-1] if shape[1] == 1 else ()
        assert not any(keeps(tree.text, (*last, token)) for token in tree.tokens[len(real) :]), (
            "padding is banned where it begins"
        )
        broken, added = broken + len(drafted) - len(kept), added + len(real) - len(kept)
    assert trees and broken and added
    driver.assert_nothing_leaked()


def test_a_text_whose_drafts_end_goes_on_plainly(zoo: Zoo, tmp_path: Path) -> None:
    """Keeps out: a scheduler that does not hear of it, and goes on with rounds that draft for nobody."""
    decoder, kinds = load(zoo, tmp_path, "llama", "eagle3", SpecConfig(4, 1, 5)), list[str]()
    prompt, held = [3, 1, 4, 1, 5], SamplingParams(max_tokens=30, regex=RULE, stop_token_ids=[EOS])
    (plain,) = decoder.generate(prompt, held, speculate=False)
    driver = Driver(decoder)
    driver.before_step(RunRound, 2, driver.reach_grammar_limits)
    driver.watch(lambda step: kinds.append(step.kind) if isinstance(step, RunRound) else None)
    (out,) = decoder.generate(prompt, held)
    assert out.token_ids == plain.token_ids and len(out.token_ids) > 12
    assert kinds[:3] == ["speculative"] * 3 and kinds[-1] == "plain" and kinds.count("plain") > 5
    assert not any(out.stats.accepted_per_round[3:])
    driver.assert_nothing_leaked()

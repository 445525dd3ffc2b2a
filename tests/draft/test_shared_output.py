"""Heads that read logits with the target's language-model head, for targets whose logits are multiplied or divided."""

import pytest
import toolkit.heads.block_zoo
import toolkit.recurrent.mamba_targets  # noqa: F401 (and its targets)
import torch
from toolkit.models import Zoo

from specdec.draft.eagle.head import EagleHead
from specdec.draft.load import load_head

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("name", "kind"),
    [("granitemoehybrid", "eagle1"), ("granite dense", "dflash"), ("falcon_h1", "eagle1"), ("falcon_h1", "eagle3")],
)
def test_a_draft_is_as_probable_as_the_target_would_say(zoo: Zoo, name: str, kind: str) -> None:
    """Keeps out: probabilities of drafts without the target's multipliers, by which trees grow in the wrong places and
    estimates of survival are too low or too high; multipliers for a head whose language-model head is its own.
    """
    target = zoo.decoder(name).model
    scale = target.config.logits_multiplier / target.config.logits_divisor
    assert scale != 1
    head = load_head(zoo.head(name, kind), target, 64, CPU, torch.float32)
    hidden_TH = torch.randn(5, 32, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        got = head.logits(hidden_TH)
        if kind == "eagle3":
            assert isinstance(head, EagleHead) and head.lm_head is not target.lm_head
            read = hidden_TH if head.returns_normed or not head.config.norms_logits else head.norm(hidden_TH)
            assert torch.equal(got, head.lm_head(read))
        else:
            assert head.lm_head is target.lm_head
            torch.testing.assert_close(got, target.logits(hidden_TH))
            torch.testing.assert_close(got, scale * target.lm_head(hidden_TH))

"""Tokens that nobody needs choose no expert: those of padded rows, and columns after a row's last one.

Shapes: B rows, N tokens of each, K experts of a token (top_k).
"""

from pathlib import Path

import pytest
import torch
from toolkit.checkpoints.mixtures import save_mixture
from toolkit.driver import Driver
from toolkit.inside.captures import capturing
from toolkit.kernels import DEVICE
from toolkit.models import ragged_prompts
from toolkit.mtp_layers.targets import MtpZoo
from torch import Tensor

from specdec import SamplingParams, SpecConfig
from specdec.models.mixtures.layer import MixtureOfExperts
from specdec.models.mixtures.live import live_now, live_rows
from specdec.models.mixtures.products import grouped_experts, masked_experts, ordered_experts
from specdec.models.registry import choose_target, load_chosen
from specdec.ops.products.experts import Form
from specdec.ops.products.kernels.experts.own_pairs_triton import launch_own_pairs
from specdec.ops.products.own_pairs import LiveRows, own_pairs


@pytest.mark.parametrize(("B", "N", "K"), [(3, 1, 2), (4, 6, 3), (130, 2, 8)])
@pytest.mark.parametrize("has_last", [False, True])
def test_the_kernel_skips_what_the_definition_skips(B: int, N: int, K: int, has_last: bool) -> None:
    """Keeps out: a row taken for a column, a column of another row, the last block's end."""
    generator = torch.Generator().manual_seed(B)
    active_B, last_B = torch.randint(2, (B,), generator=generator).int(), torch.randint(N, (B,), generator=generator)
    live = LiveRows(active_B.to(DEVICE), last_B.to(DEVICE) if has_last else None)
    weights, ids = torch.rand(B * N, K, generator=generator), torch.randint(9, (B * N, K), generator=generator)
    got = launch_own_pairs(weights.to(DEVICE), ids.to(DEVICE), range(2, 7), live)
    for at, (w, e) in enumerate(zip(weights, ids)):
        row, column = divmod(at, N)
        skips = not active_B[row] or (has_last and N > 1 and column > last_B[row])
        numbers = [5 if skips or not 2 <= each < 7 else each - 2 for each in e.tolist()]
        assert got[1][at].tolist() == numbers
        assert torch.equal(got[0][at].cpu(), w.masked_fill(torch.tensor(numbers) == 5, 0.0))
    weights_64 = weights.to(DEVICE).double()  # by the definition, also on a GPU
    for one, other in zip(got, own_pairs(weights_64, ids.to(DEVICE), range(2, 7), live)):
        assert torch.equal(one.double(), other.double())


@torch.inference_mode()
def test_ordered_kernels_skip_pairs() -> None:
    """Those of the deterministic mode, over an expert of NaN that no pair has.  Keeps out: one that is read all the same."""
    generator = torch.Generator().manual_seed(0)
    x, gate_up, down = (torch.randn(size, generator=generator) / 4 for size in ((3, 32), (3, 32, 32), (3, 32, 16)))
    weights, ids = own_pairs(torch.rand(3, 2, generator=generator), torch.tensor([[0, 1], [3, 2], [2, 5]]), range(1, 4))
    gate_up[2:], down[2:] = torch.nan, torch.nan
    weights[ids == 2], ids[ids == 2] = 0.0, 3
    want = masked_experts(x, weights, ids, gate_up, down, Form(skips=True))
    given = (each.to(DEVICE) for each in (x, weights, ids, gate_up, down))
    torch.testing.assert_close(ordered_experts(*given).cpu(), want, atol=1e-5, rtol=1e-5)


def chosen(T: int, generator: torch.Generator) -> Tensor:
    """[T, 3]: three of 9 experts of each token, none of them twice, as a router chooses."""
    return torch.rand(T, 9, generator=generator).topk(3).indices


@pytest.mark.gpu
@pytest.mark.parametrize("T", [1, 6, 200])
@torch.inference_mode()
def test_dense_products_skip_pairs_in_graphs(T: int) -> None:
    """torch's grouped product and the ordered kernels, replayed with other choices, over memory that holds NaN.

    Keeps out: rows after the last group, which nobody writes, in a token's sum; a NaN expert that is read all the same."""
    generator = torch.Generator().manual_seed(T)
    sizes = ((T, 128), (6, 128, 128), (6, 128, 64))  # of 6 experts, the last is never read
    x, gate_up, down = (torch.randn(size, generator=generator).to("cuda", torch.bfloat16) / 8 for size in sizes)
    weights = torch.rand(T, 3, generator=generator).cuda()
    ids = chosen(T, generator).cuda()
    form = Form(skips=True)

    def both() -> tuple[Tensor, Tensor]:
        mine = own_pairs(weights, ids, range(2, 7))
        grouped = grouped_experts(x, *mine, gate_up[:5], down[:5], form)
        return grouped, ordered_experts(x, *mine, gate_up[:5], down[:5])

    gate_up[5], down[5] = torch.nan, torch.nan
    torch.full((1 << 24,), torch.nan, device="cuda")  # what later launches find where nobody has written
    both()
    graph = torch.cuda.CUDAGraph()
    with capturing(graph):
        found = both()
    for seed in range(3):
        ids.copy_(chosen(T, torch.Generator().manual_seed(seed)))
        graph.replay()
        of_64 = own_pairs(weights.double(), ids, range(2, 7))
        want = masked_experts(x.double(), *of_64, gate_up[:5].double(), down[:5].double(), form)
        for got in found:
            torch.testing.assert_close(got.double(), want, atol=2e-2 * float(want.abs().max()) + 1e-6, rtol=2e-2)


@torch.inference_mode()
def test_numbers_of_padded_rows_reach_nobody(tmp_path: Path) -> None:
    """Keeps out: NaN of a padded row in another row's sum, and in a shared expert's."""
    folder = save_mixture(tmp_path / "m", "qwen2-moe", num_hidden_layers=1)
    model = load_chosen(choose_target(folder), folder, 64, torch.device("cpu"), torch.float32, False)
    (mixture,) = (part for part in model.modules() if isinstance(part, MixtureOfExperts))
    seen: list[Tensor] = []
    mixture.watch = seen.append
    for B, N in ((2, 1), (4, 6)):
        x_BNH = torch.randn(B, N, 32, generator=torch.Generator().manual_seed(B))
        want = mixture(x_BNH[0])
        x_BNH[1:] = torch.nan
        with live_rows(torch.tensor([1] + [0] * (B - 1), dtype=torch.int32)):
            got = mixture(x_BNH.flatten(0, 1))
        torch.testing.assert_close(got[:N], want)
        assert (seen[-1][:N] < 8).all() and (seen[-1][N:] == 8).all()


def test_rounds_say_which_tokens_are_needed(tmp_path: Path) -> None:
    """Three rows padded to four, with an MTP layer that has experts.

    Keeps out: passes of rounds that don't say; what they said last, in a chunk of prompts; texts that depend on it."""
    zoo, texts, seen = MtpZoo(tmp_path), [], list[Tensor]()
    for pads in (False, True):
        decoder = zoo.decoder("glm4", "mtp", SpecConfig(3, 2, 6), max_batch_size=4)
        if pads:
            Driver(decoder).pad_rows()
            for model in (decoder.model, decoder.head):
                for part in model.modules():  # type: ignore[union-attr]
                    if isinstance(part, MixtureOfExperts):
                        part.watch = lambda ids: seen.append(ids) if live_now() is not None else None
        outputs = decoder.generate(ragged_prompts(40, 3, seed=11), SamplingParams(max_tokens=8, ignore_eos=True))
        texts.append([out.token_ids for out in outputs])
    assert texts[0] == texts[1]
    of_four = [ids.unflatten(0, (4, -1)) for ids in seen if len(ids) % 4 == 0]
    assert {ids.shape[1] for ids in of_four} == {2, 4, 6}, "branches, an extend's columns, a tree's nodes"
    assert all((ids[3] == ids.max()).all() and ids.max() == 8 for ids in of_four)
    extends = [ids for ids in of_four if ids.shape[1] == 4]
    assert any((ids[0, -1] == 8).all() for ids in extends) and all((ids[0, 0] < 8).all() for ids in extends)


@pytest.mark.gpu
@torch.inference_mode()
@pytest.mark.parametrize("name", ["qwen3-moe", "mixtral", "glm4-moe", "qwen2-moe"])
def test_a_token_alone_is_normed_and_routed_in_one_launch(name: str, tmp_path: Path) -> None:
    """Keeps out: a mixture of another row than the norm's, a stream without what attention adds, and a padded token's experts.

    Rules that rank groups, and weights of shared experts, take two launches.
    """
    folder = save_mixture(tmp_path / "m", name)
    model = load_chosen(choose_target(folder), folder, 64, torch.device("cuda"), torch.bfloat16, False)
    layer = next(part for part in model.modules() if isinstance(getattr(part, "mlp", None), MixtureOfExperts))
    mixture, norm = layer.mlp, layer.post_attention_layernorm
    generator = torch.Generator().manual_seed(3)
    for live in (1, 0):
        x, delta = (torch.randn(1, model.config.hidden_size, generator=generator).to("cuda", torch.bfloat16) for _ in range(2))
        with live_rows(torch.tensor([live], dtype=torch.int32, device="cuda")):
            total, got = mixture.after_norm(x, delta, norm)
            want_total, normed = norm.add(x, delta)
            want = mixture(normed)
        assert torch.equal(total, want_total)
        torch.testing.assert_close(got, want, atol=1e-2 * float(want.abs().max()) + 1e-6, rtol=2e-2)

"""What a table finds, against a search by hand; the kernel against the definition."""

import random

import numpy as np
import pytest
import torch
from toolkit.kernels import DEVICE
from toolkit.oracles.ngrams import random_texts

from specdec.draft.join.survival import ALL, FEW, MOST, ONCE
from specdec.draft.ngram.lookup import MAX_MATCH, PagedTexts
from specdec.draft.suffix.device_table import DeviceTable
from specdec.draft.suffix.host_table import TOKEN_BYTES, HostTable, TableText, host_table
from specdec.draft.suffix.lookup import CONTINUATIONS, Continuations, find_continuations
from specdec.draft.suffix.sort import sorted_places

LENS, DEPTH = [0, 1, 2, 3, 17, 33, 48], 6
Scopes = dict[int, list[TableText]]


def some_texts(seed: int, scopes: int, alphabet: int) -> Scopes:
    """Texts of few tokens, some of which are read only."""
    rng = random.Random(seed)
    return {
        10 + 7 * scope: [
            TableText(np.asarray([rng.randrange(alphabet) for _ in range(rng.randrange(40))], dtype=np.int32), rng.randrange(4))
            for _ in range(rng.randrange(5))
        ]
        for scope in range(scopes)
    }


def on_device(table: HostTable, capacity: int, device: torch.device, before: HostTable | None = None) -> DeviceTable:
    made = DeviceTable(capacity, device)
    for each in (*([before] if before else []), table):
        made.fill(0, each.text_N[:5], each.order_X[:3])  # in parts, as steps bring it
        made.fill(5, each.text_N[5:], np.zeros(0, np.int32))
        made.fill(3, np.zeros(0, np.int32), each.order_X[3:])
        made.use(each.keys_S, each.bounds_S2)
    return made


def room_for(rows: int, depth: int, device: torch.device) -> Continuations:
    """Views of something larger, which hold what another round has left."""
    tokens = torch.full((rows, CONTINUATIONS + 1, depth + 2), 7, device=device)
    lengths, support = torch.full((2, rows, CONTINUATIONS + 2), 7, device=device)[..., 1:-1]
    return Continuations(tokens[:, 1:], lengths, support)


def found(table: DeviceTable, paged: PagedTexts, keys: torch.Tensor, depth: int) -> Continuations:
    out = room_for(len(keys), depth, keys.device)
    find_continuations(table, paged, keys, depth, out)
    assert bool((out.tokens_BMR[..., depth:] == -1).all())
    return out


def found_by_kernel(table: DeviceTable, paged: PagedTexts, keys: torch.Tensor, depth: int, looks: int) -> Continuations:
    from specdec.draft.suffix.lookup_triton import launch_continuations

    out = room_for(len(keys), depth, keys.device)
    launch_continuations(table, paged, keys, depth, out, looks)
    return out


def matches_by_hand(texts: list[TableText], entries: list[int], depth: int) -> dict[tuple[int, tuple[int, ...]], int]:
    """How often each (length of the match, continuation) occurs, over all places of these texts that match at all."""
    found: dict[tuple[int, tuple[int, ...]], int] = {}
    for text in texts:
        tokens = text.tokens_T.tolist()
        for place in range(text.context, len(tokens)):
            length = 0
            while length < min(MAX_MATCH, place, len(entries)) and tokens[place - 1 - length] == entries[-1 - length]:
                length += 1
            if length:
                key = length, tuple(tokens[place : place + depth])
                found[key] = found.get(key, 0) + 1
    return found


@pytest.mark.parametrize("seed", range(24))
def test_the_longest_match_is_found(seed: int) -> None:
    """Keeps out: a search that ends one place off, a scope's neighbours, a text that goes on into the next one, context that
    is proposed, two proposals that begin alike."""
    texts = some_texts(seed, 3, 2 + seed % 5)
    table = host_table(texts)
    view = on_device(table, len(table.text_N) + seed % 2, torch.device("cpu"))
    paged, rows = random_texts(LENS, 2 + seed % 5, None, seed)
    for key in (10, 17, 24, 99, 0):
        got = found(view, paged, torch.full((len(LENS),), key), DEPTH)
        for b, entries in enumerate(rows):
            known = matches_by_hand(texts.get(key, []), entries, DEPTH)
            paths = [[token for token in path if token >= 0] for path in got.tokens_BMR[b].tolist()]
            lengths = got.lengths_BM[b].tolist()
            assert lengths[0] == max((length for length, _ in known), default=0)
            for length, path in zip(lengths, paths, strict=True):
                assert (length, tuple(path)) in known if length else not path
            assert len({tuple(path[:1]) for path, length in zip(paths, lengths, strict=True) if length}) == sum(
                map(bool, lengths)
            )


def test_the_commonest_continuation_comes_first() -> None:
    """Keeps out: the first place in place of what most texts go on with."""
    often, once = ([5, 6, 7, *end] for end in ([1, 2, 3], [4, 4, 4]))
    table = host_table({3: [TableText(np.asarray(tokens, dtype=np.int32)) for tokens in (once, often, often)]})
    paged, _ = random_texts([3], 9, None, 0)
    paged.tokens_N[paged.pages.slots_at(torch.arange(3)[None])[0]] = torch.tensor([5, 6, 7], dtype=torch.int32)
    got = found(on_device(table, 64, torch.device("cpu")), paged, torch.tensor([3]), 4)
    assert got.tokens_BMR[..., :4].tolist() == [[[1, 2, 3, -1], [4, 4, 4, -1]]] and got.lengths_BM.tolist() == [[3, 3]]
    assert got.support_BM.tolist() == [[MOST, FEW]]


def check_kernel(seed: int, looks: int, span: int | None) -> None:
    table = host_table(some_texts(seed, 4, 2 + seed % 4))
    capacity = len(table.text_N) + seed % 3
    paged, _ = random_texts(LENS, 2 + seed % 4, span, seed)
    keys = torch.tensor([10, 17, 24, 31, 31, 0, 17])
    earlier = host_table(some_texts(seed + 1, 1, 3))
    before = earlier if len(earlier.text_N) <= capacity else None  # so that either half is read
    want = found(on_device(table, capacity, torch.device("cpu"), before), paged, keys, DEPTH)
    there = PagedTexts(paged.tokens_N.to(DEVICE), paged.pages.to(DEVICE), paged.lens_B.to(DEVICE), span)
    got = found_by_kernel(on_device(table, capacity, DEVICE, before), there, keys.to(DEVICE), DEPTH, looks)
    for ours, theirs in zip(got, want, strict=True):
        assert torch.equal(ours.cpu(), theirs)
    assert want.tokens_BMR.shape[1] == CONTINUATIONS


@pytest.mark.slow_cases
@pytest.mark.parametrize(("looks", "span"), [(4, None), (256, None), (4, 9)], ids=str)
def test_the_kernel_finds_the_same(looks: int, span: int | None) -> None:
    """Keeps out: looks that miss what lies between two of them, another half's places, tokens that a ring has lost."""
    for seed in range(3):
        check_kernel(seed, looks, span)


@pytest.mark.gpu
def test_the_kernel_on_a_gpu() -> None:
    for seed in range(60):
        check_kernel(seed, [4, 32, 256][seed % 3], [None, 9][seed % 2])


@pytest.mark.gpu
def test_a_large_table_on_a_gpu() -> None:
    """Keeps out: too few steps of the search, and numbers that leave 32 bits, in a table of millions of places."""
    tokens = np.random.default_rng(0).integers(0, 50, 3_000_000).astype(np.int32)
    table = host_table({5: [TableText(tokens)]})
    paged, _ = random_texts(LENS, 50, None, 1)
    keys = torch.full((len(LENS),), 5)
    want = found(on_device(table, 4_000_000, torch.device("cpu")), paged, keys, 16)
    there = PagedTexts(paged.tokens_N.to(DEVICE), paged.pages.to(DEVICE), paged.lens_B.to(DEVICE), None)
    got = found_by_kernel(on_device(table, 4_000_000, DEVICE), there, keys.to(DEVICE), 16, 256)
    assert torch.equal(got.tokens_BMR.cpu(), want.tokens_BMR) and torch.equal(got.lengths_BM.cpu(), want.lengths_BM)
    assert int(want.lengths_BM.max()) >= 3


@pytest.mark.parametrize("seed", range(20))
def test_places_are_sorted_by_what_precedes_them(seed: int) -> None:
    """Keeps out: ranks that are taken of the wrong side, and equal places in another order from run to run."""
    rng = np.random.default_rng(seed)
    text = rng.integers(-1, 3, rng.integers(1, 60)).astype(np.int32)
    places = np.flatnonzero(text >= 0).astype(np.int32)

    def before(place: int) -> list[int]:
        return [int(text[place - 1 - back]) if place > back else -1 for back in range(MAX_MATCH)]

    assert sorted_places(text, places).tolist() == sorted(places.tolist(), key=before)


def test_a_text_of_one_token_is_sorted_and_found_as_fast() -> None:
    """Keeps out: comparisons of long runs, which one token a million times would make endless; a search that reads all places
    that match; more bytes of a token than are counted."""
    import time
    import tracemalloc

    begun = time.perf_counter()
    tracemalloc.start()
    table = host_table({1: [TableText(np.zeros(1 << 20, dtype=np.int32))]})
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert time.perf_counter() - begun < 20 and len(table.order_X) == 1 << 20 and most < (1 << 20) * 160
    view = on_device(table, len(table.text_N), torch.device("cpu"))
    assert view.text_2N.nbytes + view.order_2N.nbytes == view.capacity * TOKEN_BYTES
    paged, _ = random_texts([30], 9, None, 0)
    paged.tokens_N.zero_()
    begun = time.perf_counter()
    for _ in range(20):
        got = found(view, paged, torch.tensor([1]), DEPTH)
    assert time.perf_counter() - begun < 10
    assert got.lengths_BM.tolist() == [[MAX_MATCH, 0]] and got.support_BM.tolist() == [[ALL, ONCE]]
    assert not got.tokens_BMR[0, 0, :DEPTH].any()

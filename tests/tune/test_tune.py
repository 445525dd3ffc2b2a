"""`specdec tune`: which products a model has, what is tried, what is kept, and what is refused at the door."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from toolkit.models import Zoo

from specdec.cli import tune as command
from specdec.cli.entry import main
from specdec.draft.formats.empty import empty_head
from specdec.draft.formats.spec import HeadSpec
from specdec.models.causal_lm import CausalLM
from specdec.models.checkpoints.loader import build
from specdec.models.config import ModelConfig, RopeConfig
from specdec.ops.products.gpus import H100, H200, GpuMatch
from specdec.ops.products.tiles.dense import ProductTiles, product_tiles
from specdec.ops.products.tuned import here
from specdec.ops.products.tuned.table import MeasuredProduct, Origin, Product, TunedTable, path_for, read
from specdec.tune import measure, run
from specdec.tune.candidates import candidates
from specdec.tune.shapes import NAMED, checkpoint_products, named_products, products_of

GPU, CUDA = "NVIDIA H200", torch.device("cuda", 0)
SMALL = Product(256, 128, False, torch.bfloat16)
LLAMA_8B = ModelConfig(
    family="llama", hidden_size=4096, intermediate_size=14336, num_layers=1, num_heads=32, num_kv_heads=8, head_dim=128,
    vocab_size=128256, rms_norm_eps=1e-5, rope=RopeConfig(500000.0), max_position=2048,
)  # fmt: skip


def test_named_products_are_those_of_the_models() -> None:
    """Keeps out: a matrix of the target or its head that nobody measures, or one that no pass has."""
    target = build(lambda: CausalLM(LLAMA_8B, 1), torch.device("meta"), torch.bfloat16)
    head = empty_head(HeadSpec(LLAMA_8B, "eagle3", (0, 0, 0), 4096, 32000))
    own = {*products_of(target, torch.bfloat16), *products_of(head, torch.bfloat16)}
    assert own == set(named_products("llama-3.1-8b", torch.bfloat16))
    assert tuple(NAMED) == command.NAMES


def test_products_of_a_checkpoint(zoo: Zoo) -> None:
    """Keeps out: gate and up measured as an ordinary product, another dtype, and a head that is left out."""
    alone = checkpoint_products(zoo.target("llama"), None, torch.float16)
    both = checkpoint_products(zoo.target("llama"), zoo.head("llama", "eagle3"), torch.float16)
    assert set(alone) < set(both) and len(set(both)) == len(both)
    assert sum(product.gated for product in alone) == 1 and {product.dtype for product in both} == {torch.float16}


def test_no_candidate_splits_more_than_there_is() -> None:
    """Keeps out: programs without a column of a narrow product, whose sums nobody writes."""
    for match in (GpuMatch(H200, "", True), GpuMatch(H200, "", False)):
        for M in (1, 16, 64):
            own, *others = candidates(M, SMALL, match)
            assert all(tiles is None or tiles.splits <= -(-SMALL.K // tiles.block_k) for tiles in others[1:])


@pytest.mark.parametrize("gated", [False, True])
def test_a_product_is_right_within_16_bits(gated: bool) -> None:
    """Keeps out: tiles that are fast because they leave something out; one that can't be compiled, which ends the run."""

    def gives(share: float) -> Any:
        def run(x_MK: torch.Tensor, weight: torch.Tensor, gated: bool, tiles: object) -> torch.Tensor:
            gate, up = (x_MK @ weight.T).chunk(2, -1)
            y_MN = torch.nn.functional.silu(gate) * up if gated else torch.cat((gate, up), -1)
            if not share:
                raise RuntimeError("out of resources")
            return share * y_MN

        return run

    for share, right in ((1.0, True), (1.01, True), (1.05, False), (0.9, False), (0.0, False)):
        bench = measure.ProductBench(Product(64, 32, gated, torch.float32), torch.device("cpu"), gives(share), cold_bytes=1)
        assert bench.is_right(3, None) is right


@pytest.mark.parametrize("match", [GpuMatch(H200, "", True), GpuMatch(H100, "", True), GpuMatch(H200, "", False)])
@pytest.mark.parametrize("M", [1, 6, 16, 40, 64])
def test_candidates_begin_with_the_kinds_own(M: int, match: GpuMatch) -> None:
    """Keeps out: a comparison with something other than what runs, tiles twice, and Hopper's kernel on another GPU."""
    for product in named_products("llama-3.1-8b", torch.bfloat16):
        N, K, gated, dtype = product
        found = candidates(M, product, match)
        assert found[0] == product_tiles(M, N, K, dtype, gated, match.kind if match.hopper else H100)
        assert None in found and len(set(found)) == len(found) > 5
        tiles = [each for each in found if each is not None]
        assert all(each.block_m >= M and each.shared_bytes(2) <= 232448 for each in tiles)
        assert match.hopper or all(each.kernel != "stream_hopper" for each in tiles)


class Times:
    """A bench whose times are known: the fewer stages, the faster; one candidate is fast and wrong."""

    match = GpuMatch(H100, "", False)

    def __init__(self, gain: float) -> None:
        self.gain, self.product, self.device = gain, SMALL, CUDA
        self.own, *others = candidates(1, SMALL, self.match)
        self.wrong, self.best = [tiles for tiles in others if tiles is not None][:2]

    def compile(self, M: int, tiles: list[Any], rehearsals: Any) -> None:
        assert tiles[0] == self.own

    def is_right(self, M: int, tiles: ProductTiles | None) -> bool:
        return tiles != self.wrong

    def microseconds(self, M: int, tiles: ProductTiles | None) -> float:
        return {self.own: 10.0, self.wrong: 1.0, self.best: 10.0 * self.gain}.get(tiles, 20.0)


@pytest.mark.parametrize(("gain", "is_kept"), [(0.5, True), (0.99, False), (1.5, False)])
def test_only_what_is_right_and_faster_is_kept(gain: float, is_kept: bool) -> None:
    """Keeps out: tiles that give wrong sums, and noise in the table."""
    bench: Any = Times(gain)
    row = run.measure_rows(bench, 1, rehearsals=None)
    assert row.is_kept == is_kept and row.tiles == (bench.best if is_kept else bench.own)


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def tune(*given: str) -> int:
    """The command, on a machine that says it has a GPU."""
    parser, bench = argparse.ArgumentParser(), Times(0.5)
    command.add_flags(parser)
    machine = command.MeasuredGpu(torch.device("cpu"), GPU, lambda product, device: bench)  # type: ignore[arg-type,return-value]
    return command.run(parser.parse_args(given), machine)


def test_a_second_model_is_added(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Keeps out: a table that forgets what it had, and a command that does not say what it kept, and where."""
    old = TunedTable(Origin.here(GPU), {SMALL: MeasuredProduct({8: None}, "2026-01-01", "old")})
    old.save(path_for(GPU))
    assert tune("llama-3.1-8b", "--rows", "1") == 0
    table, why = read(path_for(GPU), Origin.here(GPU))
    assert table is not None and not why and SMALL in table.products and len(table.products) == 9
    out = " ".join(capsys.readouterr().out.split())
    assert "8/8" in out and "-> 5.0 us" in out and "llama-3.1-8b, old" in out and path_for(GPU).name in out
    assert here.look_for(GPU)[0] == table


def test_a_table_of_other_kernels_is_replaced(cache: Path) -> None:
    """Keeps out: tiles of kernels that have changed, carried into the new table."""
    TunedTable(replace(Origin.here(GPU), kernels="0"), {SMALL: MeasuredProduct({8: None}, "2026-01-01", "old")}).save(
        path_for(GPU)
    )
    assert tune("qwen3-8b", "--rows", "1") == 0
    table, _ = read(path_for(GPU), Origin.here(GPU))
    assert table is not None and SMALL not in table.products


def test_a_cache_that_can_not_be_written_is_refused_before_the_run(cache: Path) -> None:
    """Keeps out: minutes of measuring for nothing."""
    (cache / "specdec").write_text("a file")
    with pytest.raises(ValueError, match=r"can't be written.*XDG_CACHE_HOME"):
        tune("llama-3.1-8b")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([], "neither; nearest thing that works: specdec tune llama-3.1-8b"),
        (["llama-3.1-8b", "--target", "x"], "got both"),
        (["llama3.1-8b"], "nearest thing that works: llama-3.1-8b"),
        (["gpt-2"], "llama-3.1-8b, or --target DIR"),
        ([""], "nearest thing that works: llama-3.1-8b, or --target DIR"),
        (["", "--target", "x"], "got both"),
        (["llama"], "nearest thing that works: llama-3.1-8b"),
        (["llama-3.1-8b", "--draft", "x"], "--draft would do nothing"),
        (["--target", "/no/such/folder"], "/no/such/folder"),
    ],
)
def test_wrong_input_is_named(given: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Keeps out: a run over a model that nobody meant."""
    assert main(["tune", *given]) == 2
    assert said in capsys.readouterr().err


def test_other_weights_and_machines_are_refused(zoo: Zoo, capsys: pytest.CaptureFixture[str]) -> None:
    """Keeps out: a run without a GPU, and one over products that the measured kernels do not compute."""
    assert main(["tune", "--target", str(zoo.target("llama")), "--device", "cpu"]) == 2
    assert "bfloat16 or float16, got torch.float32" in capsys.readouterr().err
    assert main(["tune", "llama-3.1-8b", "--device", "cpu"]) == 2
    assert "measures a GPU, but torch sees none" in capsys.readouterr().err


@pytest.mark.parametrize("rows", ["0", "65", "1,x", ""])
def test_rows_out_of_range_are_refused(rows: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Keeps out: rows for which other kernels run."""
    with pytest.raises(SystemExit):
        main(["tune", "llama-3.1-8b", "--rows", rows])
    assert "expected numbers from 1 to 64" in capsys.readouterr().err

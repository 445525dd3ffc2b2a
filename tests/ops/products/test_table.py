"""The table of tiles that were measured on a machine: its file, what it is true of, and which rows take which tiles."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from specdec.ops.products.gpus import H200
from specdec.ops.products.numerics import FAST, INVARIANT
from specdec.ops.products.tiles.dense import ProductTiles, invariant_tiles, product_tiles
from specdec.ops.products.tuned import here
from specdec.ops.products.tuned.table import FORMAT, MeasuredProduct, Origin, Product, TunedTable, path_for, read

QKV = Product(6144, 4096, False, torch.bfloat16)
GATE_UP = Product(28672, 4096, True, torch.bfloat16)
ONE, EIGHT = (
    ProductTiles("stream_triton", 8, 32, 128, 1, 4, 4), ProductTiles("stream_hopper", 8, 64, 256, 2, 4, 6),
)  # fmt: skip
FORTY = ProductTiles("stream_hopper", 48, 64, 128, 1, 4, 3)  # x in pieces of 32 and 16 rows
ORIGIN = Origin.here("NVIDIA H200")


@pytest.fixture
def table() -> TunedTable:
    found = {
        QKV: MeasuredProduct({1: ONE, 8: EIGHT, 64: None}, "2026-11-22", "llama-3.1-8b"),
        GATE_UP: MeasuredProduct({8: EIGHT, 48: FORTY}, "2026-11-20", "mine"),
    }
    return TunedTable(ORIGIN, found)


def test_what_is_read_is_what_was_written(table: TunedTable, tmp_path: Path) -> None:
    """Keeps out: a field that is lost, and a folder that nobody makes."""
    path = tmp_path / "new" / "tiles.json"
    table.save(path)
    assert read(path, ORIGIN) == (table, "")
    assert [each.name for each in path.parent.iterdir()] == ["tiles.json"]


def test_rows_take_the_next_larger_number_measured(table: TunedTable) -> None:
    """Keeps out: tiles for fewer rows than there are, and products that were not measured."""
    at = {T: table.find(T, QKV) for T in (0, 1, 2, 8, 9, 64, 65)}
    assert at == {
        0: (False, None), 1: (True, ONE), 2: (True, EIGHT), 8: (True, EIGHT), 9: (True, None), 64: (True, None),
        65: (False, None),
    }  # fmt: skip
    for other in (QKV._replace(N=6145), QKV._replace(gated=True), QKV._replace(dtype=torch.float16)):
        assert table.find(1, other) == (False, None)


def test_measured_tiles_count_before_the_kinds(table: TunedTable) -> None:
    """Keeps out: a table that nobody asks, one that hides what was not measured, and one that changes invariant sums."""
    assert FAST.product_tiles(1, *QKV[:2], torch.bfloat16, False, H200, table) == ONE
    assert FAST.product_tiles(64, *QKV[:2], torch.bfloat16, False, H200, table) is None
    built_in = product_tiles(64, *GATE_UP[:2], torch.bfloat16, True, H200)
    assert FAST.product_tiles(64, *GATE_UP[:2], torch.bfloat16, True, H200, table) == built_in is not None
    assert INVARIANT.product_tiles(1, *QKV[:2], torch.bfloat16, False, H200, table) == invariant_tiles(1, *QKV[:2], False)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"gpu": "NVIDIA H100"}, "another GPU, NVIDIA H100"),
        ({"triton": "2.0"}, "Triton 2.0, and this is"),
        ({"kernels": "0"}, "other kernels of specdec"),
    ],
)
def test_other_tables_are_not_taken(table: TunedTable, tmp_path: Path, change: dict[str, str], why: str) -> None:
    """Keeps out: tiles of another GPU, of an older Triton, or of kernels that have changed since."""
    path = tmp_path / "tiles.json"
    replace(table, origin=replace(ORIGIN, **change)).save(path)
    found, said = read(path, ORIGIN)
    assert found is None and why in said


def damaged(change: Any) -> Any:
    data = {"format": FORMAT, **vars(ORIGIN), "products": [
        {"out": 64, "in": 64, "gated": False, "dtype": "bfloat16", "date": "2026-11-22", "target": "t",
         "tiles": {"8": ONE._asdict()}},
    ]}  # fmt: skip
    change(data)
    return data


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data.update(format=1),
        lambda data: data.pop("products"),
        lambda data: data["products"][0].pop("in"),
        lambda data: data["products"][0].update(dtype="no_dtype"),
        lambda data: data["products"][0].update(dtype="nn"),
        lambda data: data["products"][0].update(tiles={}),
        lambda data: data["products"][0]["tiles"].update({"16": ONE._asdict()}),
        lambda data: data["products"][0]["tiles"]["8"].update(block_n=48),
        lambda data: data["products"][0]["tiles"]["8"].update(block_m=48),
        lambda data: data["products"][0]["tiles"]["8"].update(block_m=56, kernel="stream_hopper"),
        lambda data: data["products"][0]["tiles"]["8"].update(splits=0),
        lambda data: data["products"][0]["tiles"]["8"].update(kernel="gated_hopper"),
        lambda data: data["products"][0]["tiles"]["8"].update(stages=2.5),
        lambda data: data["products"][0]["tiles"]["8"].update(colour=1),
        lambda data: data["products"].append(7),
    ],
)
def test_damaged_tables_are_named(tmp_path: Path, change: Any) -> None:
    """Keeps out: a traceback from a file that somebody changed, and tiles that no kernel can have."""
    path = tmp_path / "tiles.json"
    path.write_text(json.dumps(damaged(lambda data: None)))
    assert read(path, ORIGIN)[0] is not None
    path.write_text(json.dumps(damaged(change)))
    found, why = read(path, ORIGIN)
    assert found is None and ("damaged" in why or "format 1" in why)


def test_a_file_that_is_no_table(tmp_path: Path) -> None:
    """Keeps out: a traceback from an empty file, a folder, or a file of something else."""
    path = tmp_path / "tiles.json"
    assert read(path, ORIGIN) == (None, "")
    for text in ("", "[]", "7", "{"):
        path.write_text(text)
        assert "damaged" in read(path, ORIGIN)[1]
    assert "can't be read" in read(tmp_path, ORIGIN)[1]


def test_a_table_of_no_use_is_said_in_words(table: TunedTable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps out: a table that is silently left out, or that is taken from another GPU's file."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert path_for("NVIDIA H100 80GB HBM3").name == "tiles-nvidia-h100-80gb-hbm3.json"
    device = torch.device("cuda", 0)
    with patch("torch.cuda.get_device_name", return_value="NVIDIA H200"):
        assert here.look(device) == (None, "")
        table.save(path_for("NVIDIA H200"))
        assert here.look(device) == (table, "")
        replace(table, origin=replace(ORIGIN, triton="2.0")).save(path_for("NVIDIA H200"))
        with pytest.warns(UserWarning, match=r"not taken: it was made with Triton 2\.0.*specdec tune again"):
            assert here.tuned_table.__wrapped__(device) is None


def test_a_file_that_can_not_be_written_is_left_alone(table: TunedTable, tmp_path: Path) -> None:
    """Keeps out: half a table, after a disk that is full."""
    path = tmp_path / "tiles.json"
    table.save(path)
    with patch.object(Path, "replace", side_effect=OSError("no space left")), pytest.raises(OSError, match="no space"):
        TunedTable(ORIGIN).save(path)
    assert read(path, ORIGIN) == (table, "")
    assert [each.name for each in tmp_path.iterdir()] == ["tiles.json"]

"""Headers are read as the package `gguf` reads them; a file that is cut off, junk or of another kind is refused by name."""

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from toolkit.checkpoints.gguf_files import SIZES, finish, put, write_gguf
from toolkit.models import save_target

from specdec.models.gguf.container import read_header
from specdec.models.gguf.file import open_gguf
from specdec.models.registry import choose_target

VALUES = {
    "flag": True, "number": 7, "real": 1e-5, "theta": 500000.0, "text": "é\n日本", "texts": ["a", "", "日本🙂"],
    "numbers": [3, -1, 2], "reals": [0.5, -1e-3],
}  # fmt: skip


def write(path: Path, tensors: dict[str, np.ndarray], **values: object) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    for name, value in values.items():
        put(writer, f"llama.{name}", value)
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    return finish(writer, path)


def test_values_are_those_of_gguf(tmp_path):
    """Keeps out: a kind of value read as another, a text cut at a byte, a float32 that is not the number that was meant."""
    tensors = {"a": np.ones((3, 5), np.float32), "b": np.arange(4, dtype=np.float16)}
    path = write(tmp_path / "m.gguf", tensors, **VALUES)
    found, reader = open_gguf(path), gguf.GGUFReader(path)
    for name, value in VALUES.items():
        own, theirs = found.keys[f"llama.{name}"], reader.fields[f"llama.{name}"].contents()
        assert own == value
        assert np.array_equal(np.array(own, np.float32), theirs) if "real" in name or name == "theta" else own == theirs
    for each in reader.tensors:
        tensor = found.tensors[each.name]
        assert (tensor.start, tensor.shape) == (each.data_offset, tuple(reversed(each.shape.tolist())))
        assert found.read(each.name).tobytes() == each.data.tobytes()


def test_every_cut_is_refused(tmp_path):
    """Keeps out: an IndexError, a struct.error or numbers that are not there, from a download that was cut off."""
    whole = write(tmp_path / "m.gguf", {"a": np.ones((3, 5), np.float32)}, **VALUES).read_bytes()
    for length in range(len(whole) - 32):  # of the last bytes some are padding
        path = tmp_path / f"cut{length}.gguf"
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=rf"{path}.*(cut off|ends at byte|begins with)"):
            open_gguf(path)


def test_random_bytes_are_refused(tmp_path):
    """Keeps out: gigabytes that a broken count asks for, and errors that do not name the file."""
    whole = write(tmp_path / "m.gguf", {"a": np.ones((3, 5), np.float32)}, **VALUES).read_bytes()
    random, path = np.random.default_rng(0), tmp_path / "junk.gguf"
    for number in range(400):
        broken = bytearray(whole)
        for place in random.integers(4, len(whole) - 60, 3):
            broken[place] = random.integers(256)
        path.write_bytes(broken)
        try:
            choose_target(path)
        except ValueError as error:
            assert str(path) in str(error), number


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "is empty"),
        (b"PK\x03\x04 a zip", "begins with"),
        (b"GGUF" + struct.pack("<I", 1), "version 1"),
        (b"GGUF" + struct.pack(">I", 3), "big-endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 60), "ends at byte"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<QBIIQ", 1, 97, 9, 8, 1 << 60), "more than the file can hold"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<QBI", 1, 97, 77), "type 77"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + 2 * struct.pack("<QBIB", 1, 97, 7, 1), "twice"),
    ],
)
def test_junk_says_what_it_is(tmp_path, data, problem):
    """Keeps out: "was its download cut off?" alone for a file of another kind, version or byte order."""
    (tmp_path / "m.gguf").write_bytes(data)
    with pytest.raises(ValueError, match=problem):
        open_gguf(tmp_path / "m.gguf")


def test_pieces_and_types_are_refused_by_name(tmp_path):
    """Keeps out: one piece of several taken for a model; a type of block that nobody here can read, read as another."""
    write(tmp_path / "model-00001-of-00001.gguf", {"a": np.ones(16, np.float32)})
    assert open_gguf(tmp_path / "model-00001-of-00001.gguf").tensors, "the only piece is a whole model"
    with pytest.raises(ValueError, match="piece 1 of 3 .*llama-gguf-split --merge"):
        open_gguf(tmp_path / "model-00001-of-00003.gguf")
    folder = save_target(tmp_path / "folder", "llama", **{**SIZES, "intermediate_size": 256})
    path = write_gguf(folder, tmp_path / "m.gguf", lambda name: "TQ2_0" if "down" in name else "F32")
    with pytest.raises(ValueError, match="is stored as TQ2_0; expected one of F32"):
        open_gguf(path)


def test_places_of_tensors_are_held_against_each_other(tmp_path):
    """Keeps out: a broken table of tensors, by which one is read from the bytes of another."""
    tensors = {"a": np.ones(16, np.float32), "b": np.ones(16, np.float32)}
    whole = write(tmp_path / "m.gguf", tensors).read_bytes()
    place = whole.index(b"b" + struct.pack("<IQI", 1, 16, 0)) + 1 + 16
    assert struct.unpack_from("<Q", whole, place) == (64,)
    for offset, problem in ((0, "after byte"), (32, "after byte"), (65, "multiple of 32")):
        path = tmp_path / f"{offset}.gguf"
        path.write_bytes(whole[:place] + struct.pack("<Q", offset) + whole[place + 8 :] + bytes(64))
        with pytest.raises(ValueError, match=problem):
            open_gguf(path)


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path):
    """Keeps out: one model's first tensors with another one's last."""
    path = write(tmp_path / "m.gguf", {"a": np.ones(16, np.float32)})
    file = open_gguf(path)
    write(tmp_path / "n.gguf", {"a": np.zeros(16, np.float32)}).rename(path)
    with pytest.raises(ValueError, match="was changed or replaced while it was read"):
        file.read("a")
    assert not open_gguf(path).read("a").any()


def test_the_header_takes_no_second_reading(tmp_path):
    """Keeps out: a memo that answers for a file that was written anew under the same name."""
    path = write(tmp_path / "m.gguf", {"a": np.ones(4, np.float32)}, number=1)
    assert open_gguf(path) is open_gguf(path)
    write(path, {"a": np.ones(8, np.float32)}, number=2)
    assert open_gguf(path).keys["llama.number"] == 2 == read_header(memoryview(path.read_bytes())).keys["llama.number"]

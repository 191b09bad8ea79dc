"""What is read from folders, archives and tensors, and what is refused."""

import gzip
import io
import json
import struct
import tarfile
import warnings
import zlib

import numpy as np
import pytest
import torch
from PIL import Image

from mhla_diffusion.evaluation import decoding
from mhla_diffusion.evaluation.picture_sets import holds_pictures, open_pictures


def arrays(count: int, height: int = 6, width: int = 8) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (count, height, width, 3), np.uint8)


def folder_of(path, pictures: np.ndarray, suffix: str = "png"):
    (path / "below").mkdir(parents=True, exist_ok=True)
    for index, picture in enumerate(pictures):
        place = path / "below" if index % 2 else path
        Image.fromarray(picture).save(place / f"{index:03}.{suffix}")
    (path / "settings.json").write_text("{}")
    (path / ".hidden.png").write_text("no picture")
    (path / ".ipynb_checkpoints").mkdir(exist_ok=True)
    (path / ".ipynb_checkpoints" / "copy.png").write_text("no picture")
    return path


def whole(pictures, **options) -> torch.Tensor:
    return torch.cat(list(pictures.batches(**options)))


def test_every_kind_gives_the_same_pictures_in_any_batches(tmp_path):
    raw = arrays(7)
    expected = torch.from_numpy(raw).permute(0, 3, 1, 2)
    np.savez(tmp_path / "a.npz", arr_0=raw)
    np.savez_compressed(tmp_path / "b.npz", arr_0=raw, other=np.zeros(3))
    folder = folder_of(tmp_path / "folder", raw)
    by_path = torch.cat([expected[0::2], expected[1::2]])  # 000, 002, 004, 006, below/001, ...
    for source in (tmp_path / "a.npz", tmp_path / "b.npz", expected, expected.float() / 255):
        found = open_pictures(source)
        assert len(found) == 7 and torch.equal(whole(found, batch_size=3), expected)
        assert torch.equal(whole(found, start=1, step=3), expected[1::3])
        assert found.about()["sizes"] == {"8x6": 2} and whole(open_pictures(source, limit=2)).shape[0] == 2
    found = open_pictures(folder)
    assert torch.equal(whole(found, batch_size=2), by_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns of more processes than cores
        assert torch.equal(whole(found, workers=3), by_path)
    assert found.about() | {"listing_sha256": 0} == {
        "source": str(folder),
        "pictures": 7,
        "listing_sha256": 0,
        "codecs": {"png": 7},
        "sizes": {"8x6": 7},
        "modes": {"RGB": 7},
        "background": None,
    }
    for source in (folder, tmp_path / "a.npz"):  # a result says that there were more
        about = open_pictures(source, limit=2).about()
        assert (about["pictures"], about["of"]) == (2, 7)
    assert holds_pictures(tmp_path / "a.npz") and not holds_pictures(folder / "settings.json")


def tar_of(path, pictures: list[Image.Image], splits: list[str]):
    with tarfile.open(path, "w") as archive:
        for index, (picture, split) in enumerate(zip(pictures, splits, strict=True)):
            encoded = io.BytesIO()
            picture.save(encoded, "PNG")
            for ending, data in (
                ("png", encoded.getvalue()),
                ("json", json.dumps({"split": split}).encode()),
            ):
                info = tarfile.TarInfo(f"{index:03}.{ending}")
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))
    return path


def test_a_tar_has_splits_and_transparency_needs_a_background(tmp_path):
    clear = Image.new("RGBA", (4, 4), (255, 0, 0, 128))
    solid = Image.new("RGBA", (4, 4), (0, 255, 0, 255))
    path = tar_of(tmp_path / "set.tar", [clear, solid, solid], ["train", "val", "train"])
    assert whole(open_pictures(path, split="val"))[0, :, 0, 0].tolist() == [0, 255, 0]
    with pytest.raises(ValueError, match=r"000 of .*transparent.*--background white"):
        whole(open_pictures(path))
    on_white = whole(open_pictures(path, split="train", background="white"))
    assert on_white[:, :, 0, 0].tolist() == [[255, 127, 127], [0, 255, 0]]
    with tarfile.open(path, "a") as archive:
        for name, data in (("manifest.json", b"{}"), ("000.list.json", b"[1]")):
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    with pytest.raises(ValueError, match="no split 'test': it has train, val$"):
        open_pictures(path, split="test")
    # Pictures of one name are two; what macOS puts beside files is none.
    content = io.BytesIO()
    solid.save(content, "webp", lossless=True)
    with tarfile.open(path, "a") as archive:
        for name in ("001.webp", "._001.webp", ".cache/9.webp"):
            info = tarfile.TarInfo(name)
            info.size = len(content.getvalue())
            archive.addfile(info, io.BytesIO(content.getvalue()))
    assert len(open_pictures(path)) == 4 and open_pictures(path, split="val").codecs == {"png": 1, "webp": 1}
    with pytest.raises(ValueError, match="'whitish' is no colour"):
        open_pictures(path, background="whitish")


def test_mixed_sizes_are_refused_unless_allowed(tmp_path):
    folder = folder_of(tmp_path, arrays(2))
    Image.new("RGB", (5, 5)).save(folder / "zzz.png")
    with pytest.raises(ValueError, match=r"mixes sizes: 8x6 and, .*zzz.png, 5x5; .*--mixed-sizes"):
        list(open_pictures(folder).batches())
    shapes = [tuple(batch.shape) for batch in open_pictures(folder, mixed_sizes=True).batches()]
    assert shapes == [(2, 3, 6, 8), (1, 3, 5, 5)]


def test_grey_and_palette_pictures_become_rgb_and_are_counted(tmp_path):
    Image.new("L", (3, 3), 7).save(tmp_path / "a.png")
    Image.new("RGB", (3, 3), (9, 9, 9)).quantize(2).save(tmp_path / "b.png")
    found = open_pictures(tmp_path)
    assert whole(found)[:, :, 0, 0].tolist() == [[7] * 3, [9] * 3]
    assert found.about()["modes"] == {"L": 1, "P": 1}


def test_what_is_no_set_of_pictures_is_named(tmp_path):
    (tmp_path / "empty").mkdir()
    np.savez(tmp_path / "float.npz", arr_0=np.zeros((2, 4, 4, 3), np.float32))
    np.savez(tmp_path / "none.npz", other=np.zeros(3))
    np.savez(tmp_path / "zero.npz", arr_0=arrays(0))
    np.savez(tmp_path / "fortran.npz", arr_0=np.asfortranarray(arrays(3)))
    np.savez(tmp_path / "objects.npz", arr_0=np.array([{}, {}], object))
    (tmp_path / "broken.npz").write_bytes(b"PK no archive")
    (tmp_path / "broken.tar").write_bytes(b"no archive")
    (tmp_path / "file.txt").write_text("")
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut" / "a.png").write_bytes(b"\x89PNG\r\n\x1a\n broken")
    for name, message in {
        "absent": "there is no",
        "empty": "holds no pictures",
        "zero.npz": "arr_0 holds no pictures",
        "float.npz": r"float32 \(2, 4, 4, 3\): give uint8",
        "none.npz": r"no pictures in it \(arr_0\), but other",
        "objects.npz": "give uint8",
        "broken.npz": "cannot be read",
        "fortran.npz": "np.ascontiguousarray",
        "broken.tar": "no readable tar",
        "file.txt": "no set of pictures",
    }.items():
        with pytest.raises(ValueError, match=message):
            open_pictures(tmp_path / name)
    with pytest.raises(ValueError, match=r"a.png: cannot be read"):
        list(open_pictures(tmp_path / "cut").batches())
    with pytest.raises(ValueError, match="has no splits"):
        open_pictures(tmp_path / "cut", split="train")
    with pytest.raises(ValueError, match="limit 0"):
        open_pictures(tmp_path / "cut", limit=0)


@pytest.mark.parametrize("kind", [np.uint16, np.int32, np.float32])
def test_more_than_8_bits_a_colour_are_refused_rather_than_cut_off(tmp_path, kind):
    Image.fromarray(np.full((6, 8), 1000, kind)).save(tmp_path / "a.tif")
    with pytest.raises(ValueError, match=r"a.tif: it has more than 8 bits a colour \(mode [IF]"):
        list(open_pictures(tmp_path).batches())


@pytest.mark.parametrize(("name", "channels"), [("rgb", 3), ("rgba", 4)])
def test_16_bits_a_colour_are_refused_of_colours_too(tmp_path, name, channels):
    """Pillow reads such PNGs as 8 bits a colour; what it leaves out is cut off, not rounded."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", 2, 1, 16, {3: 2, 4: 6}[channels], 0, 0, 0)
    rows = zlib.compress(b"\0" + bytes(range(2 * 2 * channels)))
    parts = [(b"IHDR", header), (b"IDAT", rows), (b"IEND", b"")]
    content = b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*part) for part in parts)
    (tmp_path / "a.png").write_bytes(content)
    with pytest.raises(
        ValueError, match=rf"a.png: it has more than 8 bits a colour \(mode {name.upper()};16B\)"
    ):
        list(open_pictures(tmp_path, background="white").batches())


def test_what_pixels_do_not_show_is_said(tmp_path):
    frames = [Image.fromarray(picture) for picture in arrays(3)]
    frames[0].save(tmp_path / "a.webp", save_all=True, append_images=frames[1:], lossless=True)
    turned = Image.Exif()
    turned[0x0112] = 6
    frames[1].save(tmp_path / "b.png", exif=turned)
    frames[2].save(tmp_path / "c.png")
    found = open_pictures(tmp_path)
    assert torch.equal(whole(found), torch.from_numpy(arrays(3)).permute(0, 3, 1, 2))
    animated, rotated = found.doubts()
    assert animated.startswith("1 pictures of") and "first frames" in animated
    assert rotated.startswith("1 pictures of") and "EXIF" in rotated


def test_a_folder_may_be_called_like_a_picture(tmp_path):
    folder = folder_of(tmp_path / "set.png", arrays(4))
    (folder / "more.png").mkdir()
    assert len(open_pictures(tmp_path)) == 4


def test_a_damaged_archive_is_named(tmp_path):
    np.savez(tmp_path / "a.npz", arr_0=arrays(40))
    content = bytearray((tmp_path / "a.npz").read_bytes())
    content[len(content) // 2] ^= 255
    (tmp_path / "a.npz").write_bytes(content)
    with pytest.raises(ValueError, match=r"a.npz cannot be read \(Bad CRC-32"):
        list(open_pictures(tmp_path / "a.npz").batches())


def test_pictures_of_a_tar_stay_on_disk(tmp_path):
    path = tar_of(tmp_path / "set.tar", [Image.fromarray(p) for p in arrays(6)], ["train", "val"] * 3)
    found = open_pictures(path, split="val")
    assert all(len(stored.read()) == stored.size for stored in found.stored) and len(found.listing()) == 64
    expected = torch.from_numpy(arrays(6)).permute(0, 3, 1, 2)[1::2]
    assert torch.equal(whole(found), expected) and torch.equal(whole(found, workers=1), expected)
    with gzip.open(tmp_path / "packed.tar", "wb") as file:
        file.write(path.read_bytes())
    with pytest.raises(ValueError, match="no readable tar"):
        open_pictures(tmp_path / "packed.tar")


def test_as_many_processes_decode_as_the_device_can_use(monkeypatch):
    monkeypatch.setattr(decoding.os, "cpu_count", lambda: 9)
    assert decoding.decoding_processes(None, "cpu") == 0
    assert decoding.decoding_processes(None, "cuda:1") == 8
    assert decoding.decoding_processes(None, "auto") == (8 if torch.cuda.is_available() else 0)
    assert decoding.decoding_processes(3, "cpu") == 3
    monkeypatch.setattr(decoding.os, "cpu_count", lambda: 64)
    assert decoding.decoding_processes(None, "cuda") == 16

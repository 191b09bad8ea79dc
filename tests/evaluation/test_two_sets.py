"""Whether two sets are two, and what alone moves their distance."""

import io
import json
import tarfile

import numpy as np
import pytest
import torch
from PIL import Image

from mhla_diffusion.evaluation.picture_sets import open_pictures
from mhla_diffusion.evaluation.two_sets import compare_read, compare_sets


def arrays(count: int, height: int = 16, width: int = 16) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (count, height, width, 3), np.uint8)


def folder_of(path, pictures: np.ndarray):
    (path / "below").mkdir(parents=True)
    for index, picture in enumerate(pictures):
        Image.fromarray(picture).save((path / "below" if index % 2 else path) / f"{index:03}.png")
    return path


def test_the_same_set_twice_is_refused_and_codecs_are_compared(tmp_path):
    raw = arrays(4)
    png, copy, jpeg = (folder_of(tmp_path / name, raw) for name in ("png", "copy", "jpeg"))
    for file in list(jpeg.rglob("0*.png")):
        Image.open(file).save(file.with_suffix(".jpg"), quality=95)
        file.unlink()
    png, copy, jpeg = (open_pictures(path) for path in (png, copy, jpeg))
    with pytest.raises(ValueError, match="both the samples and the reference"):
        compare_sets(png, png)
    (tmp_path / "link").symlink_to(png.source)
    with pytest.raises(ValueError, match="both the samples and the reference"):
        compare_sets(png, open_pictures(tmp_path / "link"))
    assert "list the same pictures" in compare_sets(png, copy)[0]
    assert jpeg.codecs == {"jpeg": 4} and "JPEG alone moves FID" in compare_read(png.about(), jpeg.about())[0]
    # Files under the wrong name: what they hold counts, once they were read.
    for file in (tmp_path / "copy").rglob("0*.png"):
        file.write_bytes((jpeg.root / file.relative_to(copy.root)).with_suffix(".jpg").read_bytes())
    assert compare_read(png.about(), copy.about()) == []
    list(copy.batches())
    assert copy.codecs == {"jpeg": 4} and "JPEG alone moves FID" in compare_read(png.about(), copy.about())[0]
    x = open_pictures(torch.from_numpy(raw).permute(0, 3, 1, 2))
    assert len(compare_sets(x, x)) == 1 and compare_sets(x, png) == []


def test_one_set_within_the_other_is_warned_about(tmp_path):
    folder = folder_of(tmp_path / "all", arrays(5))
    (tmp_path / "link").symlink_to(folder / "below")
    whole, below = open_pictures(folder), open_pictures(tmp_path / "link")
    for one, other in ((whole, below), (below, whole)):
        assert f"2 pictures of {one.source} are of {other.source}, too" in compare_sets(one, other)[0]
    assert compare_sets(open_pictures(folder, limit=1), below) == []
    with tarfile.open(tmp_path / "set.tar", "w") as archive:
        for index, split in enumerate(("train", "train", "val")):
            content = (folder / "000.png").read_bytes()
            for name, data in (
                (f"{index}.png", content),
                (f"{index}.json", json.dumps({"split": split}).encode()),
            ):
                info = tarfile.TarInfo(name)
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))
    every, train, val = (open_pictures(tmp_path / "set.tar", split=split) for split in (None, "train", "val"))
    assert "2 pictures of" in compare_sets(every, train)[0] and compare_sets(val, train) == []


def test_two_sets_of_different_sizes_are_warned_about():
    small, large, other = (
        open_pictures(torch.from_numpy(arrays(2, *size)).movedim(-1, 1))
        for size in ((6, 8), (12, 16), (6, 8))
    )
    for each in (small, large, other):
        list(each.batches())
    small, large, other = (each.about() for each in (small, large, other))
    assert compare_read(small, other) == [] == compare_read(small, {})
    assert "samples are 8x6, the reference is 16x12: resizing alone" in compare_read(small, large)[0]

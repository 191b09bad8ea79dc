import json
import warnings

import numpy as np
import pytest
import torch
from PIL import Image

from mhla_diffusion.training import latents as latents_module
from mhla_diffusion.training import run
from mhla_diffusion.training.buckets import nearest_bucket, read_picture
from mhla_diffusion.training.components import build_components
from mhla_diffusion.training.config import DataConfig
from mhla_diffusion.training.data import bucket_sizes, open_source
from mhla_diffusion.training.feed import Feed
from mhla_diffusion.training.latents import caption_table, load_or_encode
from mhla_diffusion.training.picture_files import list_pictures
from mhla_diffusion.training.recipe import load_recipe

CPU = torch.device("cpu")


def folder(path, **settings):
    return DataConfig(kind="folder", path=str(path), size=32, **settings)


def jsonl(path, *entries):
    path.mkdir(exist_ok=True)
    (path / "captions.jsonl").write_text(
        "\n".join(e if isinstance(e, str) else json.dumps(e) for e in entries)
    )
    return path


@pytest.fixture
def classes(tmp_path, write_picture):
    root = tmp_path / "classes"
    for i, name in enumerate(["black_cat", "dog-house"]):
        for j in range(3):
            write_picture(root / name / f"{j}.png", (40 * j, 80, 120 * i), seed=j)
    (root / "black_cat" / "notes.txt").write_text("not a picture")
    return root


def test_class_folders_give_captions(classes):
    pairs = list_pictures(classes, "a photo of a {}")
    assert [(p.name, c) for p, c in pairs[2:4]] == [
        ("2.png", ["a photo of a black cat"]),
        ("0.png", ["a photo of a dog house"]),
    ]
    (bucket,) = open_source(folder(classes), 4, 0).open()
    pixels, kept = bucket.read([0, 4])
    assert pixels.shape == (2, 3, 32, 32) and pixels.dtype == torch.uint8 and kept == [0, 4]


def test_training_on_class_folders(recipe_file, classes):
    result = run(recipe_file(data=classes), ["data.template=a picture of {}"])
    assert result.finished and np.isfinite(result.loss)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "captions.jsonl line 2: write"),
        ('{"file": "0.png"}', "captions.jsonl line 2: write"),
        ('["0.png", "x"]', "captions.jsonl line 2: write"),
        ('{"file": "0.png", "caption": 3}', "line 2: caption 3 is neither a text nor a list of texts"),
        ('{"file": "0.png", "caption": []}', "line 2: caption [] is neither"),
        ('{"file": "gone.png", "caption": "x"}', "line 2: there is no file 'gone.png'"),
    ],
)
def test_bad_captions_name_the_line(tmp_path, line, message, write_picture):
    root = jsonl(tmp_path / "x", {"file": "0.png", "caption": "a"}, line)
    write_picture(root / "0.png", (1, 2, 3))
    with pytest.raises(ValueError) as caught:
        open_source(folder(root), 4, 0)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_missing_empty_and_ill_sized(tmp_path):
    with pytest.raises(ValueError, match="does not exist; give a folder of images"):
        open_source(folder(tmp_path / "absent"), 4, 0)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="holds no pictures with captions; add captions.jsonl"):
        open_source(folder(tmp_path / "empty"), 4, 0)
    with pytest.raises(ValueError, match="data.size = 34 is not a multiple of 4, .*write 32"):
        open_source(DataConfig(path=str(tmp_path), size=34), 4, 0)
    (tmp_path / "file").write_text("x")
    with pytest.raises(ValueError, match="is not a folder"):
        open_source(folder(tmp_path / "file"), 4, 0)


def test_unreadable_pictures_are_named_and_left_out(tmp_path, base, recipe_file, write_picture):
    names = ["whole.png", "text.png", "short.jpg"]
    root = jsonl(tmp_path / "x", *[{"file": n, "caption": n} for n in names])
    write_picture(root / "whole.png", (10, 200, 30))
    (root / "text.png").write_text("no picture")
    write_picture(root / "short.jpg", (10, 200, 30), size=(200, 200))
    data = (root / "short.jpg").read_bytes()
    (root / "short.jpg").write_bytes(
        data[: len(data) // 2]
    )  # its header is fine: found out when it is decoded
    recipe = load_recipe(recipe_file(data=root))
    parts = build_components(recipe)
    with pytest.warns(UserWarning, match="1 unreadable pictures are left out: .*text.png"):
        source = open_source(recipe.data, 4, 0)
    with pytest.warns(UserWarning, match="1 unreadable pictures are left out: .*short.jpg"):
        encoded = load_or_encode(source, parts, recipe.data, CPU)
    assert encoded.captions == [[["whole.png"]]] and encoded.sizes == [1]
    (root / "whole.png").write_text("gone as well")
    with pytest.warns(UserWarning), pytest.raises(ValueError, match="convert them to PNG or JPEG"):
        load_or_encode(open_source(recipe.data, 4, 0), parts, recipe.data, CPU)
    (root / "short.jpg").write_text("and this one")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the error says it all
        with pytest.raises(ValueError, match="none of the 3 pictures in .*x can be read, first .*whole.png"):
            open_source(recipe.data, 4, 0)


def test_pictures_are_upright_on_white_and_cut_to_the_centre(tmp_path):
    wide = np.zeros((20, 60, 3), np.uint8)
    wide[:, 20:40] = (250, 0, 0)
    Image.fromarray(wide).save(tmp_path / "wide.png")
    assert (read_picture(tmp_path / "wide.png", 20, 20)[0] > 150).mean() > 0.9
    Image.new("RGBA", (8, 8), (0, 0, 0, 0)).save(tmp_path / "clear.png")
    assert (read_picture(tmp_path / "clear.png", 8, 8) == 255).all()
    exif = Image.Exif()
    exif[0x0112] = 6  # lies on its side
    Image.fromarray(wide).save(tmp_path / "side.jpg", exif=exif, quality=95)
    upright = read_picture(tmp_path / "side.jpg", 60, 20)
    assert upright[0, 25:35].mean() > 150 > upright[0, :15].mean()


def test_buckets_follow_the_aspect_ratio(tmp_path, write_picture):
    shapes = {"square": (32, 32), "wide": (64, 32), "tall": (30, 60), "wider": (90, 48)}
    root = jsonl(tmp_path / "x", *[{"file": f"{n}.png", "caption": n} for n in shapes])
    for name, size in shapes.items():
        write_picture(root / f"{name}.png", (9, 9, 9), size=size)
    source = open_source(folder(root, buckets=True), 4, 0)
    found = {bucket.captions[0][0]: (bucket.height, bucket.width) for bucket in source.open()}
    assert found["square"] == (32, 32)
    for name, (height, width) in found.items():
        assert height % 4 == 0 and width % 4 == 0 and abs(height * width - 1024) < 260
        assert (height < width) == name.startswith("wide")
    sizes = bucket_sizes(folder(root, buckets=True), 4)
    assert nearest_bucket(100, 200, sizes) == sizes.index(min(sizes, key=lambda s: abs(s[0] / s[1] - 0.5)))


def test_training_on_buckets(recipe_file, tmp_path, write_picture):
    root = jsonl(
        tmp_path / "x", *[{"file": f"{i}.png", "caption": ["a", "b"][: 1 + i % 2]} for i in range(6)]
    )
    for i in range(6):
        write_picture(root / f"{i}.png", (30 * i, 9, 9), size=[(32, 32), (64, 32), (32, 64)][i % 3], seed=i)
    result = run(recipe_file(data=root), ["data.buckets=true"])
    assert result.finished and np.isfinite(result.loss)


def test_cache_is_used_as_long_as_nothing_changed(recipe_file, pictures, tmp_path, monkeypatch):
    encoded = []
    encode = latents_module.encode_source
    monkeypatch.setattr(latents_module, "encode_source", lambda *a: encoded.append(1) or encode(*a))
    recipe = load_recipe(recipe_file())
    parts = build_components(recipe)

    def load(data=recipe.data):
        return load_or_encode(open_source(data, parts.latent_factor, 0), parts, data, CPU)

    first, again = load(), load()
    assert len(encoded) == 1 and first.captions == again.captions
    assert all(
        torch.equal(a, b) and a.is_contiguous() for a, b in zip(first.latents, again.latents, strict=True)
    )
    assert first.latents[0].shape == (10, 4, 8, 8) and first.latents[0].dtype == torch.float32

    cache = tmp_path / "cache"
    (entry,) = (path for path in cache.iterdir() if path.is_dir())
    (entry / "latents.safetensors").write_bytes(b"cut")
    with pytest.warns(UserWarning, match="cannot be read .*; encoding anew"):
        load()
    assert len(encoded) == 2 and len(list(cache.glob("*/captions.json"))) == 1

    recipe.data.size = 16
    load()
    assert len(encoded) == 3 and len(list(cache.glob("*/captions.json"))) == 2
    recipe.data.cache = ""
    load()
    assert len(encoded) == 4 and len(list(cache.glob("*/captions.json"))) == 2


def test_batches_are_a_function_of_the_step(recipe_file, tmp_path, write_picture):
    root = jsonl(
        tmp_path / "x",
        *[{"file": f"{i}.png", "caption": ["one", "two", "three"][: 1 + i % 3]} for i in range(6)],
    )
    for i in range(6):
        write_picture(root / f"{i}.png", (30 * i, 9, 9), seed=i)
    recipe = load_recipe(recipe_file(data=root), ["data.caption_dropout=0.3", "run.batch_size=6"])
    parts = build_components(recipe)
    encoded = load_or_encode(open_source(recipe.data, 4, 0), parts, recipe.data, CPU)
    table = caption_table(encoded, parts, True, 12, CPU)
    assert len(table.values) == 4 and table.mask[0].sum() == 1  # "" is one opening token
    feed, other = Feed(encoded, table, recipe, CPU), Feed(encoded, table, recipe, CPU)
    draws = [feed.draw(step) for step in range(40)]
    for step in (17, 2, 39):
        again = other.draw(step)
        for name in ("index", "caption", "time", "noise"):
            assert torch.equal(getattr(again, name), getattr(draws[step], name))
    for draw in draws:
        parts_of = [feed.rows(draw, slice(0, 3)), feed.rows(draw, slice(3, 6))]
        for whole, *halves in zip(feed.rows(draw, slice(0, 6)), *parts_of, strict=True):
            assert torch.equal(whole, torch.cat(halves))
        allowed = [set(table.choice[0][i].tolist()) | {0} for i in draw.index]
        assert all(int(c) in a for c, a in zip(draw.caption, allowed, strict=True))
    dropped = torch.cat([d.caption == 0 for d in draws]).float().mean()
    assert 0.2 < dropped < 0.4
    chosen = torch.cat([d.caption[d.index % 3 == 2] for d in draws])
    assert set(chosen.tolist()) == {0, 1, 2, 3}  # every variant comes up


def test_a_frozen_text_encoder_is_run_once(recipe_file, base):
    first = run(recipe_file("first"))
    overrides = [f"model.base={first.pipeline}", "model.train_text_encoder=false"]
    path = recipe_file("second")
    text = path.read_text()
    for section in ("model.transformer", "model.text_encoder"):
        start = text.index(f"[{section}]")
        text = text[:start] + text[text.index("\n[", start + 1) + 1 :]
    path.write_text(text)
    recipe = load_recipe(path, overrides)
    parts = build_components(recipe)
    encoded = load_or_encode(open_source(recipe.data, 4, 0), parts, recipe.data, CPU)
    table = caption_table(encoded, parts, False, 12, CPU)
    ids = caption_table(encoded, parts, True, 12, CPU)
    length = table.values.shape[1]
    assert length == int(ids.mask.sum(1).max()) and table.values.shape[2] == 16
    with torch.no_grad():
        direct = parts.text_encoder(ids.values, attention_mask=ids.mask, use_cache=False)[0][:, :length]
    real = table.mask.bool()
    torch.testing.assert_close(table.values[real], direct[real])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        second = run(path, overrides)
    assert second.finished

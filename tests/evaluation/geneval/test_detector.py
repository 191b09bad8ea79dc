"""Mask2Former through transformers at toy size: from pictures to a score."""

import json

import pytest
import tiny_clip
import torch
from PIL import Image
from protocol_files import protocol
from transformers import Mask2FormerConfig, Mask2FormerForUniversalSegmentation, SwinConfig
from transformers.models.mask2former import Mask2FormerImageProcessor

from mhla_diffusion.cli import main
from mhla_diffusion.evaluation import passes
from mhla_diffusion.evaluation.geneval.detector import COLOURS, Detector, colour_words
from mhla_diffusion.evaluation.geneval.records import read_detections
from mhla_diffusion.evaluation.networks.clip import clip_model


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    root = tmp_path_factory.mktemp("detector")
    torch.manual_seed(0)
    swin = SwinConfig(
        image_size=64, embed_dim=8, depths=[1] * 4, num_heads=[1] * 4, window_size=2, patch_size=4,
        out_features=["stage1", "stage2", "stage3", "stage4"],
    )  # fmt: skip
    config = Mask2FormerConfig(
        backbone_config=swin, hidden_dim=32, feature_size=32, mask_feature_size=32, encoder_layers=1,
        decoder_layers=2, num_attention_heads=2, num_queries=6, encoder_feedforward_dim=16, dim_feedforward=16,
        id2label={0: "cup", 1: "dog", 2: "mouse"}, label2id={"cup": 0, "dog": 1, "mouse": 2},
    )  # fmt: skip
    Mask2FormerForUniversalSegmentation(config).save_pretrained(root / "mask2former")
    size = {"height": 64, "width": 64}
    Mask2FormerImageProcessor(size=size, ignore_index=255).save_pretrained(root / "mask2former")
    tiny_clip.open_clip_folder(root / "clip", tiny_clip.open_clip_network())
    records = [
        {
            "tag": "colors",
            "prompt": "a red cup",
            "include": [{"class": "cup", "count": 1, "color": "red"}],
        },
        {
            "tag": "single_object",
            "prompt": "a computer mouse",
            "include": [{"class": "computer mouse", "count": 1}],
        },
    ]
    (root / "metadata.jsonl").write_text("\n".join(map(json.dumps, records)))
    for index in range(2):
        (root / "p" / f"{index:05d}" / "samples").mkdir(parents=True)
        pixels = torch.randint(0, 256, (40, 48 + index, 3), dtype=torch.uint8).numpy()
        Image.fromarray(pixels).save(root / "p" / f"{index:05d}" / "samples" / "0000.png")
    return root


def test_detections_have_boxes_of_their_masks_and_colours(place):
    weights = {"mask2former": place / "mask2former", "clip": place / "clip"}
    detector = Detector(weights, threshold=0.0, device="cpu")
    found = detector(torch.randint(0, 256, (3, 40, 50), dtype=torch.uint8))
    assert found and [each.score for each in found] == sorted((each.score for each in found), reverse=True)
    for each in found:
        left, top, right, bottom = each.box
        assert 0 <= left < right <= 50 and 0 <= top < bottom <= 40
        assert each.name in ("cup", "dog", "computer mouse") and each.color in COLOURS
    for each in detector(torch.randint(0, 256, (3, 40, 50), dtype=torch.uint8), {"cup"}):
        assert (each.color is None) == (each.name != "cup")
    with pytest.raises(ValueError, match="has no class 'hat'"):
        detector.check_classes(["cup", "hat"])
    assert detector.about["official"] is False and detector.about["colours"]["activation"] == "QuickGELU"


def test_colour_words_are_means_of_sentences(place):
    clip = clip_model(place / "clip", device="cpu")
    words = colour_words(clip, "cup")
    assert words.shape == (10, 16)
    torch.testing.assert_close(words.norm(dim=1), torch.ones(10))
    texts = ["a photo of a green cup", "a photo of a green-colored cup", "a photo of a green object"]
    mean = clip.encode_texts(texts).features.mean(0)
    torch.testing.assert_close(words[COLOURS.index("green")], mean / mean.norm(), atol=1e-5, rtol=0)


def test_from_pictures_to_a_score(place, capsys):
    command = ["eval", "run", "geneval", "--samples", str(place / "p"), "--out", str(place / "a.json")]
    command += ["--prompts", str(place / "metadata.jsonl"), "--device", "cpu", "--weights"]
    command += [f"mask2former={place / 'mask2former'}", f"clip={place / 'clip'}"]
    assert main(command) == 0
    assert "not known to be of GenEval's own detector" in capsys.readouterr().err
    result = json.loads((place / "a.json").read_text())
    assert result["values"].keys() == {"colors", "single_object"}
    found, about = read_detections(place / "a_detections.jsonl")
    assert [each.image for each in found] == ["00000/samples/0000.png", "00001/samples/0000.png"]
    assert about["detector"] == "Mask2Former through transformers"


def test_detections_that_are_there_are_not_made_again(place, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(passes, "EVERY", 0.0)
    monkeypatch.setattr(passes, "SHARE", 0)
    command = [
        "eval",
        "run",
        "--protocol",
        protocol(tmp_path, "samples: {kind: detections}\nparts:\n- {scorer: geneval}\n"),
    ]
    command += ["--samples", str(place / "p"), "--prompts", str(place / "metadata.jsonl"), "--device", "cpu"]
    command += ["--weights", f"mask2former={place / 'mask2former'}", f"clip={place / 'clip'}", "--out"]
    monkeypatch.setattr(
        Detector.__init__, "__kwdefaults__", Detector.__init__.__kwdefaults__ | {"threshold": 0.0}
    )
    assert main([*command, str(tmp_path / "whole")]) == 0
    detect, seen = Detector.__call__, []

    def pressed(self, picture, coloured):
        seen.append(coloured)
        if len(seen) == 2:
            raise KeyboardInterrupt
        return detect(self, picture, coloured)

    monkeypatch.setattr(Detector, "__call__", pressed)
    assert main([*command, str(tmp_path / "out")]) == 130
    assert main([*command, str(tmp_path / "out")]) == 0 and len(seen) == 3
    assert "taken up of an unfinished run: 1 of 2 pictures" in capsys.readouterr().err
    lines = [(tmp_path / name / "detections.jsonl").read_text() for name in ("whole", "out")]
    assert lines[0] == lines[1] and lines[0].count('"box"') > 1


def test_missing_weights_are_named(place, capsys, monkeypatch):
    monkeypatch.delenv("MHLA_WEIGHTS", raising=False)
    command = ["eval", "run", "geneval", "--samples", str(place / "p")]
    command += ["--prompts", str(place / "metadata.jsonl")]
    assert main(command) == 3
    err = capsys.readouterr().err
    assert "no weights 'mask2former'; searched" in err and "or give detections" in err
    assert main([*command, "--weights", f"mask2former={place / 'clip'}"]) != 0
    assert capsys.readouterr().err.count("\n") == 1

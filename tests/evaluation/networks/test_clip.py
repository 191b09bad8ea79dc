"""CLIP by two libraries: the same numbers from the same weights, and what is refused or said."""

import json
import sys
import warnings

import open_clip
import pytest
import tiny_clip
import torch
from PIL import Image
from safetensors.torch import save_file
from torchmetrics.multimodal import CLIPScore

from mhla_diffusion.evaluation.faults import MissingWeights
from mhla_diffusion.evaluation.metrics.clip_score import clip_score
from mhla_diffusion.evaluation.networks.clip import activation, clip_model
from mhla_diffusion.evaluation.networks.image_text import for_torchmetrics, shortest_side_pixels
from mhla_diffusion.evaluation.networks.weight_files import sha256_of

CAPTIONS = ["a photo of a cat", "Two lemons, left of a whale", "", "x " * 300]


@pytest.fixture(scope="module")
def network():
    return tiny_clip.open_clip_network()


@pytest.fixture(scope="module")
def folders(tmp_path_factory, network):
    root = tmp_path_factory.mktemp("clip")
    return {
        "open_clip": tiny_clip.open_clip_folder(root / "oc", network),
        "transformers": tiny_clip.transformers_folder(root / "hf", network),
    }


@pytest.fixture
def pictures():
    return torch.randint(
        0, 256, (4, 3, 45, 61), dtype=torch.uint8, generator=torch.Generator().manual_seed(1)
    )


def to_pil_image(picture: torch.Tensor) -> Image.Image:
    return Image.fromarray(picture.permute(1, 2, 0).numpy())


def by_hand(network, pictures, captions):
    prepare = open_clip.image_transform(32, is_train=False)
    with torch.no_grad():
        images = network.encode_image(torch.stack([prepare(to_pil_image(p)) for p in pictures]))
        texts = network.encode_text(open_clip.tokenize(captions))
    return torch.nn.functional.cosine_similarity(images.double(), texts.double())


@pytest.mark.parametrize("library", ["open_clip", "transformers"])
def test_both_libraries_give_the_plain_formula(folders, network, pictures, library):
    model = clip_model(folders[library], device="cpu")
    found = clip_score(pictures, CAPTIONS, model, batch_size=3)
    expected = by_hand(network, pictures, CAPTIONS)
    assert float(found.cosine) == pytest.approx(float(expected.mean()), abs=1e-6)
    assert float(found.score) == pytest.approx(100 * float(found.cosine), rel=1e-12)
    assert float(found.std) == pytest.approx(100 * float(expected.std(unbiased=False)), abs=1e-4)
    assert (found.count, found.truncated) == (4, 1)
    assert model.about["library"] == library and model.about["activation"] == "QuickGELU"
    assert model.about["logit_scale"] == pytest.approx(100) and not model.notes
    assert len(model.about["weights"]["sha256"]) == 64


@pytest.mark.parametrize("library", ["open_clip", "transformers"])
def test_torchmetrics_computes_the_same_with_our_model(folders, pictures, library):
    model = clip_model(folders[library], device="cpu")
    metric = CLIPScore(model_name_or_path=for_torchmetrics(model))
    metric.update(pictures, CAPTIONS)
    ours = clip_score(pictures, CAPTIONS, model)
    assert float(metric.compute()) == pytest.approx(max(0.0, float(ours.score)), abs=1e-4)


@pytest.mark.parametrize("library", ["open_clip", "transformers"])
def test_captions_around_the_limit_keep_their_end_token(folders, library):
    # 74, 75, 76, 400 words: 75 fit between the two tokens at the ends. A cut end token would move the score far.
    model = clip_model(folders[library], device="cpu")
    picture = torch.full((1, 3, 32, 32), 90, dtype=torch.uint8)
    found = [clip_score(picture, ["x " * words], model) for words in (74, 75, 76, 400)]
    scores = [float(each.score) for each in found]
    assert max(abs(a - b) for a, b in zip(scores, scores[1:], strict=False)) < 2
    assert scores[1] == pytest.approx(scores[2], abs=1e-4) == pytest.approx(scores[3], abs=1e-4)
    assert [each.truncated for each in found] == [0, 0, 1, 1]
    with pytest.raises(ValueError, match="1 captions have more than 77 tokens"):
        clip_score(picture, ["x " * 76], model, long_prompts="error")
    with pytest.raises(ValueError, match="give truncate or error"):
        model.encode_texts(["x"], "cut")


@pytest.mark.parametrize("size", [(32, 32), (45, 61), (61, 45), (20, 33), (300, 77)])
def test_pictures_are_prepared_as_by_open_clip(size):
    pictures = torch.randint(0, 256, (2, 3, *size), dtype=torch.uint8)
    prepare = open_clip.image_transform(32, is_train=False)
    expected = torch.stack([prepare(to_pil_image(picture)) for picture in pictures])
    mean, std = open_clip.OPENAI_DATASET_MEAN, open_clip.OPENAI_DATASET_STD
    torch.testing.assert_close(shortest_side_pixels(pictures, 32, mean, std), expected, atol=1e-6, rtol=0)


@pytest.fixture(scope="module")
def file_of_weights(tmp_path_factory, network):
    """A file for a model that open_clip knows by name, with an entry in its list of weights."""
    root = tmp_path_factory.mktemp("file")
    (root / "ViT-tiny.json").write_text(json.dumps(tiny_clip.CONFIG))
    open_clip.add_model_config(root / "ViT-tiny.json")
    save_file({n: v.contiguous() for n, v in network.state_dict().items()}, root / "tiny.safetensors")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # tracing warns of shapes that it fixes, and that it is old
        torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), root / "scripted.pt")
        example = {"encode_image": torch.zeros(1, 3, 32, 32), "encode_text": open_clip.tokenize(["a"])}
        torch.jit.save(
            torch.jit.trace_module(tiny_clip.open_clip_network(), example, check_trace=False),
            root / "traced.pt",
        )
    torch.save({"state_dict": network.state_dict()}, root / "tiny.pt")
    return root


def test_a_file_needs_its_activation_named(file_of_weights, network, pictures):
    captions = CAPTIONS[:4]
    plain = clip_model(file_of_weights / "tiny.safetensors", model="ViT-tiny", device="cpu")
    assert plain.about["activation"] == "GELU" and "nothing says which activation" in plain.notes[0]
    asked = clip_model(file_of_weights / "tiny.pt", model="ViT-tiny", quick_gelu=True, device="cpu")
    expected = by_hand(network, pictures, captions).mean()
    assert float(clip_score(pictures, captions, asked).cosine) == pytest.approx(float(expected), abs=1e-6)
    assert float(clip_score(pictures, captions, plain).cosine) != pytest.approx(float(expected), abs=1e-6)


def test_the_activation_follows_the_weights_and_a_mismatch_warns(monkeypatch, file_of_weights):
    known = {"url": "", "quick_gelu": True}
    monkeypatch.setitem(open_clip.pretrained._PRETRAINED, "ViT-tiny", {"openai": known})
    file = file_of_weights / "tiny.safetensors"
    named = clip_model(file, model="ViT-tiny", pretrained="openai", device="cpu")
    assert named.about["activation"] == "QuickGELU" and "taken on trust" in named.notes[0]
    assert named.about["network"] == "CLIP ViT-tiny openai"
    wrong = clip_model(file, model="ViT-tiny", pretrained="openai", quick_gelu=False, device="cpu")
    assert wrong.about["activation"] == "GELU" and "scores are quietly wrong" in wrong.notes[1]
    # Without a name the file's hash is looked up.
    sha256 = named.about["weights"]["sha256"]
    known["url"] = f"https://example.org/tiny-{sha256[:8]}.pt"
    found = clip_model(file, model="ViT-tiny", device="cpu")
    assert found.about["network"] == "CLIP ViT-tiny openai" and found.about["activation"] == "QuickGELU"
    # TorchScript, as OpenAI publishes its weights, is read when its whole hash is in the list.
    known["url"] = f"https://example.org/{sha256_of(file_of_weights / 'traced.pt')}/tiny.pt"
    traced = clip_model(file_of_weights / "traced.pt", model="ViT-tiny", device="cpu")
    picture = torch.arange(3072, dtype=torch.float32).reshape(1, 3, 32, 32).remainder(256).to(torch.uint8)
    expected = clip_score(picture, ["a cat"], named)
    assert float(clip_score(picture, ["a cat"], traced).score) == pytest.approx(
        float(expected.score), abs=1e-5
    )
    known["url"] = f"https://example.org/tiny-{sha256[:8]}.pt"
    with pytest.raises(ValueError, match="give --clip-model ViT-tiny"):
        clip_model(file, model="ViT-B-32", device="cpu")
    sure = clip_model(file, model="ViT-tiny", pretrained="openai", device="cpu")
    assert not sure.notes and not found.notes
    monkeypatch.setitem(
        open_clip.pretrained._PRETRAINED["ViT-tiny"], "laion400m", {"url": "", "quick_gelu": False}
    )
    with pytest.raises(ValueError, match="the file holds openai of ViT-tiny, not ViT-tiny laion400m"):
        clip_model(file, model="ViT-tiny", pretrained="laion400m", device="cpu")
    with pytest.raises(ValueError, match="it knows openai"):
        clip_model(file, model="ViT-tiny", pretrained="laion", device="cpu")


def test_openai_weights_of_the_usual_models_need_quick_gelu():
    for name in ("ViT-B-32", "ViT-B-16", "ViT-L-14", "ViT-L-14-336"):
        known = bool(open_clip.get_pretrained_cfg(name, "openai")["quick_gelu"])
        notes = []
        assert known and activation(False, known, None, True, notes) and not notes


def test_random_weights_only_when_asked_for(monkeypatch, tmp_path, file_of_weights, caplog):
    monkeypatch.delenv("MHLA_WEIGHTS", raising=False)
    with pytest.raises(MissingWeights, match="no weights 'clip'; searched .* --random-weights"):
        clip_model(model="ViT-tiny")
    model = clip_model(model="ViT-tiny", random_weights=True, device="cpu")
    assert model.about["weights"] == "random" and "random weights" in model.notes[0]
    again = clip_model(model="ViT-tiny", random_weights=True, device="cpu")
    assert torch.equal(model.encode_texts(["a"]).features, again.encode_texts(["a"]).features)
    assert not caplog.records  # open_clip warns about them, also where weights of a file follow
    monkeypatch.setitem(
        open_clip.pretrained._PRETRAINED, "ViT-tiny", {"openai": {"url": "", "quick_gelu": True}}
    )
    named = clip_model(model="ViT-tiny", pretrained="openai", random_weights=True, device="cpu")
    assert named.about["network"] == "CLIP ViT-tiny random" and named.about["activation"] == "QuickGELU"
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "open_clip_config.json").write_text(json.dumps({"model_cfg": tiny_clip.CONFIG}))
    with pytest.raises(MissingWeights):
        clip_model(empty, device="cpu")


def test_a_missing_package_is_missing_like_weights(monkeypatch):
    monkeypatch.setitem(sys.modules, "open_clip", None)
    with pytest.raises(MissingWeights, match=r"open_clip is not installed.*pip install") as error:
        clip_model("ViT-B-32", random_weights=True)
    assert error.value.exit_status == 3 and "\n" not in str(error.value)


def test_nothing_is_taken_from_the_hub(file_of_weights):
    for name in ("xlm-roberta-base-ViT-B-32", "ViT-B-16-SigLIP"):
        with pytest.raises(ValueError, match="nothing is downloaded here"):
            clip_model(file_of_weights / "tiny.safetensors", model=name, device="cpu")


def test_what_does_not_fit_is_refused(file_of_weights, tmp_path, folders):
    with pytest.raises(ValueError, match="is TorchScript and none of OpenAI's"):
        clip_model(file_of_weights / "scripted.pt", model="ViT-tiny", device="cpu")
    save_file({"a": torch.zeros(1)}, tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match="does not fit the model"):
        clip_model(tmp_path / "other.safetensors", model="ViT-tiny", device="cpu")
    (tmp_path / "no.pt").write_bytes(b"no weights")
    with pytest.raises(
        ValueError, match=r"no.pt does not fit the model \(it holds more than tensors, or no weights"
    ):
        clip_model(tmp_path / "no.pt", model="ViT-tiny", device="cpu")
    with pytest.raises(ValueError, match="knows no model 'ViT-X'"):
        clip_model(tmp_path / "other.safetensors", model="ViT-X", device="cpu")
    model = clip_model(folders["open_clip"], device="cpu")
    with pytest.raises(ValueError, match="give one for each"):
        clip_score(torch.zeros(2, 3, 8, 8, dtype=torch.uint8), ["a"], model)
    with pytest.raises(ValueError, match="list of texts"):
        model.encode_texts("abc")

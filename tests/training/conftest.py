"""A toy SANA base folder, toy pictures that train in seconds on one CPU core, and toy DiTs of classes."""

import json

import numpy as np
import pytest
import torch
from diffusers import AutoencoderDC, DiTPipeline, DPMSolverMultistepScheduler
from PIL import Image
from tiny_dit import LABELS, stock_pipeline

import mhla_diffusion
from mhla_diffusion.training.tokenizer import train_tokenizer

COLOURS = {"red": (220, 30, 30), "green": (30, 200, 40), "blue": (40, 60, 220), "grey": (120, 120, 120)}

RUN = """
[run]
name = "toy"
seed = 3
steps = 6
batch_size = 4
log_every = 2
device = "cpu"
tracker = "none"
out = "{out}"

[model]
base = "{base}"
"""
RECIPE = (
    RUN
    + """\
train_text_encoder = true

[model.transformer]
in_channels = 4
out_channels = 4
num_attention_heads = 2
attention_head_dim = 8
num_layers = 2
num_cross_attention_heads = 2
cross_attention_head_dim = 8
cross_attention_dim = 16
mlp_ratio = 2.0
sample_size = 8
patch_size = 1
interpolation_scale = 1
caption_channels = 16
mhla_block_grid = [2, 2]
mhla_gate = true
mhla_local_conv = 3

[model.text_encoder]
vocab_size = 500
hidden_size = 16
intermediate_size = 32
num_hidden_layers = 1
num_attention_heads = 2
num_key_value_heads = 2
head_dim = 8
query_pre_attn_scalar = 8
max_position_embeddings = 64

[data]
kind = "folder"
path = "{pictures}"
size = 32
max_sequence_length = 12
cache = "{cache}"
encode_batch = 4

[optimizer]
lr = 0.002
warmup = 2
weight_decay = 0.01

[checkpoint]
every = 3
"""
)


def write_picture(path, colour, size=(32, 32), seed=0):
    noise = np.random.default_rng(seed).integers(-20, 20, (size[1], size[0], 3))
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray((np.array(colour) + noise).clip(0, 255).astype(np.uint8)).save(path)


@pytest.fixture(name="write_picture")
def write_picture_fixture():
    """`write_picture(path, colour, size=(32, 32), seed=0)`: a noisy picture of one colour."""
    return write_picture


@pytest.fixture(scope="session")
def base(tmp_path_factory):
    """Folder with vae/, tokenizer/ and scheduler/ at toy size: 32 px -> 8 x 8 latents of 4 channels."""
    folder = tmp_path_factory.mktemp("base")
    torch.manual_seed(0)
    vae = AutoencoderDC(
        latent_channels=4,
        attention_head_dim=4,
        encoder_block_types="ResBlock",
        decoder_block_types="ResBlock",
        encoder_block_out_channels=(4, 8, 8),
        decoder_block_out_channels=(4, 8, 8),
        encoder_layers_per_block=(1, 1, 1),
        decoder_layers_per_block=(1, 1, 1),
        encoder_qkv_multiscales=((), (), ()),
        decoder_qkv_multiscales=((), (), ()),
    )
    vae.save_pretrained(folder / "vae")
    captions = [f"a picture of {name} number {i}" for name in COLOURS for i in range(4)]
    train_tokenizer(captions, 450, 12).save_pretrained(folder / "tokenizer")
    DPMSolverMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=1.0
    ).save_pretrained(folder / "scheduler")
    return folder


@pytest.fixture(scope="session")
def pictures(tmp_path_factory):
    """Ten 32 px pictures with captions.jsonl."""
    folder = tmp_path_factory.mktemp("pictures")
    lines = []
    for i in range(10):
        name = list(COLOURS)[i % 4]
        write_picture(folder / f"{i}.png", COLOURS[name], seed=i)
        lines.append(json.dumps({"file": f"{i}.png", "caption": f"a picture of {name} number {i}"}))
    (folder / "captions.jsonl").write_text("\n".join(lines))
    return folder


@pytest.fixture
def write_recipe(tmp_path):
    """`write_recipe(text, "name", base=FOLDER, ...)`: a recipe whose run lands in tmp_path/name."""

    def write(text, name, **places):
        path = tmp_path / f"{name}.toml"
        path.write_text(text.format(out=tmp_path / name, cache=tmp_path / "cache", **places))
        return path

    return write


@pytest.fixture
def recipe_file(write_recipe, base, pictures):
    """`recipe_file("name")` writes the toy recipe."""
    return lambda name="toy", data=None: write_recipe(RECIPE, name, base=base, pictures=data or pictures)


CLASS_RECIPE = (
    RUN
    + """\
transformer_class = "MHLADiTTransformer2DModel"

[model.transformer]
num_attention_heads = 2
attention_head_dim = 8
num_layers = 2
sample_size = 8
patch_size = 2
out_channels = 8
mhla_block_grid = [2, 2]
mhla_gate = true

[data]
path = "{pictures}"
size = 32
cache = "{cache}"

[optimizer]
lr = 0.002
mixing_lr = 0.5
warmup = 2

[checkpoint]
every = 3
"""
)


@pytest.fixture(scope="session")
def class_folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("classes")
    for i, name in enumerate(["blue_whale", "umbrella", "goldfish"]):
        (folder / name).mkdir()
        for j in range(3):
            Image.new("RGB", (32, 32), (80 * i, 60 * j, 90)).save(folder / name / f"{j}.png")
    return folder


@pytest.fixture
def class_recipe(write_recipe, base, class_folders):
    def write(name="toy", data=None, text=CLASS_RECIPE):
        return write_recipe(text, name, base=base, pictures=data or class_folders)

    return write


@pytest.fixture
def adapt(class_recipe):
    """A recipe without a fresh transformer, for a base that has one."""
    start = CLASS_RECIPE.index("[model.transformer]")
    text = CLASS_RECIPE[:start] + CLASS_RECIPE[CLASS_RECIPE.index("[data]") :]
    text = text.replace('transformer_class = "MHLADiTTransformer2DModel"\n', "").replace(
        "size = 32", "size = 16"
    )
    return lambda name="adapted", data=None: class_recipe(name, data, text)


@pytest.fixture
def stock(tmp_path):
    """A stock DiT pipeline folder with three of its ten classes named."""
    pipe = stock_pipeline()
    published_start = pipe.transformer.transformer_blocks[0].norm1.emb.state_dict()
    for layer in pipe.transformer.transformer_blocks:  # one embedder, as released weights have
        layer.norm1.emb.load_state_dict(published_start)
    folder = tmp_path / "stock"
    pipe.save_pretrained(folder)
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(
        json.dumps({**index, "id2label": {str(k): v for k, v in LABELS.items()}})
    )
    assert type(mhla_diffusion.load_pipeline(folder)) is DiTPipeline
    return folder

"""CLIP at toy size with random weights, once in open_clip's layout and once, the same weights, in transformers'."""

import json
from pathlib import Path

import open_clip
import torch
from open_clip.tokenizer import SimpleTokenizer
from safetensors.torch import save_file
from transformers import CLIPConfig, CLIPModel, CLIPTokenizer

CONFIG = {
    "embed_dim": 16,
    "vision_cfg": {"image_size": 32, "layers": 2, "width": 64, "patch_size": 16, "head_width": 32},
    "text_cfg": {"context_length": 77, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 2},
}


def open_clip_network(seed: int = 0, quick_gelu: bool = True) -> open_clip.CLIP:
    torch.manual_seed(seed)
    network = open_clip.CLIP(**json.loads(json.dumps(CONFIG)), quick_gelu=quick_gelu).eval()
    with torch.no_grad():
        network.logit_scale.fill_(torch.log(torch.tensor(100.0)))
    return network


def open_clip_folder(folder: Path, network: open_clip.CLIP, quick_gelu: bool = True) -> Path:
    folder.mkdir(parents=True)
    config = {"model_cfg": CONFIG | {"quick_gelu": quick_gelu}, "preprocess_cfg": {}}
    (folder / "open_clip_config.json").write_text(json.dumps(config))
    save_file(
        {name: value.contiguous() for name, value in network.state_dict().items()},
        folder / "open_clip_model.safetensors",
    )
    return folder


def transformers_folder(folder: Path, network: open_clip.CLIP) -> Path:
    """The same network as transformers keeps it, with the same tokenizer."""
    towers = []
    for width, heads, layers in ((64, 2, 2), (32, 2, 2)):
        towers.append(
            {
                "hidden_size": width,
                "intermediate_size": 4 * width,
                "num_attention_heads": heads,
                "num_hidden_layers": layers,
                "hidden_act": "quick_gelu",
            }
        )
    vision, text = towers
    config = CLIPConfig(
        vision_config=vision | {"image_size": 32, "patch_size": 16, "projection_dim": 16},
        text_config=text
        | {
            "vocab_size": 49408,
            "max_position_embeddings": 77,
            "projection_dim": 16,
            "bos_token_id": 49406,
            "eos_token_id": 49407,
        },
        projection_dim=16,
    )
    model = CLIPModel(config).eval()
    model.load_state_dict(renamed(network.state_dict()), strict=False)
    model.save_pretrained(folder)
    words = SimpleTokenizer()
    names = {49406: "<|startoftext|>", 49407: "<|endoftext|>"}  # open_clip has its own names for these two
    vocabulary = {names.get(number, word): number for word, number in words.encoder.items()}
    CLIPTokenizer(vocab=vocabulary, merges=list(words.bpe_ranks)).save_pretrained(folder)
    return folder


def renamed(weights: dict) -> dict:
    """open_clip's names -> transformers'."""
    found = {"logit_scale": weights["logit_scale"]}
    found["visual_projection.weight"] = weights["visual.proj"].T
    found["text_projection.weight"] = weights["text_projection"].T
    found["vision_model.embeddings.class_embedding"] = weights["visual.class_embedding"]
    found["vision_model.embeddings.patch_embedding.weight"] = weights["visual.conv1.weight"]
    found["vision_model.embeddings.position_embedding.weight"] = weights["visual.positional_embedding"]
    found["text_model.embeddings.token_embedding.weight"] = weights["token_embedding.weight"]
    found["text_model.embeddings.position_embedding.weight"] = weights["positional_embedding"]
    parts = (
        ("ln_1", "layer_norm1"),
        ("ln_2", "layer_norm2"),
        ("mlp.c_fc", "mlp.fc1"),
        ("mlp.c_proj", "mlp.fc2"),
        ("attn.out_proj", "self_attn.out_proj"),
    )
    for kind in ("weight", "bias"):
        found[f"vision_model.pre_layrnorm.{kind}"] = weights[f"visual.ln_pre.{kind}"]
        found[f"vision_model.post_layernorm.{kind}"] = weights[f"visual.ln_post.{kind}"]
        found[f"text_model.final_layer_norm.{kind}"] = weights[f"ln_final.{kind}"]
        for ours, theirs in (("visual.transformer", "vision_model"), ("transformer", "text_model")):
            for layer in range(2):
                source, target = f"{ours}.resblocks.{layer}", f"{theirs}.encoder.layers.{layer}"
                for name, other in parts:
                    found[f"{target}.{other}.{kind}"] = weights[f"{source}.{name}.{kind}"]
                stacked = weights[f"{source}.attn.in_proj_{kind}"].chunk(3)
                for name, value in zip("qkv", stacked, strict=True):
                    found[f"{target}.self_attn.{name}_proj.{kind}"] = value
    return found

"""Writers of the layouts in which DiT, SANA, SANA-Video and the released MHLA-DiT code keep their weights.

They are written from those codes' module names, without the package's own rules, which they check.
"""

import math

import torch
import torch.nn.functional as F
from diffusers import DiTTransformer2DModel, SanaTransformer2DModel, SanaVideoTransformer3DModel

DIT = {
    "num_attention_heads": 2,
    "attention_head_dim": 8,
    "in_channels": 4,
    "out_channels": 8,
    "num_layers": 3,
    "sample_size": 8,
    "patch_size": 2,
    "num_embeds_ada_norm": 10,
    "norm_eps": 1e-6,
}
HEADS = {"num_attention_heads": 2}
SANA_HEADS = {
    "num_attention_heads": 2,
    "attention_head_dim": 8,
    "num_cross_attention_heads": 2,
    "cross_attention_head_dim": 8,
}


def stock_dit(seed: int = 0, **changes) -> DiTTransformer2DModel:
    """A DiT with weights of which none is zero (the stock one starts with some at zero), embedders in agreement."""
    torch.manual_seed(seed)
    model = DiTTransformer2DModel(**(DIT | changes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.2)
        first = model.transformer_blocks[0].norm1.emb.state_dict()
        for block in model.transformer_blocks:
            block.norm1.emb.load_state_dict(first)
    return model


def dit_inputs(batch: int = 2, side: int = 8, seed: int = 0) -> dict:
    draw = torch.Generator().manual_seed(seed)
    return {
        "hidden_states": torch.randn(batch, 4, side, side, generator=draw),
        "timestep": torch.tensor([17, 803])[:batch],
        "class_labels": torch.tensor([3, 10])[:batch],
    }


def linear(state: dict, name: str, module: torch.nn.Module) -> None:
    state[f"{name}.weight"] = module.weight
    if module.bias is not None:
        state[f"{name}.bias"] = module.bias


def fused(state: dict, name: str, modules: list[torch.nn.Linear]) -> None:
    state[f"{name}.weight"] = torch.cat([module.weight for module in modules])
    if modules[0].bias is not None:
        state[f"{name}.bias"] = torch.cat([module.bias for module in modules])


def dit_state(model: DiTTransformer2DModel) -> dict[str, torch.Tensor]:
    """The state dict that the original DiT code has for the same weights."""
    state = {"pos_embed": model.pos_embed.pos_embed}
    embedder = model.transformer_blocks[0].norm1.emb
    linear(state, "x_embedder.proj", model.pos_embed.proj)
    linear(state, "t_embedder.mlp.0", embedder.timestep_embedder.linear_1)
    linear(state, "t_embedder.mlp.2", embedder.timestep_embedder.linear_2)
    state["y_embedder.embedding_table.weight"] = embedder.class_embedder.embedding_table.weight
    for i, block in enumerate(model.transformer_blocks):
        attention = block.attn1
        fused(state, f"blocks.{i}.attn.qkv", [attention.to_q, attention.to_k, attention.to_v])
        linear(state, f"blocks.{i}.attn.proj", attention.to_out[0])
        linear(state, f"blocks.{i}.mlp.fc1", block.ff.net[0].proj)
        linear(state, f"blocks.{i}.mlp.fc2", block.ff.net[2])
        linear(state, f"blocks.{i}.adaLN_modulation.1", block.norm1.linear)
    linear(state, "final_layer.adaLN_modulation.1", model.proj_out_1)
    linear(state, "final_layer.linear", model.proj_out_2)
    return copied(state)


def sana_state(model: SanaTransformer2DModel) -> dict[str, torch.Tensor]:
    """The state dict that the original SANA code (or SANA-Sprint's) has for the same weights."""
    width = model.config.num_attention_heads * model.config.attention_head_dim
    tokens = (model.config.sample_size // model.config.patch_size) ** 2
    table = model.patch_embed.pos_embed  # a table of zeros stands for a model without positions
    state = {"pos_embed": torch.zeros(1, tokens, width) if table is None else table}
    linear(state, "x_embedder.proj", model.patch_embed.proj)
    return copied(state | sana_body(model))


def sana_video_state(model: SanaVideoTransformer3DModel) -> dict[str, torch.Tensor]:
    """The same for the original SANA-Video code, whose position table is not used: it rotates queries and keys."""
    state = {"pos_embed": torch.randn(1, 16, model.config.cross_attention_dim)}
    linear(state, "x_embedder.proj", model.patch_embedding)
    for i, block in enumerate(model.transformer_blocks):
        state[f"blocks.{i}.mlp.t_conv.weight"] = block.ff.conv_temp.weight
    return copied(state | sana_body(model))


def copied(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in state.items()}


def sana_body(model: SanaTransformer2DModel | SanaVideoTransformer3DModel) -> dict[str, torch.Tensor]:
    """What both codes name alike."""
    sprint = model.config.guidance_embeds
    time = model.time_embed if sprint else model.time_embed.emb
    width = model.config.num_attention_heads * model.config.attention_head_dim
    state = {"y_embedder.y_embedding": torch.randn(300, model.config.caption_channels)}
    linear(state, "t_embedder.mlp.0", time.timestep_embedder.linear_1)
    linear(state, "t_embedder.mlp.2", time.timestep_embedder.linear_2)
    if sprint:
        linear(state, "cfg_embedder.mlp.0", time.guidance_embedder.linear_1)
        linear(state, "cfg_embedder.mlp.2", time.guidance_embedder.linear_2)
        state |= {"logvar_linear.weight": torch.randn(1, width), "logvar_linear.bias": torch.randn(1)}
    linear(state, "t_block.1", model.time_embed.linear)
    linear(state, "y_embedder.y_proj.fc1", model.caption_projection.linear_1)
    linear(state, "y_embedder.y_proj.fc2", model.caption_projection.linear_2)
    state["attention_y_norm.weight"] = model.caption_norm.weight
    for i, block in enumerate(model.transformer_blocks):
        state[f"blocks.{i}.scale_shift_table"] = block.scale_shift_table
        fused(state, f"blocks.{i}.attn.qkv", [block.attn1.to_q, block.attn1.to_k, block.attn1.to_v])
        linear(state, f"blocks.{i}.attn.proj", block.attn1.to_out[0])
        linear(state, f"blocks.{i}.cross_attn.q_linear", block.attn2.to_q)
        fused(state, f"blocks.{i}.cross_attn.kv_linear", [block.attn2.to_k, block.attn2.to_v])
        linear(state, f"blocks.{i}.cross_attn.proj", block.attn2.to_out[0])
        for name, attention in (("attn", block.attn1), ("cross_attn", block.attn2)):
            if attention.norm_q is not None:
                state[f"blocks.{i}.{name}.q_norm.weight"] = attention.norm_q.weight
                state[f"blocks.{i}.{name}.k_norm.weight"] = attention.norm_k.weight
        linear(state, f"blocks.{i}.mlp.inverted_conv.conv", block.ff.conv_inverted)
        linear(state, f"blocks.{i}.mlp.depth_conv.conv", block.ff.conv_depth)
        linear(state, f"blocks.{i}.mlp.point_conv.conv", block.ff.conv_point)
    linear(state, "final_layer.linear", model.proj_out)
    state["final_layer.scale_shift_table"] = model.scale_shift_table
    return state


def official_state(model: DiTTransformer2DModel, blocks: int = 16, seed: int = 5) -> dict[str, torch.Tensor]:
    """Weights as the released MHLA-DiT code names them: those of a DiT, and random ones where it has more."""
    draw = torch.Generator().manual_seed(seed)
    state = {}
    for name, tensor in dit_state(model).items():
        state[name.replace("attn.qkv", "attn.to_qkv").replace("attn.proj", "attn.to_out.0")] = tensor
    width = state["x_embedder.proj.weight"].shape[0]
    for i in range(len(model.transformer_blocks)):
        attention = f"blocks.{i}.attn"
        state[f"{attention}.norm.weight"] = 1 + 0.2 * torch.randn(width, generator=draw)
        state[f"{attention}.norm.bias"] = 0.2 * torch.randn(width, generator=draw)
        state[f"{attention}.lepe.weight"] = 0.2 * torch.randn(width, 1, 3, 3, generator=draw)
        state[f"{attention}.lepe.bias"] = 0.2 * torch.randn(width, generator=draw)
        state[f"{attention}.piece_attn.conv.weight"] = torch.rand(blocks, blocks, 1, 1, generator=draw)
    return state


def official_output(state: dict, latents, timestep, labels, heads: int, paper: bool = False) -> torch.Tensor:
    """What the released MHLA-DiT code computes; with `paper` its denominator is the paper's instead."""

    def affine(name: str, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, state[f"{name}.weight"], state[f"{name}.bias"])

    def norm(x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, x.shape[-1:], eps=1e-6)

    def attention(name: str, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = x.shape
        mixing = state[f"{name}.piece_attn.conv.weight"][:, :, 0, 0]
        side, m = math.isqrt(tokens), math.isqrt(len(mixing))
        x = F.layer_norm(x, (width,), state[f"{name}.norm.weight"], state[f"{name}.norm.bias"])
        q, k, v = affine(f"{name}.to_qkv", x).chunk(3, dim=-1)
        image = v.transpose(1, 2).unflatten(2, (side, side))
        lepe = F.conv2d(
            image, state[f"{name}.lepe.weight"], state[f"{name}.lepe.bias"], padding=1, groups=width
        )

        def blocks(z: torch.Tensor) -> torch.Tensor:  # (B, H, M, tokens of a block, D)
            z = z.reshape(batch, m, side // m, m, side // m, heads, width // heads)
            return z.permute(0, 5, 1, 3, 2, 4, 6).flatten(4, 5).flatten(2, 3)

        q, k, v = blocks(F.relu(q) + 1e-6), blocks(F.relu(k) + 1e-6), blocks(v)
        summaries = torch.einsum("ij,bhjsd,bhjse->bhide", mixing, k, v)
        mass = k.sum(dim=3)
        if paper:
            denominator = torch.einsum("bhisd,ij,bhjd->bhis", q, mixing, mass)
        else:  # the query of block j at the same place s, in place of the one that is answered
            denominator = torch.einsum("ij,bhjsd,bhjd->bhis", mixing, q, mass) + 1e-6
        out = torch.einsum("bhisd,bhide->bhise", q, summaries) / denominator[..., None]
        out = out.unflatten(3, (side // m, side // m)).unflatten(2, (m, m))  # (B, H, m, m, n, n, D)
        out = out.permute(0, 2, 4, 3, 5, 1, 6).reshape(batch, tokens, width)
        return affine(f"{name}.to_out.0", out + lepe.flatten(2).transpose(1, 2))

    patch = state["x_embedder.proj.weight"].shape[-1]
    x = F.conv2d(latents, state["x_embedder.proj.weight"], state["x_embedder.proj.bias"], stride=patch)
    x = x.flatten(2).transpose(1, 2) + state["pos_embed"]
    angles = timestep[:, None] * torch.exp(-math.log(10000) * torch.arange(128) / 128)
    condition = torch.cat([angles.cos(), angles.sin()], dim=1)
    condition = affine("t_embedder.mlp.2", F.silu(affine("t_embedder.mlp.0", condition)))
    condition = F.silu(condition + state["y_embedder.embedding_table.weight"][labels])
    layers = sum(name.endswith("piece_attn.conv.weight") for name in state)
    for i in range(layers):
        modulation = affine(f"blocks.{i}.adaLN_modulation.1", condition)[:, None].chunk(6, dim=2)
        x = x + modulation[2] * attention(f"blocks.{i}.attn", norm(x) * (1 + modulation[1]) + modulation[0])
        hidden = affine(f"blocks.{i}.mlp.fc1", norm(x) * (1 + modulation[4]) + modulation[3])
        x = x + modulation[5] * affine(f"blocks.{i}.mlp.fc2", F.gelu(hidden, approximate="tanh"))
    shift, scale = affine("final_layer.adaLN_modulation.1", condition)[:, None].chunk(2, dim=2)
    x = affine("final_layer.linear", norm(x) * (1 + scale) + shift)
    side = latents.shape[-1] // patch
    x = x.unflatten(2, (patch, patch, -1)).unflatten(1, (side, side))  # (B, rows, columns, p, p, channels)
    return x.permute(0, 5, 1, 3, 2, 4).flatten(4, 5).flatten(2, 3)

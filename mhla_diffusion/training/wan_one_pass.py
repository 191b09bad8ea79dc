"""Stock Wan's causal autoencoder over all frames of a clip at once, for training.

Diffusers encodes one frame and then four at a time, and decodes one frame of latents at a time, with the last two
frames of every layer's input kept in between. That is what long videos need; a short clip then is computed in several
small pieces, each with its own kernels. All layers are causal, so one pass over all frames gives the same numbers, with
two rules for the first frame, which has no group of its own: the convolution that halves the frame rate starts at the
second output frame, and the one that doubles it neither sees nor doubles the first.

Activations are `(B, T, H, W, C)`, the layout that convolutions of 16-bit numbers want on a GPU. A convolution over
frames is one over pictures whose channels are those of the last three frames: libraries are tuned for pictures.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKLWan
from diffusers.models.autoencoders import autoencoder_kl_wan as stock
from torch import Tensor, nn


def latents_of(autoencoder: AutoencoderKLWan, pixels: Tensor) -> Tensor:
    """`autoencoder.encode(pixels).latent_dist.mode()`: `(B, 3, 1 + 4n, H, W)` -> `(B, C, 1 + n, h, w)`.

    Raises ValueError for another number of frames.
    """
    if pixels.shape[2] % 4 != 1:
        raise ValueError(f"{pixels.shape[2]} frames are given; one and a multiple of four are allowed, as 17")
    if autoencoder.config.patch_size is not None:
        pixels = stock.patchify(pixels, autoencoder.config.patch_size)
    encoder = autoencoder.encoder
    x = _causal(encoder.conv_in, pixels.permute(0, 2, 3, 4, 1))
    for layer in encoder.down_blocks:
        x = _layer(layer, x)
    x = _causal(autoencoder.quant_conv, _head(encoder, _middle(encoder.mid_block, x)))
    return x[..., : autoencoder.z_dim].permute(0, 4, 1, 2, 3)


def pixels_of(autoencoder: AutoencoderKLWan, latents: Tensor) -> Tensor:
    """`autoencoder.decode(latents).sample` before it is cut to [-1, 1].

    `(B, C, 1 + n, h, w)` -> `(B, 3, 1 + 4n, H, W)`.
    Nothing is learned from what is cut: a pixel that is far too bright would stay so.
    """
    decoder = autoencoder.decoder
    x = _causal(autoencoder.post_quant_conv, latents.permute(0, 2, 3, 4, 1))
    x = _middle(decoder.mid_block, _causal(decoder.conv_in, x))
    for layer in decoder.up_blocks:
        x = _layer(layer, x)
    x = _head(decoder, x).permute(0, 4, 1, 2, 3)
    return x if autoencoder.config.patch_size is None else stock.unpatchify(x, autoencoder.config.patch_size)


def _layer(layer: nn.Module, x: Tensor) -> Tensor:
    if isinstance(layer, stock.WanResidualBlock):
        return _residual(layer, x)
    if isinstance(layer, stock.WanResample):
        return _resample(layer, x)
    start = x
    for block in layer.resnets:
        x = _residual(block, x)
    if isinstance(layer, stock.WanUpBlock):
        return x if layer.upsamplers is None else _resample(layer.upsamplers[0], x)
    if isinstance(layer, stock.WanResidualDownBlock):
        x = x if layer.downsampler is None else _resample(layer.downsampler, x)
        return x + _averaged(layer.avg_shortcut, start)
    x = x if layer.upsampler is None else _resample(layer.upsampler, x)
    return x if layer.avg_shortcut is None else x + _repeated(layer.avg_shortcut, start)


def _pictures(conv: nn.Module, x: Tensor, weight: Tensor, **how) -> Tensor:
    """A convolution of every frame.

    Channels are filled up with zeros to multiples of eight: 16 bytes, below which a GPU's matrix units are not used.
    """
    outs, ins = weight.shape[:2]
    bias, more_out, more_in = conv.bias, -outs % 8, -ins % 8
    if more_in or more_out:
        x, weight = F.pad(x, (0, more_in)), F.pad(weight, (0, 0) * 2 + (0, more_in, 0, more_out))
        bias = F.pad(bias, (0, more_out))
    y = F.conv2d(
        x.flatten(0, 1).permute(0, 3, 1, 2), weight.contiguous(memory_format=torch.channels_last), bias, **how
    )
    return y.permute(0, 2, 3, 1).unflatten(0, x.shape[:2])[..., :outs]


def _causal(conv: stock.WanCausalConv3d, x: Tensor) -> Tensor:
    """`conv(x)`: frame t from the frames up to t; those before the first are zero."""
    weight = conv.weight  # (out, in, frames, rows, columns)
    taps, frames = weight.shape[2], x.shape[1]
    if taps > 1 and frames > 1:
        padded = F.pad(x, (0, 0) * 3 + (taps - 1, 0))
        x = torch.cat([padded[:, tap : tap + frames] for tap in range(taps)], -1)
        weight = weight.transpose(1, 2).flatten(1, 2)
    else:
        weight = weight[:, :, -1]  # all frames but the last are zero
    columns, _, rows, *_ = conv._padding  # what Diffusers pads itself; `padding` is zero
    return _pictures(conv, x, weight, padding=(rows, columns))


def _halved(conv: stock.WanCausalConv3d, x: Tensor) -> Tensor:
    """Three frames make one, every second frame; the first frame stays."""
    last = x.shape[1] - 2
    if last < 1:
        return x
    stacked = torch.cat([x[:, tap : last + tap : 2] for tap in range(3)], -1)
    y = _pictures(conv, stacked, conv.weight.transpose(1, 2).flatten(1, 2))
    return torch.cat([x[:, :1], y], 1)


def _doubled(conv: stock.WanCausalConv3d, x: Tensor) -> Tensor:
    """Every frame makes two, seen with the two before it; the first stays alone and is not seen."""
    if x.shape[1] == 1:
        return x
    y = _causal(conv, x[:, 1:]).unflatten(-1, (2, -1)).movedim(-2, 2).flatten(1, 2)
    return torch.cat([x[:, :1], y], 1)


def _resample(layer: stock.WanResample, x: Tensor) -> Tensor:
    if layer.mode.startswith("upsample"):
        if layer.mode == "upsample3d":
            x = _doubled(layer.time_conv, x)
        x = x.repeat_interleave(2, 2).repeat_interleave(2, 3)
        return _pictures(layer.resample[1], x, layer.resample[1].weight, padding=1)
    x = F.pad(x, (0, 0, 0, 1, 0, 1))
    x = _pictures(layer.resample[1], x, layer.resample[1].weight, stride=2)
    return _halved(layer.time_conv, x) if layer.mode == "downsample3d" else x


def _averaged(layer: stock.AvgDown3D, x: Tensor) -> Tensor:
    """The shortcut around a smaller size: means over groups of channels and places."""
    t, s = layer.factor_t, layer.factor_s
    x = F.pad(x, (0, 0) * 3 + (-x.shape[1] % t, 0))
    x = x.unflatten(3, (-1, s)).unflatten(2, (-1, s)).unflatten(1, (-1, t))  # (B, T, t, H, s, W, s, C)
    x = x.permute(0, 1, 3, 5, 7, 2, 4, 6).flatten(4)
    return x.unflatten(-1, (layer.out_channels, layer.group_size)).mean(-1)


def _repeated(layer: stock.DupUp3D, x: Tensor) -> Tensor:
    """The shortcut around a larger size: channels repeated and laid out as places; the first frame stays one."""
    t, s = layer.factor_t, layer.factor_s
    x = x.repeat_interleave(layer.repeats, -1).unflatten(-1, (layer.out_channels, t, s, s))
    x = x.permute(0, 1, 5, 2, 6, 3, 7, 4)  # (B, T, t, H, s, W, s, C)
    return x.flatten(5, 6).flatten(3, 4).flatten(1, 2)[:, t - 1 :]


def _norm(layer: stock.WanRMS_norm, x: Tensor) -> Tensor:
    gain = layer.scale * layer.gamma.flatten()
    return (F.normalize(x.float(), dim=-1) * gain + layer.bias).to(x.dtype)


def _residual(block: stock.WanResidualBlock, x: Tensor) -> Tensor:
    shortcut = block.conv_shortcut
    start = x if isinstance(shortcut, nn.Identity) else _causal(shortcut, x)
    x = _causal(block.conv1, block.nonlinearity(_norm(block.norm1, x)))
    x = block.dropout(block.nonlinearity(_norm(block.norm2, x)))
    return start + _causal(block.conv2, x)


def _attention(block: stock.WanAttentionBlock, x: Tensor) -> Tensor:
    """Within each frame, one head."""
    joint = _pictures(block.to_qkv, _norm(block.norm, x), block.to_qkv.weight)
    q, k, v = joint.flatten(0, 1).flatten(1, 2)[:, None].chunk(3, -1)
    seen = F.scaled_dot_product_attention(q, k, v).squeeze(1).view(x.shape)
    return x + _pictures(block.proj, seen, block.proj.weight)


def _middle(block: stock.WanMidBlock, x: Tensor) -> Tensor:
    x = _residual(block.resnets[0], x)
    for attention, residual in zip(block.attentions, block.resnets[1:], strict=True):
        x = _residual(residual, _attention(attention, x))
    return x


def _head(part: nn.Module, x: Tensor) -> Tensor:
    """The end of the encoder and of the decoder."""
    return _causal(part.conv_out, part.nonlinearity(_norm(part.norm_out, x)))

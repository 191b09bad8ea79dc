"""`convert` a stock model into ours on the same tensors, and `restore` it. No live model is ever patched."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from accelerate import init_empty_weights
from accelerate.hooks import CpuOffload
from diffusers import (
    DiffusionPipeline,
    DiTTransformer2DModel,
    ModelMixin,
    SanaTransformer2DModel,
    SanaVideoTransformer3DModel,
    WanTransformer3DModel,
)
from torch import nn

from ..building import BUILDING
from .dit import MHLADiTTransformer2DModel
from .mixin import MHLAModelMixin, clone_shared_tensors
from .options import check_block_grid, check_values, chosen_layers
from .sana import MHLASanaTransformer2DModel
from .sana_video import MHLASanaVideoTransformer3DModel
from .wan import MHLAWanTransformer3DModel


class Family(NamedTuple):
    """A stock class, ours for it, and the `mhla_` fields that keep the stock numerics as far as there are any."""

    stock: type[ModelMixin]
    ours: type[MHLAModelMixin]
    numerics: dict[str, Any]


# Plain relu features and this denominator: one block equals SANA's own linear attention.
SANA_NUMERICS = {"mhla_feature_eps": 0.0, "mhla_denominator_eps": 1e-15}
FAMILIES = (
    Family(SanaTransformer2DModel, MHLASanaTransformer2DModel, SANA_NUMERICS),
    Family(SanaVideoTransformer3DModel, MHLASanaVideoTransformer3DModel, SANA_NUMERICS),
    # DiT's attention is a softmax: no numerics of linear attention are to be kept.
    Family(DiTTransformer2DModel, MHLADiTTransformer2DModel, {}),
    Family(WanTransformer3DModel, MHLAWanTransformer3DModel, {}),
)


def convert(
    model: ModelMixin,
    block_grid: Sequence[int] | None = None,
    *,
    layers: str | Sequence[int] = "all",
    gate: bool = False,
    local_conv: int | None = None,
    norm_out: bool | None = None,
    normalizer: str | None = None,
    other_layers: str = "stock",
    mixing_init: str = "linear",
    mixing_normalization: str = "row",
    mixing_learnable: bool = True,
    per_head_mixing: bool = False,
    **unknown,
) -> MHLAModelMixin:
    """Our class for a stock transformer, on the same tensors (nothing is copied, nothing else is touched).

    `pipe.transformer = convert(pipe.transformer, block_grid=(4, 4))` is all that a pipeline needs. A gate
    and a local convolution start neutral.

    SANA's attention is linear already: its numerics are kept, so with one block, `block_grid=(1, 1)`, or (1, 1, 1) in
    SANA-Video, the converted model equals the stock one (1e-5 relative in float32). DiT's attention is a softmax,
    which no number of blocks reproduces: a converted DiT has the weights to start from and must be trained further;
    layers that are not converted stay as they are. The same holds for Wan.

    Args:
        model: a `SanaTransformer2DModel`, `SanaVideoTransformer3DModel`, `DiTTransformer2DModel` or
            `WanTransformer3DModel`; it stays usable, and shares its storage with the result.
        block_grid: blocks per axis, (rows, columns) or for video (frames, rows, columns); counts, not sizes, so that
            every resolution works. None: (4, 4), for video (3, 5, 10).
        layers: "all", a share such as "2/3" (layers 0, 3, 6, ... stay as they are), or the indices of the layers to
            convert.
        gate, local_conv, norm_out, normalizer, other_layers, and the mixing options: as the `mhla_` arguments of the
            returned model's class; None: that class's own choice.

    Raises ValueError (one line that says what is allowed) on another kind of model, on a model that is
    quantised, stored in another type than it computes in, offloaded or carries adapters, and on an option outside its
    range.
    """
    if unknown:
        name = next(iter(unknown))
        raise ValueError(
            f"convert() has no option {name!r}: block_grid=(rows, columns) gives the number of blocks per "
            "axis (not their size; any counts fit any picture), the others are layers, gate, local_conv, "
            "norm_out, normalizer, other_layers, mixing_init, mixing_normalization, mixing_learnable, per_head_mixing"
        )
    check_plain(model)
    given = {
        "gate": gate,
        "local_conv": local_conv,
        "mixing_init": mixing_init,
        "mixing_normalization": mixing_normalization,
        "mixing_learnable": mixing_learnable,
        "per_head_mixing": per_head_mixing,
        "other_layers": other_layers,
    }
    if norm_out is not None:
        given["norm_out"] = norm_out
    if normalizer is not None:
        given["normalizer"] = normalizer
    check_values(given)  # under the names that the caller used; the model would name its own fields
    default = family_of(model).ours.default_block_grid
    options = {
        **family_of(model).numerics,
        "mhla_layers": chosen_layers(layers, model.config.num_layers),
        "mhla_block_grid": check_block_grid(default if block_grid is None else block_grid, len(default)),
        **{f"mhla_{name}": value for name, value in given.items()},
    }
    with BUILDING:
        converted, missing = rebuild(model, family_of(model).ours, options)
        lost = converted.initialise_new_weights(missing)
    assert not lost, f"the stock model lacks {lost}"
    return converted


def restore(model: MHLAModelMixin) -> ModelMixin:
    """The stock model again, on the same tensors, without what MHLA added.

    Undoes `convert`: the result equals the original model bit for bit as long as no weight was changed in
    between. Raises ValueError when the model is not one of ours, is quantised, offloaded or carries adapters,
    or has options that its stock class cannot express.
    """
    if not isinstance(model, ours()):
        known = ", ".join(kind.__name__ for kind in ours())
        raise ValueError(
            f"restore() takes one of {known}, got {named(model, 'restore')}: it undoes convert()"
        )
    check_usable(model, "restore")
    if model.config.get("mhla_time_shift", 1) != 1:
        raise ValueError(
            f"mhla_time_shift={model.config.mhla_time_shift}: {family_of(model).stock.__name__} embeds timesteps with "
            "a shift of 1 only, so restored weights would draw something else; keep this model in our class"
        )
    with BUILDING:
        restored, missing = rebuild(model, family_of(model).stock, {})
    assert not missing, f"the model lacks {missing}"
    return restored


def ours() -> tuple[type[MHLAModelMixin], ...]:
    return tuple(family.ours for family in FAMILIES)


def family_of(model: ModelMixin) -> Family:
    return next(family for family in FAMILIES if isinstance(model, family.stock))


def named(model, action: str) -> str:
    kind = type(model).__name__
    if isinstance(model, DiffusionPipeline) and getattr(model, "transformer", None) is not None:
        return f"a {kind} ({action} one of its parts: pipe.transformer = {action}(pipe.transformer))"
    if hasattr(model, "_orig_mod"):
        return f"a compiled model ({action} first, then torch.compile)"
    return f"a {kind}"


def check_plain(model) -> None:
    """Raise ValueError unless `model` is a stock model that `convert` knows, with plain weights at hand."""
    known = ", ".join(family.stock.__name__ for family in FAMILIES)
    if isinstance(model, ours()):
        raise ValueError(
            f"{type(model).__name__} is converted already: convert(restore(model), ...) changes it"
        )
    if not isinstance(model, tuple(family.stock for family in FAMILIES)):
        raise ValueError(f"convert() takes one of {known}, got {named(model, 'convert')}")
    check_usable(model, "convert")


def check_usable(model: ModelMixin, action: str) -> None:
    if getattr(model, "hf_quantizer", None) is not None:
        raise ValueError(f"the model is quantised: {action} it first and quantise the result")
    if getattr(model, "_hf_peft_config_loaded", False):
        raise ValueError(f"the model carries adapters: fuse or unload them, {action}, then load them again")
    hooks = hooks_that_move_weights(model)
    if (
        "layerwise_casting" in hooks
    ):  # the result would compute in the type that the weights are only stored in
        raise ValueError(
            f"the model's weights are stored in another type (enable_layerwise_casting): {action} it first and "
            "cast the result"
        )
    if hooks or any(parameter.is_meta for parameter in model.parameters()):
        raise ValueError(f"the model's weights are offloaded: {action} it before offload is enabled")


def hooks_that_move_weights(model: ModelMixin) -> set[str]:
    """Names of the hooks that fetch or cast weights for `forward`, which a model on the same tensors would lack."""
    found = set()
    for module in model.modules():
        registry = getattr(module, "_diffusers_hook", None)
        found |= {
            name
            for name in ("group_offloading", "layerwise_casting")
            if registry is not None and registry.get_hook(name) is not None
        }
    if isinstance(getattr(model, "_hf_hook", None), CpuOffload):  # of a pipeline's model offload
        found.add("model_offloading")
    return found


def rebuild(
    model: ModelMixin, target: Callable[..., ModelMixin], options: dict
) -> tuple[ModelMixin, list[str]]:
    """A model of class `target` on the tensors of `model`, and the keys that `model` does not have.

    Each weight is a new Parameter on the same storage: a later `to(device)` or `requires_grad_` of one model
    leaves the other as it is, while in-place updates are seen by both.
    """
    stock_arguments = set(inspect.signature(family_of(model).stock.__init__).parameters) - {"self"}
    arguments = {name: value for name, value in model.config.items() if name in stock_arguments}
    with init_empty_weights():
        rebuilt = target(**arguments, **options)
    state = model.state_dict()
    if target is family_of(model).stock:
        clone_shared_tensors(model, state, "", {})  # a stock model could not save tensors on one memory
    expected = rebuilt.state_dict().keys()
    rebuilt.load_state_dict({k: v for k, v in state.items() if k in expected}, strict=False, assign=True)

    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    for name, parameter in rebuilt.named_parameters():
        if name in state:
            parameter.requires_grad_(name not in frozen)
    copy_buffers(model, rebuilt)
    rebuilt.train(model.training)
    if model.is_gradient_checkpointing:
        rebuilt.enable_gradient_checkpointing(model._gradient_checkpointing_func)
    return rebuilt, [key for key in expected if key not in state]


def copy_buffers(source: nn.Module, target: nn.Module) -> None:
    """Let `target` use the buffers of `source`, also those that no state dict holds (position tables).

    Each is a new tensor on the same memory, as weights are: offloading gives a tensor other memory in place.
    """
    theirs: dict[str, torch.Tensor] = dict(source.named_buffers())
    for name, _ in list(target.named_buffers()):
        owner, _, attribute = name.rpartition(".")
        owner = target.get_submodule(owner)
        if name in theirs:
            owner._buffers[attribute] = theirs[name].detach()
        else:
            owner._buffers[attribute] = owner._buffers[attribute].to(source.device)

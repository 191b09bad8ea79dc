"""`convert` a stock model into ours on the same tensors, and `restore` it. No live model is ever patched."""

import inspect
from collections.abc import Callable, Sequence

import torch
from accelerate import init_empty_weights
from diffusers import DiffusionPipeline, ModelMixin, SanaTransformer2DModel
from torch import nn

from .options import check_block_grid, check_layers
from .sana import MHLASanaTransformer2DModel

# Stock SANA's numerics: plain relu features and this denominator, so one block equals the stock attention.
SANA_FEATURE_EPS = 0.0
SANA_DENOMINATOR_EPS = 1e-15


def convert(
    model: ModelMixin,
    block_grid: Sequence[int] = (4, 4),
    *,
    layers: str | Sequence[int] = "all",
    gate: bool = False,
    local_conv: int | None = None,
    norm_out: bool = False,
    other_layers: str = "stock",
    mixing_init: str = "linear",
    mixing_normalization: str = "row",
    mixing_learnable: bool = True,
    per_head_mixing: bool = False,
    **unknown,
) -> MHLASanaTransformer2DModel:
    """Our class for a stock transformer, on the same tensors (nothing is copied, nothing else is touched).

    `pipe.transformer = convert(pipe.transformer, block_grid=(4, 4))` is all that a pipeline needs. A gate, a
    local convolution and an output norm start neutral, and the numerics stay those of the stock model, so
    with one block, `block_grid=(1, 1)`, the converted model equals the stock one (1e-5 relative in float32).

    Args:
        model: a `SanaTransformer2DModel`; it stays usable, and shares its storage with the result.
        block_grid: blocks per axis (rows, columns); counts, not sizes, so that every resolution works.
        layers: "all", or the indices of the layers to convert.
        gate, local_conv, norm_out, other_layers, and the mixing options: as the `mhla_` arguments of
            `MHLASanaTransformer2DModel`.

    Raises ValueError (one line that says what is allowed) on another kind of model, on a model that is
    quantised, offloaded or carries adapters, and on an option outside its range.
    """
    if unknown:
        name = next(iter(unknown))
        raise ValueError(
            f"convert() has no option {name!r}: block_grid=(rows, columns) gives the number of blocks per "
            "axis (not their size; any counts fit any picture), the others are layers, gate, local_conv, "
            "norm_out, other_layers, mixing_init, mixing_normalization, mixing_learnable, per_head_mixing"
        )
    if isinstance(layers, str) and layers != "all":
        raise ValueError(f"layers={layers!r}: give 'all' or a list of layer indices")
    check_plain(model)
    # Checked here under the names that the caller used; the model would name its own fields.
    counts = check_block_grid(block_grid)
    indices = None if isinstance(layers, str) else check_layers(layers, model.config.num_layers)
    options = {
        "mhla_layers": indices,
        "mhla_block_grid": counts,
        "mhla_feature_eps": SANA_FEATURE_EPS,
        "mhla_denominator_eps": SANA_DENOMINATOR_EPS,
        "mhla_gate": gate,
        "mhla_local_conv": local_conv,
        "mhla_norm_out": norm_out,
        "mhla_mixing_init": mixing_init,
        "mhla_mixing_normalization": mixing_normalization,
        "mhla_mixing_learnable": mixing_learnable,
        "mhla_per_head_mixing": per_head_mixing,
        "mhla_other_layers": other_layers,
    }
    converted, missing = rebuild(model, our_class(model), options)
    lost = converted.initialise_new_weights(missing)
    assert not lost, f"the stock model lacks {lost}"
    return converted


def restore(model: MHLASanaTransformer2DModel) -> SanaTransformer2DModel:
    """The stock model again, on the same tensors, without what MHLA added.

    Undoes `convert`: the result equals the original model bit for bit as long as no weight was changed in
    between. Raises ValueError when the model is not one of ours, or is quantised, offloaded or carries
    adapters.
    """
    stock_class = next((stock for ours, stock in STOCK_CLASS_OF.items() if isinstance(model, ours)), None)
    if stock_class is None:
        known = ", ".join(ours.__name__ for ours in STOCK_CLASS_OF)
        raise ValueError(f"restore() takes one of {known}, got {named(model)}: it undoes convert()")
    check_usable(model, "restore")
    restored, missing = rebuild(model, stock_class, {})
    assert not missing, f"the model lacks {missing}"
    return restored


STOCK_CLASS_OF: dict[type[ModelMixin], type[ModelMixin]] = {
    MHLASanaTransformer2DModel: SanaTransformer2DModel
}


def our_class(model: ModelMixin) -> type[MHLASanaTransformer2DModel]:
    return next(ours for ours, stock in STOCK_CLASS_OF.items() if isinstance(model, stock))


def named(model) -> str:
    kind = type(model).__name__
    if isinstance(model, DiffusionPipeline) and getattr(model, "transformer", None) is not None:
        return f"a {kind} (convert one of its parts: pipe.transformer = convert(pipe.transformer))"
    if hasattr(model, "_orig_mod"):
        return "a compiled model (convert first, then torch.compile)"
    return f"a {kind}"


def check_plain(model) -> None:
    """Raise ValueError unless `model` is a stock model that `convert` knows, with plain weights at hand."""
    known = ", ".join(stock.__name__ for stock in STOCK_CLASS_OF.values())
    if isinstance(model, tuple(STOCK_CLASS_OF)):
        raise ValueError(
            f"{type(model).__name__} is converted already: convert(restore(model), ...) changes it"
        )
    if not isinstance(model, tuple(STOCK_CLASS_OF.values())):
        raise ValueError(f"convert() takes one of {known}, got {named(model)}")
    check_usable(model, "convert")


def check_usable(model: ModelMixin, action: str) -> None:
    if getattr(model, "hf_quantizer", None) is not None:
        raise ValueError(f"the model is quantised: {action} it first and quantise the result")
    if getattr(model, "_hf_peft_config_loaded", False):
        raise ValueError(f"the model carries adapters: fuse or unload them, {action}, then load them again")
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ValueError(f"the model's weights are offloaded: {action} it before offload is enabled")


def rebuild(
    model: ModelMixin, target: Callable[..., ModelMixin], options: dict
) -> tuple[ModelMixin, list[str]]:
    """A model of class `target` on the tensors of `model`, and the keys that `model` does not have.

    Each weight is a new Parameter on the same storage: a later `to(device)` or `requires_grad_` of one model
    leaves the other as it is, while in-place updates are seen by both.
    """
    stock_arguments = set(inspect.signature(STOCK_CLASS_OF[our_class(model)].__init__).parameters) - {"self"}
    arguments = {name: value for name, value in model.config.items() if name in stock_arguments}
    with init_empty_weights():
        rebuilt = target(**arguments, **options)
    state = model.state_dict()
    expected = rebuilt.state_dict().keys()
    rebuilt.load_state_dict({k: v for k, v in state.items() if k in expected}, strict=False, assign=True)

    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    for name, parameter in rebuilt.named_parameters():
        if name in state:
            parameter.requires_grad_(name not in frozen)
    copy_buffers(model, rebuilt)
    rebuilt.train(model.training)
    return rebuilt, [key for key in expected if key not in state]


def copy_buffers(source: nn.Module, target: nn.Module) -> None:
    """Let `target` use the buffers of `source`, also those that no state dict holds (position tables)."""
    theirs: dict[str, torch.Tensor] = dict(source.named_buffers())
    for name, _ in list(target.named_buffers()):
        owner, _, attribute = name.rpartition(".")
        if name in theirs:
            target.get_submodule(owner)._buffers[attribute] = theirs[name]

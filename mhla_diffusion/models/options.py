"""The `mhla_` fields that the configs of our models share: what is allowed, and the attention they describe."""

import math
import numbers

from ..mixing import INITS, NORMALIZATIONS
from ..ops.attention import NORMALIZERS

OTHER_LAYERS = ("stock", "softmax")


def check_options(config, num_layers: int) -> dict:
    """The fields `mhla_layers` and `mhla_block_grid` in the form in which they are saved.

    Args:
        config: of a model of ours, with all `mhla_` fields.
        num_layers: how many layers the model has.

    Raises ValueError (one line that says what is allowed) on a field outside the allowed values.
    """
    check_choice("mhla_normalizer", config.mhla_normalizer, NORMALIZERS)
    check_choice("mhla_mixing_init", config.mhla_mixing_init, INITS)
    check_choice("mhla_mixing_normalization", config.mhla_mixing_normalization, NORMALIZATIONS)
    check_choice("mhla_other_layers", config.mhla_other_layers, OTHER_LAYERS)
    check_epsilon("mhla_feature_eps", config.mhla_feature_eps)
    if config.mhla_denominator_eps is not None:
        check_epsilon("mhla_denominator_eps", config.mhla_denominator_eps)
    layers = config.mhla_layers
    return {
        "mhla_layers": None if layers is None else check_layers(layers, num_layers),
        "mhla_block_grid": check_block_grid(config.mhla_block_grid),
    }


def attention_options(config) -> dict:
    """Arguments of an MHLA attention module that the `mhla_` fields of a model's config stand for."""
    return {
        "block_grid": tuple(config.mhla_block_grid),
        "feature_eps": config.mhla_feature_eps,
        "normalizer": config.mhla_normalizer,
        "denominator_eps": config.mhla_denominator_eps,
        "norm_out": config.mhla_norm_out,
        "mixing_init": config.mhla_mixing_init,
        "mixing_normalization": config.mhla_mixing_normalization,
        "mixing_learnable": config.mhla_mixing_learnable,
        "per_head_mixing": config.mhla_per_head_mixing,
    }


def check_choice(name: str, value, allowed: tuple) -> None:
    """Raise ValueError unless `value` is one of the allowed ones."""
    if value not in allowed:
        raise ValueError(f"{name}={value!r}: choose one of {', '.join(map(str, allowed))}")


def check_epsilon(name: str, value) -> None:
    """Raise ValueError unless `value` is a finite number of at least 0."""
    if (
        isinstance(value, bool)
        or not isinstance(value, numbers.Real)
        or not math.isfinite(value)
        or value < 0
    ):
        raise ValueError(f"{name}={value!r}: give a finite number of at least 0, such as 1e-6")


def check_block_grid(block_grid) -> list[int]:
    """Blocks per axis as a list of two ints; ValueError on anything else."""
    counts = list(block_grid) if isinstance(block_grid, (list, tuple)) else []
    if len(counts) != 2 or any(type(count) is not int or count < 1 for count in counts):
        raise ValueError(
            f"block_grid={block_grid!r}: give the number of blocks per axis as two positive integers "
            "(rows, columns), such as (4, 4)"
        )
    return counts


def check_layers(layers, num_layers: int) -> list[int]:
    """Sorted layer indices; ValueError on one outside 0..num_layers-1, given twice, or not an integer."""
    chosen = list(layers) if isinstance(layers, (list, tuple, range, set)) else [layers]
    wrong = [index for index in chosen if type(index) is not int or not 0 <= index < num_layers]
    if wrong or len(set(chosen)) != len(chosen):
        raise ValueError(
            f"layers={layers!r}: give different layer indices from 0 to {num_layers - 1} "
            f"(this model has {num_layers} layers)"
        )
    return sorted(chosen)

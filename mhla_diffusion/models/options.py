"""The `mhla_` fields that the configs of our models share: what is allowed, and the attention they describe."""

import math
import numbers
import re
from collections.abc import Mapping

from ..attention import odd_size
from ..blocks import integer
from ..mixing import INITS, NORMALIZATIONS
from ..ops.attention import NORMALIZERS

OTHER_LAYERS = ("stock", "softmax")
MOST_BLOCKS = 4096  # 67 MB of coefficients a layer; they grow with the square
CHOICES = {
    "normalizer": NORMALIZERS,
    "mixing_init": INITS,
    "mixing_normalization": NORMALIZATIONS,
    "other_layers": OTHER_LAYERS,
}
# Of these, a model has those that its class knows; one that is None is chosen by the class.
SWITCHES = (
    "gate",
    "norm_in",
    "norm_out",
    "norm_across_heads",
    "norm_projected",
    "mixing_learnable",
    "per_head_mixing",
)


def check_options(config, num_layers: int, axes: int = 2) -> dict:
    """The fields that hold integers in the form in which they are saved.

    Args:
        config: of a model of ours, with all `mhla_` fields.
        num_layers: how many layers the model has.
        axes: of its token grid.

    Raises ValueError (one line that says what is allowed) on a field outside the allowed values.
    """
    check_values(config, "mhla_")
    return {
        "mhla_layers": chosen_layers(config.mhla_layers, num_layers),
        "mhla_block_grid": check_block_grid(config.mhla_block_grid, axes),
        "mhla_local_conv": None if config.mhla_local_conv is None else odd_size(config.mhla_local_conv),
    }


def check_values(values: Mapping, prefix: str = "") -> None:
    """Raise ValueError on a choice, a switch or an epsilon among `values`, each named with `prefix`, that is none."""
    for name, allowed in CHOICES.items():
        if prefix + name in values:
            check_choice(prefix + name, values[prefix + name], allowed)
    for name in SWITCHES:
        check_switch(prefix + name, values.get(prefix + name))
    if prefix + "feature_eps" in values:
        check_epsilon(prefix + "feature_eps", values[prefix + "feature_eps"])
    if values.get(prefix + "denominator_eps") is not None:
        check_epsilon(prefix + "denominator_eps", values[prefix + "denominator_eps"])


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


def check_switch(name: str, value) -> None:
    """Raise ValueError unless `value` is True, False or None: in a JSON file "false" would be taken for true."""
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"{name}={value!r}: give True or False (in JSON true or false, without quotes)")


def check_epsilon(name: str, value) -> None:
    """Raise ValueError unless `value` is a finite number of at least 0."""
    if (
        isinstance(value, bool)
        or not isinstance(value, numbers.Real)
        or not math.isfinite(value)
        or value < 0
    ):
        raise ValueError(f"{name}={value!r}: give a finite number of at least 0, such as 1e-6")


def check_block_grid(block_grid, axes: int = 2) -> list[int]:
    """Blocks per axis as a list of as many ints as there are axes, 2 or 3.

    Raises ValueError on anything else, and on more blocks than a matrix of coefficients can have.
    """
    counts = [integer(count) for count in as_list(block_grid)]
    if len(counts) != axes or any(count is None or count < 1 for count in counts):
        wanted = {
            2: "two positive integers (rows, columns), such as (4, 4)",
            3: "three positive integers (frames, rows, columns), such as (3, 5, 10)",
        }
        raise ValueError(f"block_grid={block_grid!r}: give the number of blocks per axis as {wanted[axes]}")
    blocks = math.prod(counts)
    if blocks > MOST_BLOCKS:
        raise ValueError(
            f"block_grid={block_grid!r}: {blocks} blocks have {blocks**2:.1e} coefficients in each layer; give the "
            f"number of blocks per axis (not their size), at most {MOST_BLOCKS} in all"
        )
    return counts


def as_list(values) -> list:
    """What a list, tuple, range, set, array or tensor holds; anything else is taken as one value."""
    if hasattr(values, "tolist"):
        values = values.tolist()
    return list(values) if isinstance(values, (list, tuple, range, set)) else [values]


def chosen_layers(layers, num_layers: int) -> list[int] | None:
    """The layers that use MHLA: None for all of them, else sorted indices.

    Args:
        layers: "all" or None; "none"; a share such as "2/3", where of every 3 layers the last 2 use MHLA and the others
            (0, 3, 6, ...) do not; or indices.

    Raises ValueError on anything else.
    """
    if layers is None or (isinstance(layers, str) and layers == "all"):  # an array compares by its elements
        return None
    if not isinstance(layers, str):
        return check_layers(layers, num_layers)
    if layers == "none":
        return []
    match = re.fullmatch(r"([1-9]\d*)/([1-9]\d*)", layers)
    used, period = map(int, match.groups()) if match else (0, 0)
    if not 0 < used < period:
        raise ValueError(
            f"layers={layers!r}: give 'all', 'none' or a list of layer indices, or a share such as '2/3' (all but "
            "layers 0, 3, 6, ...)"
        )
    return [index for index in range(num_layers) if index % period >= period - used]


def check_layers(layers, num_layers: int) -> list[int]:
    """Sorted layer indices; ValueError on one outside 0..num_layers-1, given twice, or not an integer."""
    chosen = [integer(index) for index in as_list(layers)]
    if any(index is None or not 0 <= index < num_layers for index in chosen) or len(set(chosen)) != len(
        chosen
    ):
        raise ValueError(
            f"layers={layers!r}: give different layer indices from 0 to {num_layers - 1} "
            f"(this model has {num_layers} layers)"
        )
    return sorted(chosen)

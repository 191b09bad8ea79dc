"""What the config of a checkpoint says: which model, with which arguments, and whether there is such a one."""

import difflib
import inspect
from collections.abc import Mapping

from accelerate import init_empty_weights
from diffusers import Transformer2DModel

from ..building import BUILDING
from .convert import FAMILIES, Family
from .mixin import MHLAModelMixin

__all__ = ["checked_arguments", "class_and_arguments", "family_named", "layer_number", "without_values"]

# A class that Diffusers has renamed, by the field of its config that tells which model it is.
LEGACY = {("Transformer2DModel", "ada_norm_zero"): "DiTTransformer2DModel"}


def class_and_arguments(stored: Mapping) -> tuple[str, dict]:
    """Class name and arguments out of a config.json."""
    name = stored.get("_class_name")
    legacy = LEGACY.get((str(name), str(stored.get("norm_type"))))
    if stored.get("quantization_config"):
        raise ValueError("the model is quantised: convert the unquantised one and quantise the result")
    arguments = {key: value for key, value in stored.items() if not key.startswith("_")}
    if legacy is None:
        family = family_named(name)
        return name, checked_arguments(
            arguments, family.ours if name == family.ours.__name__ else family.stock, "config.json"
        )
    known = set(inspect.signature(family_named(legacy).stock.__init__).parameters)
    idle = {
        key: parameter.default for key, parameter in inspect.signature(Transformer2DModel).parameters.items()
    }
    extra = {
        key: value
        for key, value in arguments.items()
        if key not in known and value not in (None, False, 0, idle.get(key))
    }
    if extra:
        key = next(iter(extra))
        raise ValueError(
            f"config.json has {key}={extra[key]!r}, which {legacy} does not know: remove it if it is idle"
        )
    return legacy, {key: value for key, value in arguments.items() if key in known}


def family_named(name) -> Family:
    for family in FAMILIES:
        if name in (family.stock.__name__, family.ours.__name__):
            return family
    known = ", ".join(kind.__name__ for family in FAMILIES for kind in (family.stock, family.ours))
    what = f"the model is a {name}" if name else "its config.json names no class"
    raise ValueError(f"{what}; what can be converted: {known}")


def checked_arguments(arguments: Mapping, kind: type, place: str) -> dict:
    """The same arguments. Raises ValueError on one that the class does not take, and on a size that is none."""
    known = dict(inspect.signature(kind.__init__).parameters)
    del known["self"]
    for name, value in arguments.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = (
                f", did you mean {near[0]}?" if near else ": remove it, or upgrade diffusers if it is newer"
            )
            raise ValueError(f"{place} has {name!r}, which {kind.__name__} does not know{hint}")
        is_size = known[name].annotation is int and not name.startswith("mhla_")
        if is_size and (type(value) is not int or value < 1):
            raise ValueError(f"{place} has {name}={value!r}: give a positive integer")
    return dict(arguments)


def layer_number(arguments: Mapping, family: Family) -> int:
    """How many layers the model has; a config may leave to the class what is its default."""
    default = inspect.signature(family.stock.__init__).parameters["num_layers"].default
    return arguments.get("num_layers", default)


def without_values(kind: type[MHLAModelMixin], arguments: Mapping) -> MHLAModelMixin:
    """A model on the meta device. Raises ValueError when there is none with these arguments."""
    try:
        with BUILDING, init_empty_weights():
            return kind(**arguments).requires_grad_(False)
    except (TypeError, ArithmeticError, AttributeError, LookupError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"no {kind.__name__} can be built of this config ({type(error).__name__}: {reason}): correct it"
        ) from error

"""One file of weights read straight into one of our models: what `from_single_file` does."""

import os
from collections.abc import Mapping
from pathlib import Path

import torch
from accelerate import init_empty_weights

from ..building import BUILDING
from ..weights import read_json
from .checkpoint_config import checked_arguments
from .checkpoint_plan import OPTION_OF, Plan, make_plan
from .mixin import MHLAModelMixin
from .tensor_files import check_sum, open_tensors

__all__ = ["load_single_file"]

# What callers of Diffusers' `from_single_file` may give besides, and what nothing here depends on.
IDLE = ("local_files_only", "use_safetensors", "low_cpu_mem_usage", "disable_mmap", "token", "cache_dir")


def load_single_file(
    cls: type[MHLAModelMixin],
    path: str | os.PathLike,
    *,
    config: Mapping | str | os.PathLike | None = None,
    subfolder: str | None = None,
    torch_dtype: torch.dtype | None = None,
    dtype: torch.dtype | None = None,
    weights: str | None = None,
    **options,
) -> MHLAModelMixin:
    """A model of class `cls` with the weights of one file, on the CPU; see `MHLAModelMixin.from_single_file`."""
    if not isinstance(path, (str, os.PathLike)) or not Path(path).expanduser().is_file():
        raise ValueError(
            f"from_single_file({str(path)[:200]!r}): there is no such file; give the path of one that is on the disk "
            "(`hf download OWNER/NAME FILE` gets one from the Hub)"
        )
    path = Path(path).expanduser()
    options = {name: value for name, value in options.items() if name not in IDLE}
    strange = [name for name in options if not name.startswith("mhla_")]
    if strange:
        raise ValueError(
            f"from_single_file() does not know {strange[0]!r}: give config, subfolder, torch_dtype, weights and the "
            f"mhla_ options of {cls.__name__}; arguments of the model go into config"
        )
    checked_arguments(options, cls, "from_single_file()")
    stored, given = described(config, subfolder)
    chosen = {
        option.replace("-", "_"): options.pop(name) for name, option in OPTION_OF.items() if name in options
    }
    if stored is not None and "mhla_block_grid" in stored:
        chosen.setdefault("block_grid", stored["mhla_block_grid"])
    check_sum(path)
    tensors = open_tensors(path, weights)
    try:
        plan = make_plan([tensors], stored, given=given | options, **chosen)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    if not isinstance(plan.model, cls):
        kind = type(plan.model).__name__
        raise ValueError(f"{path} holds the weights of a {kind}, not of a {cls.__name__}: use {kind}")
    model = filled(plan, torch_dtype or dtype or torch.float32)
    model.register_to_config(_name_or_path=str(path))
    return model


def described(config, subfolder: str | None) -> tuple[dict | None, dict]:
    """The config.json of a model in Diffusers' layout, or else arguments that the file itself does not tell."""
    if config is None:
        return None, {}
    if not isinstance(config, Mapping):
        place = Path(config, subfolder or "").expanduser()
        place = place / "config.json" if place.is_dir() else place
        if not place.is_file():
            raise ValueError(
                f"there is no config {place}: give a folder with config.json, or a dict of arguments"
            )
        config = read_json(place, "give a model's config.json")
    if "_class_name" in config:
        return dict(config), {}
    return None, {name: value for name, value in config.items() if not name.startswith("_")}


def filled(plan: Plan, dtype: torch.dtype) -> MHLAModelMixin:
    """The planned model with values of its own: what is in the file, and the documented start of new weights."""
    kind = type(plan.model)
    with BUILDING, init_empty_weights():  # not the plan's, whose position tables have the file's precision
        model = kind.from_config(plan.model.config)
    kept = set(kind._keep_in_fp32_modules or ())
    state = {}
    for entries in plan.entries():
        for entry in entries:
            wanted = torch.float32 if kept & set(entry.key.split(".")) else dtype
            # Copied: what was one matrix in the file would share its memory, which cannot be saved.
            state[entry.key] = torch.empty(entry.shape, dtype=wanted).copy_(entry.make().detach())
    model.load_state_dict(state, assign=True)
    return model.eval()

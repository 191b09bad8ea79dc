"""Models from folders in transformers' layout, whole or not at all; never from the hub."""

from __future__ import annotations

from pathlib import Path

import torch

from ...loading import no_library_bars
from .weight_files import told


def load_model(cls: type, path: Path, kind: str, *, unused: tuple[str, ...] = ()) -> torch.nn.Module:
    """A model in eval mode, float32, on the CPU.

    Args:
        cls: class of transformers, or an Auto class. kind: its `model_type`, or several joined by ", ".
        unused: what names of weights may begin with that the folder need not hold, since nothing reads them.

    Raises ValueError for another kind of model, a folder that cannot be read, and weights that are missing or do not
    fit: transformers draws those at random, and numbers would be quietly wrong.
    """
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True)
        if config.model_type not in kind.split(", "):
            raise ValueError(f"it holds a {config.model_type}, not {kind}")
        with no_library_bars():
            network, loading = cls.from_pretrained(
                path, local_files_only=True, dtype=torch.float32, output_loading_info=True
            )
    except Exception as error:  # transformers, safetensors, torch and json each raise their own
        raise ValueError(
            f"{path} holds no model that can be used ({told(error)}): give another folder"
        ) from error
    if missing := sorted(name for name in loading["missing_keys"] if not name.startswith(unused)):
        raise ValueError(f"{path} lacks {len(missing)} weights, the first is {missing[0]}: give a whole copy")
    return network.eval()

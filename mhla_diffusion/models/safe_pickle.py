"""Weights out of pickled checkpoints, read without running what is in them.

A pickle is a program. `torch.load(weights_only=True)` refuses every call but the few that build tensors and
plain containers; one class is allowed besides, `argparse.Namespace`, in which training programs keep their
settings next to the weights. Everything else is named and refused.
"""

import argparse
import os
import pickle
import pickletools
import re
import warnings
from collections.abc import Mapping
from pathlib import Path

import torch

__all__ = ["load_pickle", "state_of", "unwrapped"]

# Under these names training programs keep the weights; the average comes first, as it is what they sample with.
STATE_NAMES = ("ema", "state_dict_ema", "state_dict", "model")
# Put in front of every key by DataParallel, torch.compile, bundles of whole pipelines, DiffSynth and Lightning.
PREFIXES = ("module.", "_orig_mod.", "model.diffusion_model.", "pipe.dit.", "model.")


def load_pickle(path: str | os.PathLike):
    """The object in a checkpoint written by `torch.save`, with its tensors mapped from the file, on the CPU.

    Raises ValueError (one line) when the file is empty, cut short or no checkpoint, and when it holds anything
    but tensors, plain containers and an `argparse.Namespace`; what was found is named, and was not run.
    """
    path = Path(path)
    size = path.stat().st_size
    if size == 0:
        raise ValueError(f"{path} is empty (0 bytes): copy or download it again")
    with open(path, "rb") as file:
        start = file.read(8)
    if start == b"version ":
        raise ValueError(
            f"{path} is a Git LFS pointer, not the weights: run `git lfs pull` in its repository"
        )
    zipped = start[:2] == b"PK"  # before PyTorch 1.6 checkpoints were no archives, which cannot be mapped
    try:
        with warnings.catch_warnings(), torch.serialization.safe_globals([argparse.Namespace]):
            warnings.simplefilter("ignore")  # about protocols and TorchScript: the errors below say more
            return torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
    except pickle.UnpicklingError as error:
        raise ValueError(refusal(path, str(error))) from None
    except (
        RuntimeError,
        EOFError,
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
        UnicodeError,
        OSError,  # of an archive over a page long that ends early
    ) as error:
        reason = " ".join(str(error).split())[:120] or type(error).__name__
        raise ValueError(
            f"{path} is cut short or no PyTorch checkpoint ({size} bytes; {reason}): copy or download it again"
        ) from None


def refusal(path: Path, message: str) -> str:
    """What to say about a checkpoint that torch would not unpickle."""
    found = re.search(r"GLOBAL ([\w.]+)", message)
    name = found[1] if found else ", ".join(foreign_names(path))
    if not name:
        # Not something that is forbidden, but bytes that are no such pickle at all.
        reason = " ".join(message.split("WeightsUnpickler error:")[-1].split("Check the doc")[0].split())[
            :120
        ]
        return f"{path} is no checkpoint of tensors ({reason}): copy or download it again"
    return (
        f"{path} holds {name}, which is code and not weights; it was not run. Only tensors, plain containers and "
        "argparse.Namespace are read: save the state dict alone, best as .safetensors, where you trust the file"
    )


def foreign_names(path: Path) -> list[str]:
    """What a bare pickle would import besides the means to build tensors; its instructions are only listed."""
    names, strings = [], []
    try:
        with open(path, "rb") as file:
            for operation, argument, _ in pickletools.genops(file):
                if operation.name == "GLOBAL":
                    names.append(argument.replace(" ", "."))
                elif operation.name == "STACK_GLOBAL":
                    names.append(".".join(strings[-2:]))
                elif isinstance(argument, str):
                    strings.append(argument)
    except (ValueError, EOFError, LookupError, UnicodeError):
        pass  # no pickle, or cut short: what was listed up to there
    return [
        x for x in dict.fromkeys(names) if not x.startswith(("torch.", "collections.", "argparse.Namespace"))
    ]


def state_of(loaded, path: Path, name: str | None = None) -> tuple[dict[str, torch.Tensor], str]:
    """The state dict inside a loaded checkpoint, and the name it was under ("" for a bare one).

    Args:
        loaded: what `load_pickle` returned.
        name: of the entry to take; None takes the average of the weights where there is one.

    Raises ValueError when there is none, and when it holds anything but tensors.
    """
    if not isinstance(loaded, Mapping):
        raise ValueError(
            f"{path} holds a {type(loaded).__name__}, not a state dict: give a checkpoint of weights"
        )
    inside = [key for key in STATE_NAMES if isinstance(loaded.get(key), Mapping) and loaded[key]]
    if name is None:
        name = inside[0] if inside else ""
    elif not isinstance(loaded.get(name), Mapping):
        raise ValueError(
            f"{path} has no weights under {name!r}: it has {', '.join(inside) or 'a bare state dict only'}"
        )
    state = loaded[name] if name else loaded
    others = [
        str(key)
        for key, value in state.items()
        if not isinstance(value, torch.Tensor) or not isinstance(key, str)
    ]
    if others or not state:
        raise ValueError(
            f"{path} holds no state dict under {', '.join(STATE_NAMES)}, and its entries are no tensors by name "
            f"({', '.join(others[:5]) or 'there are none'}): give a checkpoint of weights"
        )
    return unwrapped(state), name


def unwrapped(state: Mapping) -> dict:
    """The same values by key without the prefixes that all keys share, in whichever order they were put there."""
    while state:
        prefix = next((x for x in PREFIXES if all(key.startswith(x) for key in state)), None)
        if prefix is None:
            break
        state = {key.removeprefix(prefix): value for key, value in state.items()}
    return dict(state)

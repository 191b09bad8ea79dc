"""Reads the Inception weights of FID: state dicts (.pth, .safetensors) and the TorchScript of the `inception` extra."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from ..faults import MissingWeights
from .inception import Convolution, FIDInception
from .weight_files import ROLES, Found, about_weights, cache_folder, find_weights, sha256_of, told


def from_torchscript(path: Path) -> dict[str, torch.Tensor]:
    """State dict of `FIDInception` out of the TorchScript file whose sha256 is pinned.

    The file lists its 94 convolutions in the order in which ours are defined; each has a weight, and batch norm's
    offset, mean and variance (its factor is 1).
    """
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", FutureWarning
        )  # torch.jit.load is deprecated; the file has no other form
        scripted = torch.jit.load(str(path), map_location="cpu")
    values = iter(scripted.state_dict().items())
    state = {}
    for name, module in FIDInception().named_modules():
        if not isinstance(module, Convolution):
            continue
        for ending, ours in (
            ("weight", "conv.weight"),
            ("beta", "bn.bias"),
            ("mean", "bn.running_mean"),
            ("var", "bn.running_var"),
        ):
            theirs, value = next(values)
            assert theirs.endswith(f".{ending}"), theirs
            state[f"{name}.{ours}"] = value.clone()
        state[f"{name}.bn.weight"] = torch.ones_like(state[f"{name}.bn.bias"])
    return state


def read_state(found: Found) -> dict[str, torch.Tensor]:
    """State dict of a file of weights. A TorchScript is only run through torch.jit with the pinned hash.

    Raises ValueError for a file that holds no state dict.
    """
    path, pinned = found.path, ROLES["inception"].sha256
    if path.suffix in (".safetensors", ".pth"):
        try:
            if path.suffix == ".safetensors":
                return load_file(path)
            state = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # safetensors, pickle and torch each raise their own
            raise ValueError(f"{path} cannot be read as weights ({told(error)}): copy it again") from error
        if not isinstance(state, dict) or not all(
            isinstance(value, torch.Tensor) for value in state.values()
        ):
            raise ValueError(f"{path} holds no state dict: give pt_inception-2015-12-05-6726825d.pth")
        return state
    kept = cache_folder() / f"inception-{pinned[:16]}.safetensors"
    if path.suffix != ".pt" or (digest := sha256_of(path)) != pinned:
        what = f" (sha256 {digest[:16]}..., expected {pinned[:16]}...)" if path.suffix == ".pt" else ""
        raise ValueError(
            f"{path} is no Inception file that is known{what}: give .pth, .safetensors or the extra's default_1.pt"
        )
    if kept.is_file():
        return load_file(kept)
    state = from_torchscript(path)
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        partial = kept.with_name(f"{kept.name}.{os.getpid()}")
        save_file(state, partial)
        os.replace(partial, kept)
    except OSError as error:
        warnings.warn(
            f"Inception is converted again each time: {kept.parent} takes no files ({error})", stacklevel=2
        )
    return state


def load_inception(
    path: str | os.PathLike | None = None, *, classifier: bool = False
) -> tuple[FIDInception, dict[str, str]]:
    """The network in eval mode (float32, CPU), and where its weights came from: role, path, why, sha256.

    Args:
        path: a file of weights; without it `$MHLA_WEIGHTS/inception/` and the package of the extra are searched.
        classifier: with the classifier of the Inception Score.

    Raises:
        MissingWeights: no file, or one without the classifier that is asked for.
        ValueError: the file does not hold this network.
    """
    role = "inception-classifier" if classifier else "inception"
    found = find_weights(role, path)
    state = read_state(found)
    if classifier and "fc.weight" not in state:
        raise MissingWeights(
            f"{found.path} has no classifier (fc.weight): {ROLES['inception-classifier'].advice}"
        )
    network = FIDInception(classifier)
    wanted = network.state_dict()
    drop = {"fc.weight", "fc.bias"} if not classifier else set()
    state = {
        name: value for name, value in state.items() if name not in drop and not name.startswith("AuxLogits.")
    }
    counters = {name for name in wanted if name.endswith("num_batches_tracked")}
    missing = sorted(wanted.keys() - state.keys() - counters)
    wrong = sorted(
        name
        for name, value in state.items()
        if name not in wanted or tuple(value.shape) != tuple(wanted[name].shape)
    )
    if missing or wrong:
        first = f"{missing[0]} is missing" if missing else f"{wrong[0]} does not fit"
        raise ValueError(
            f"{found.path} does not hold the Inception network of FID ({first}; {len(missing)} missing, "
            f"{len(wrong)} wrong): give the file of 2015-12-05"
        )
    network.load_state_dict(state, strict=False)
    about = about_weights(role, found)
    return network.eval().requires_grad_(False), about

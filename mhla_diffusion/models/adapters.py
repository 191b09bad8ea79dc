"""Adapters: LoRA on our models, together with the weights that a stock model lacks (mixing, gate, convolution, norm).

A file holds LoRA pairs under stock's names, and new weights under the model's own. `load_adapter` and `save_adapter`
take both in one call; the stock pipelines' `load_lora_weights` takes files of LoRA pairs only.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import torch
from diffusers.loaders import SanaLoraLoaderMixin
from safetensors.torch import save_file
from torch import nn

from ..attention import GridSelfAttention
from .tensor_files import is_finite

PREFIX = "transformer"
FILE_NAME = "pytorch_lora_weights.safetensors"
SHOWN = 3


class AdapterMixin:
    """Loads LoRA pairs whole or not at all, new weights of the model with them, and takes both away again."""

    # New weights as they were before an adapter brought its own, and that adapter's name; None: no adapter did.
    _before_adapter: dict[str, torch.Tensor] | None = None
    _bringing_adapter: str | None = None
    _adapter_is_fused = False
    # Reads LoRA files of this family, also those that other programs wrote.
    _lora_loader = SanaLoraLoaderMixin

    def load_lora_adapter(self, source, prefix: str | None = PREFIX, hotswap: bool = False, **kwargs) -> None:
        """As in Diffusers, where `source` may hold new weights of this model as well.

        Raises ValueError, and changes nothing, when a weight in `source` has no place in this model, when there is
        none for this model, or when new weights of another adapter are loaded already.
        """
        self._check_unfused()
        if stored_on_disk(
            self
        ):  # in place of such weights there is memory without values, which would be read
            raise ValueError(
                "the transformer's weights are offloaded to the disk: load the adapter, and then enable_group_offload()"
            )
        dot = "" if prefix is None else f"{prefix}."
        if not isinstance(source, dict):
            check_source(source)
        if not isinstance(source, dict) or (source and not any(key.startswith(dot) for key in source)):
            source, metadata = self._read_lora(source, kwargs)
            kwargs.setdefault("metadata", metadata)
        if kwargs.get("metadata"):  # what it lists there comes without PEFT
            kwargs["metadata"] = {
                k: v for k, v in kwargs["metadata"].items() if not k.endswith("modules_to_save")
            }
        pairs, own = self._sorted_adapter(source, dot)
        if own and self._before_adapter is not None and not hotswap:
            raise ValueError(
                "new weights (mixing and the like) of another adapter are loaded already, and there is one place for "
                "them: unload_lora_weights() first, or hotswap=True with that adapter's name"
            )
        if own and any(place.is_meta for place in new_weights(self).values()):
            raise ValueError(
                "the transformer's weights are offloaded one by one: load the adapter, and then "
                "enable_sequential_cpu_offload()"
            )
        known = set(getattr(self, "peft_config", {}))
        if pairs:
            super().load_lora_adapter(pairs, prefix=prefix, hotswap=hotswap, **kwargs)
        if own or (hotswap and kwargs.get("adapter_name") == self._bringing_adapter):
            self._take_new_weights(own)
            name = kwargs.get("adapter_name")
            self._bringing_adapter = name or next(iter(set(getattr(self, "peft_config", {})) - known), None)

    def _read_lora(self, source, options: dict) -> tuple[dict, dict | None]:
        """Tensors under Diffusers' names and their metadata; takes where to look for a file out of `options`."""
        names = (
            "cache_dir",
            "force_download",
            "local_files_only",
            "proxies",
            "revision",
            "subfolder",
            "token",
        )
        where = {name: options.pop(name) for name in (*names, "weight_name") if name in options}
        try:
            return self._lora_loader.lora_state_dict(source, return_lora_metadata=True, **where)
        except (LookupError, ValueError) as error:
            # Its translations of other programs' names expect certain layers, and do not say which names they are for.
            given = "these tensors" if isinstance(source, dict) else source
            raise ValueError(
                f"{given} cannot be read as a LoRA for {type(self).__name__} ({type(error).__name__}: "
                f"{' '.join(str(error).split())}): give one with Diffusers' names, or as the original code has them"
            ) from error

    def add_adapter(self, adapter_config, adapter_name: str = "default") -> None:
        """As in Diffusers; raises ValueError where projections are fused."""
        self._check_unfused()
        super().add_adapter(adapter_config, adapter_name)

    def _check_unfused(self) -> None:
        if any(
            module.fused_projections for module in self.modules() if isinstance(module, GridSelfAttention)
        ):
            raise ValueError(
                "the model computes with fused copies of its projections, which an adapter would not reach: "
                "unfuse_qkv_projections() first; after fuse_lora() and unload_lora() they can be fused again"
            )

    def _sorted_adapter(self, source: dict, dot: str) -> tuple[dict, dict]:
        """LoRA pairs with their prefix, and new weights without; ValueError when one of them has no place."""
        places, modules = new_weights(self), dict(self.named_modules())
        pairs, own, lost = {}, {}, []
        for key, tensor in source.items():
            name = key.removeprefix(dot)
            if not key.startswith(dot):
                lost.append(key)
            elif name in places:
                own[name] = tensor
                if not is_finite(tensor):
                    lost.append(f"{key}: it holds infinite values or NaN")
                if tensor.shape != places[name].shape:
                    lost.append(f"{key} of shape {tuple(tensor.shape)} for {tuple(places[name].shape)}")
            else:
                pairs[key] = tensor
                if not pair_fits(name, tensor, modules):
                    lost.append(key)
                elif not is_finite(tensor):
                    lost.append(f"{key}: it holds infinite values or NaN")
                elif not has_partner(key, source):
                    lost.append(f"{key}: its other half is missing or of another rank")
        if lost or not source:
            what = f"{len(lost)} of its {len(source)} weights have no place" if source else "it is empty"
            shown = ", ".join(lost[:SHOWN]) + (", ..." if len(lost) > SHOWN else "")
            raise ValueError(
                f"the adapter does not belong to this {type(self).__name__}: {what} ({shown or 'no weights'}); take "
                f"one that was made for a model with the same layers, width and mhla_ options"
            )
        return pairs, own

    @torch.no_grad()
    def _take_new_weights(self, own: dict[str, torch.Tensor]) -> None:
        places = new_weights(self)
        before = self._before_adapter or {}
        # An adapter that is swapped for one without some of them gives the model's own back.
        for name, tensor in {**before, **own}.items():
            before.setdefault(name, places[name].detach().clone())
            places[name].copy_(tensor)
        self._before_adapter, self._adapter_is_fused = before, False

    def unload_lora(self, *args, **kwargs) -> None:
        """Take adapters away; new weights go back to what they were, unless fused before."""
        fused = self._still_fused()
        super().unload_lora(*args, **kwargs)
        self._give_back_new_weights(fused)

    def delete_adapters(self, adapter_names: list[str] | str) -> None:
        """As in Diffusers; the new weights that one of the adapters brought go back to what they were."""
        fused = self._still_fused()
        super().delete_adapters(adapter_names)
        if self._bringing_adapter in ([adapter_names] if isinstance(adapter_names, str) else adapter_names):
            self._give_back_new_weights(fused)

    def _still_fused(self) -> bool:
        """Whether what brought new weights is fused; pipelines unfuse the pairs without asking the model."""
        from peft.tuners.tuners_utils import BaseTunerLayer

        layers = [module for module in self.modules() if isinstance(module, BaseTunerLayer)]
        return self._adapter_is_fused and (not layers or any(layer.merged for layer in layers))

    @torch.no_grad()
    def _give_back_new_weights(self, fused: bool) -> None:
        if self._before_adapter is not None and not fused:
            places = new_weights(self)
            for name, tensor in self._before_adapter.items():
                places[name].copy_(tensor)
        self._before_adapter, self._bringing_adapter, self._adapter_is_fused = None, None, False

    def fuse_lora(
        self, lora_scale: float = 1.0, safe_fusing: bool = False, adapter_names: list[str] | None = None
    ) -> None:
        """Merge LoRA pairs into the weights; new weights of an adapter among those merged stay for good."""
        super().fuse_lora(lora_scale, safe_fusing, adapter_names)
        if adapter_names is None or self._bringing_adapter in adapter_names:
            self._adapter_is_fused = True

    def unfuse_lora(self, *args, **kwargs) -> None:
        super().unfuse_lora(*args, **kwargs)
        self._adapter_is_fused = False


def check_source(source) -> None:
    """Raise ValueError unless `source` is a file or folder that is there, or can be a name on the Hub."""
    if not isinstance(source, (str, os.PathLike)):
        raise ValueError(f"an adapter is a file, a folder or tensors by name, got a {type(source).__name__}")
    if not Path(source).exists() and not re.fullmatch(r"[\w.-]+/[\w.-]+", str(source)):
        raise ValueError(
            f"there is no adapter {source}: give the file or folder of one, or a name on the Hub"
        )


def stored_on_disk(model: nn.Module) -> bool:
    """Whether Diffusers' group offloading keeps weights of the model in files."""
    registries = (getattr(module, "_diffusers_hook", None) for module in model.modules())
    hooks = (registry.get_hook("group_offloading") for registry in registries if registry is not None)
    return any(hook is not None and hook.group.offload_to_disk_path is not None for hook in hooks)


def pair_fits(name: str, tensor: torch.Tensor, modules: dict[str, nn.Module]) -> bool:
    """Whether a weight of a LoRA pair has a module to attach to, of the same width."""
    path, found, kind = name.partition(".lora_")
    if not found:
        return "lora" in name  # another naming: Diffusers translates or refuses it
    module = modules.get(path)
    width = {
        "A": getattr(module, "in_features", getattr(module, "in_channels", None)),
        "B": getattr(module, "out_features", getattr(module, "out_channels", None)),
    }.get(kind[:1])
    return module is not None and (width is None or tensor.ndim < 2 or tensor.shape[kind[0] == "A"] == width)


def has_partner(key: str, source: dict) -> bool:
    """Whether the other half of a LoRA pair is there, of the same rank (the rows of A, the columns of B)."""
    path, found, end = key.rpartition(".lora_")
    if not found or end not in ("A.weight", "B.weight"):
        return True
    other = source.get(f"{path}.lora_{'B' if end[0] == 'A' else 'A'}.weight")
    axis = 0 if end[0] == "A" else 1
    return other is not None and other.ndim > 1 and source[key].shape[axis] == other.shape[1 - axis]


def new_weights(model: nn.Module) -> dict[str, nn.Parameter]:
    """Every weight by name that a stock model lacks; those that PEFT keeps a copy of are PEFT's to load and save."""
    found = {}
    for prefix, attention in model.named_modules():
        if isinstance(attention, GridSelfAttention):
            for name, module in attention.new_modules():
                if not hasattr(module, "modules_to_save"):
                    found |= {f"{prefix}.{name}.{key}": weight for key, weight in module.named_parameters()}
    return found


def is_new_weight(model: nn.Module, name: str) -> bool:
    owner = name.rpartition(".attn1.")[0] + ".attn1"
    attention = dict(model.named_modules()).get(owner)
    names = dict(attention.new_modules()) if isinstance(attention, GridSelfAttention) else {}
    return name.removeprefix(f"{owner}.").partition(".")[0] in names


def save_adapter(target, folder: str | os.PathLike, *, adapter_name: str = "default") -> Path:
    """Write an adapter of a pipeline or transformer to `folder`, LoRA pairs and new weights together.

    Args:
        target: a pipeline whose transformer is one of ours, or such a transformer.
        folder: made if it is not there; the file's name in it is `pytorch_lora_weights.safetensors`.
        adapter_name: which adapter. New weights go along when they train (`requires_grad`), when they are PEFT's
            `modules_to_save`, or when an adapter brought them.

    Returns the file's path. Raises ValueError when there is nothing to save, or no adapter of that name among others.
    """
    from peft.utils import get_peft_model_state_dict

    model = transformer_of(target)
    configs = getattr(model, "peft_config", {})
    if configs and adapter_name not in configs:
        raise ValueError(f"adapter_name={adapter_name!r}: the model has {', '.join(map(repr, configs))}")
    config = configs.get(adapter_name)
    state = get_peft_model_state_dict(model, adapter_name=adapter_name) if config is not None else {}
    brought = model._before_adapter or {}
    for name, weight in new_weights(model).items():
        if weight.requires_grad or name in brought:
            state[name] = weight.detach()
    whole = [name for name in state if "lora_" not in name and not is_new_weight(model, name)]
    if whole:
        raise ValueError(
            f"modules_to_save holds weights of the stock model ({', '.join(whole[:SHOWN])}): an adapter has LoRA pairs "
            "and new weights only; save_pretrained saves the whole model"
        )
    if not state:
        raise ValueError(
            f"nothing to save: there is no adapter {adapter_name!r}, and no mixing, gate, convolution or norm trains"
        )
    metadata = {"format": "pt"}
    if config is not None:
        plain = {
            f"{PREFIX}.{name}": sorted(value) if isinstance(value, set) else value
            for name, value in config.to_dict().items()
        }
        metadata["lora_adapter_metadata"] = json.dumps(plain, indent=2, sort_keys=True)
    path = Path(folder) / FILE_NAME
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(
        {f"{PREFIX}.{name}": x.detach().cpu().contiguous() for name, x in state.items()}, path, metadata
    )
    return path


def load_adapter(target, source, *, adapter_name: str | None = None, hotswap: bool = False, **where) -> None:
    """Load an adapter into a pipeline or transformer: LoRA pairs, and the mixing and the like that come with them.

    Args:
        target: a pipeline whose transformer is one of ours, or such a transformer. An offloaded pipeline stays
            offloaded.
        source: folder or file of `save_adapter` or of a stock `save_lora_weights`, or its tensors by name.
        adapter_name: for `set_adapters` and the like; None: Diffusers names it.
        hotswap: put the tensors in place of those of the loaded adapter `adapter_name`, without recompilation.
        where: `weight_name`, `subfolder`, `revision`, ... as in `load_lora_weights`.

    `unload_lora_weights()` takes all of it away again, `fuse_lora()` makes it permanent. Weights and switches
    (`set_adapters`, `disable_lora`, `{"scale": s}`) reach the LoRA pairs alone. Raises ValueError (nothing
    is changed) when a weight has no place in the model.
    """
    model = transformer_of(target)
    pipeline = None if model is target else target
    model.load_lora_adapter(source, adapter_name=adapter_name, hotswap=hotswap, _pipeline=pipeline, **where)


def transformer_of(target) -> AdapterMixin:
    model = getattr(target, "transformer", target)
    if not isinstance(model, AdapterMixin):
        raise ValueError(
            f"adapters with new weights belong to MHLA models, got a {type(model).__name__}: convert it first"
        )
    return model

"""What each of our transformers adds to its stock class: other attention in chosen layers, and how weights travel."""

import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import wraps
from pathlib import Path

import torch
from diffusers import ModelMixin, TaylorSeerCacheConfig
from torch import nn

from ..attention import GridSelfAttention, MHLASelfAttention, NeutralDepthwiseMixin
from ..building import BUILDING
from ..feed_forward import GatedDepthwiseConv2d
from ..ops.backends import BACKENDS
from .adapters import AdapterMixin
from .context_parallel import ContextParallelMixin
from .model_card import CardWithImportLine
from .model_folders import check_family, check_model_folder, check_weight_files
from .options import attention_options, check_choice, check_options


class MHLAModelMixin(CardWithImportLine, AdapterMixin, ContextParallelMixin):
    """Comes before the stock class among the bases of a model whose config has the `mhla_` fields."""

    _keep_in_fp32_modules = ["mixing"]
    _cache_context_is_given = False
    # Where the layers are, and blocks per axis of the token grid when nothing else is asked for.
    _layers_in = "transformer_blocks"
    default_block_grid: tuple[int, ...] = (4, 4)

    def check_mhla_options(self, num_layers: int) -> dict:
        """The fields in the form in which they are saved; to be called before the stock model is built."""
        return check_options(self.config, num_layers, axes=len(self.default_block_grid))

    def install_attention(
        self,
        layer_class: Callable[..., nn.Module],
        mhla_class: Callable[..., MHLASelfAttention],
        softmax_class: Callable[..., GridSelfAttention],
        mhla_only: dict | None = None,
        **common,
    ) -> None:
        """Put the layers that the config asks for around the modules of the stock ones.

        Args:
            layer_class: called with a stock layer and an attention, None where the stock one stays; its
                `speed_up_feed_forward()` puts one of `feed_forward.py` in the place of the stock one.
            mhla_class, softmax_class: the attention of the listed layers, and of the others if they want softmax.
            common: arguments of both attentions. mhla_only: further ones of `mhla_class`.
        """
        config, chosen, layers = self.config, self.config.mhla_layers, getattr(self, self._layers_in)
        # The new attentions' own projections are replaced by the stock ones, so drawing them must not move
        # the seed.
        with torch.random.fork_rng(devices=[]):
            for index, stock in enumerate(layers):
                attention = None
                if chosen is None or index in chosen:
                    attention = mhla_class(**common, **attention_options(config), **(mhla_only or {}))
                elif config.mhla_other_layers == "softmax":
                    attention = softmax_class(**common)
                layers[index] = layer_class(stock, attention)
        # Without MHLA the model stays the stock one to the bit, on a GPU as well.
        if chosen is None or len(chosen) > 0 or config.mhla_other_layers == "softmax":
            for layer in layers:
                layer.speed_up_feed_forward()

    def set_mhla_backend(self, backend: str) -> None:
        """Choose the operator's backend (see `mhla_attention`) in every MHLA layer; ValueError on another name.

        "eager" and "reference" also keep feed-forwards and local convolutions from their own Triton kernels.
        """
        check_choice("backend", backend, BACKENDS)
        for module in self.modules():
            if isinstance(module, (MHLASelfAttention, GatedDepthwiseConv2d, NeutralDepthwiseMixin)):
                module.backend = backend

    # With the stock method's signature: a pipeline reads there which of its own arguments (shards, variant) to hand on.
    @wraps(ModelMixin.save_pretrained, assigned=())
    def save_pretrained(self, save_directory, *args, **kwargs) -> None:
        """Save as the stock models do; a weight shared between layers is written for each of them."""
        hooks = [
            self.register_state_dict_post_hook(hook) for hook in (drop_fused_copies, clone_shared_tensors)
        ]
        try:
            super().save_pretrained(save_directory, *args, **kwargs)
        finally:
            for hook in hooks:
                hook.remove()

    def fuse_qkv_projections(self) -> None:
        """Compute queries, keys and values of each self-attention of ours by one product.

        The original weights become views of the products' ones: the same memory, and what changes the values of one
        in place changes the other. A LoRA that is added later is not part of the products: fuse it before. Saving
        writes the original weights. Fuse on the device that the model runs on: moving it parts them, into two copies.
        """
        ours = [module for module in self.modules() if isinstance(module, GridSelfAttention)]
        parts = [part for module in ours for part in (module.to_q, module.to_k, module.to_v)]
        # Quantised layers are subclasses of the plain one, or keep their weights as another kind of tensor.
        if any(type(part) is not nn.Linear or type(part.weight) is not nn.Parameter for part in parts):
            raise ValueError(
                "fuse_qkv_projections() joins plain linear layers: fuse_lora() and unload_lora() first, and quantise "
                "afterwards"
            )
        for module in ours:
            module.fuse_projections(fuse=True)
            share_memory(module.to_qkv, (module.to_q, module.to_k, module.to_v))

    def unfuse_qkv_projections(self) -> None:
        """Back to three products."""
        for module in self.modules():
            if isinstance(module, GridSelfAttention) and module.fused_projections:
                module.fused_projections = False
                del module.to_qkv

    def enable_cache(self, config) -> None:
        """As in Diffusers; TaylorSeer caches the attentions where its config names no modules."""
        if (
            isinstance(config, TaylorSeerCacheConfig)
            and not config.use_lite_mode
            and not config.cache_identifiers
        ):
            # Its own default matches modules called `attn`, which no layer here has: it would do nothing.
            config = replace(config, cache_identifiers=[rf"{self._layers_in}\.\d+\.attn\d"])
        super().enable_cache(config)

    @contextmanager
    def cache_context(self, name: str, **kwargs):
        """As in Diffusers: which denoising call the ones inside belong to, for the caches."""
        self._cache_context_is_given = True
        try:
            with super().cache_context(name, **kwargs):
                yield
        finally:
            self._cache_context_is_given = False

    def own_cache_context(self) -> AbstractContextManager:
        """A name for the call where a pipeline gives none, as it makes one a step, and a cache wants one."""
        unnamed = self.is_cache_enabled and not self._cache_context_is_given
        return self.cache_context("step") if unnamed else nullcontext()

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, **kwargs):
        """As in Diffusers, by one thread at a time; a damaged file or index raises a one-line ValueError."""
        if kwargs.get("low_cpu_mem_usage") is False and kwargs.get("device_map") is None:
            # Stock models load with it. Diffusers refuses it where some weights stay in float32, as the mixing does;
            # without it the same weights are loaded by another way.
            del kwargs["low_cpu_mem_usage"]
        try:
            with BUILDING:
                return super().from_pretrained(pretrained_model_name_or_path, **kwargs)
        except (OSError, RuntimeError, LookupError, TypeError, AttributeError):
            # Diffusers does not say what is wrong with a file, and fails anyhow on an index that is none.
            folder = Path(pretrained_model_name_or_path, kwargs.get("subfolder") or "")
            check_weight_files(folder, kwargs.get("variant"))
            raise

    @classmethod
    def load_config(cls, pretrained_model_name_or_path, *args, **kwargs):
        # Diffusers would only say that there is no config.json, or that it is no JSON.
        check_model_folder(pretrained_model_name_or_path, kwargs.get("subfolder"), cls.__name__)
        return super().load_config(pretrained_model_name_or_path, *args, **kwargs)

    @classmethod
    def from_single_file(cls, pretrained_model_link_or_path_or_dict=None, **kwargs):
        """A model with the weights of one file on the disk, checked as `mhla convert` does, without writing a folder.

        Args:
            pretrained_model_link_or_path_or_dict: path of a `.safetensors` file or a pickled checkpoint, in an original
                layout (see docs/checkpoints.md), or in Diffusers' with its `config`. A pickle is never run.
            config, subfolder: folder or file of the config.json of weights in Diffusers' layout, or a dict with
                arguments of the model that an original file does not tell, such as `{"num_attention_heads": 16}`.
            torch_dtype: of the weights (default: float32); the mixing stays float32.
            weights: which entry of a training checkpoint to take; None: the average where there is one.
            kwargs: `mhla_` options for the weights of a stock model; `mhla_block_grid` is free for our own as well.

        Raises ValueError (one line) on anything amiss: no such file, code in it, keys without a place or missing.
        """
        from .single_file import load_single_file  # which needs all of our classes, and they need this one

        return load_single_file(cls, pretrained_model_link_or_path_or_dict, **kwargs)

    def initialise_new_weights(self, keys: list[str], device: torch.device | str | None = None) -> list[str]:
        """Give each named weight that the stock model lacks its documented start; returns the other keys.

        Weights still on the meta device are put on `device`, or else on that of the same layer's projections.
        """
        wanted = set(keys)
        for prefix, attention in self.named_modules():
            if not isinstance(attention, GridSelfAttention):
                continue
            beside = attention.to_q.weight
            for name, module in attention.new_modules():
                found = {f"{prefix}.{name}.{weight}" for weight, _ in module.named_parameters()} & wanted
                if not found:
                    continue
                if any(weight.is_meta for weight in module.parameters()):
                    module.to_empty(device=device or beside.device)
                    if beside.is_floating_point() and name != "mixing":
                        module.to(beside.dtype)
                module.reset_parameters()
                wanted -= found
        return [key for key in keys if key in wanted]

    @classmethod
    def extract_init_dict(cls, config_dict, **kwargs):
        check_family(config_dict, cls)
        # Diffusers drops what a config holds too much with a log line: a mistyped option would go unnoticed.
        known = cls._get_init_keys(cls)
        unknown = [
            name for name in {**config_dict, **kwargs} if name.startswith("mhla_") and name not in known
        ]
        if unknown:
            options = ", ".join(sorted(name for name in known if name.startswith("mhla_")))
            raise ValueError(f"{cls.__name__} has no option {unknown[0]!r}: choose among {options}")
        return super().extract_init_dict(config_dict, **kwargs)

    @classmethod
    def _load_pretrained_model(cls, model, *args, **kwargs):
        # `from_pretrained` leaves what the checkpoint lacks on the meta device: loading a stock model would
        # give mixing matrices without values. This is where they get their documented start.
        try:
            loaded = super()._load_pretrained_model(model, *args, **kwargs)
        except (ValueError, RuntimeError) as error:
            found = re.search(
                r"mixing\.weight expected shape .*?(\[[\d, ]+\]).*?got .*?(\[[\d, ]+\])", str(error)
            )
            if found is None:
                raise
            raise ValueError(
                f"the checkpoint's mixing matrices have the shape {found[2]}, mhla_block_grid="
                f"{list(model.config.mhla_block_grid)} and the like want {found[1]}: `mhla convert FOLDER OUT "
                "--block-grid ...` interpolates them"
            ) from None
        missing, unexpected = loaded[1], loaded[2]
        if any(".base_layer." in key or ".lora_" in key for key in unexpected):
            raise ValueError(
                "the checkpoint was saved while adapters were attached, whose weights have no place in it: save the "
                "model after fuse_lora() and unload_lora(), and adapters with save_adapter()"
            )
        if unexpected:  # Diffusers drops them with a log line, and the model then draws something else
            raise ValueError(
                f"the checkpoint holds {len(unexpected)} weights that this {cls.__name__} configuration has no place "
                f"for ({', '.join(sorted(unexpected)[:3])}, ...): load it with the config.json that it was saved with"
            )
        lost = loaded[0].initialise_new_weights(missing)
        if "disk" not in (kwargs.get("device_map") or {}).values():
            # Of shards, Diffusers believes the index: what it lists and no shard holds is still without values.
            lost += [
                name for name, weight in loaded[0].named_parameters() if weight.is_meta and name not in lost
            ]
        if lost:
            raise ValueError(
                f"the checkpoint lacks {len(lost)} of the model's weights ({', '.join(sorted(lost)[:3])}, "
                f"...): it does not belong to this {cls.__name__} configuration"
            )
        return loaded


def share_memory(joined: nn.Linear, parts: Sequence[nn.Linear]) -> None:
    """Weights and biases of the parts become views of those of the layer that joins their outputs."""
    sizes = [part.out_features for part in parts]
    for name in ("weight", "bias"):
        if getattr(joined, name) is None:
            continue
        views = getattr(joined, name).data.split(sizes)
        for part, view in zip(parts, views, strict=True):
            getattr(part, name).data = view


def drop_fused_copies(module: nn.Module, state_dict: dict, prefix: str, local_metadata: dict) -> None:
    """State-dict hook: what `fuse_qkv_projections` joined stands there under the original keys as well."""
    for key in [key for key in state_dict if ".to_qkv." in key]:
        del state_dict[key]


def clone_shared_tensors(module: nn.Module, state_dict: dict, prefix: str, local_metadata: dict) -> None:
    """State-dict hook: safetensors refuses two keys on one memory, so every further one becomes a copy."""
    seen = set()
    for key, tensor in state_dict.items():
        if not isinstance(tensor, torch.Tensor) or tensor.is_meta:
            continue
        memory = (tensor.device, tensor.untyped_storage().data_ptr())
        if memory in seen:
            state_dict[key] = tensor.clone()
        seen.add(memory)

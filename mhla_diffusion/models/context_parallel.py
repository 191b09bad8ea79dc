"""Diffusers' parallel configuration for our models: checks before anything is changed, and processes without a GPU."""

import math
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from diffusers import FirstBlockCacheConfig, MagCacheConfig, SeaCacheConfig
from diffusers.models._modeling_parallel import (
    ContextParallelConfig,
    ParallelConfig,
    TensorParallelConfig,
    gather_size_by_comm,
)
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry
from torch.distributed.device_mesh import init_device_mesh

from ..attention import MHLASelfAttention
from ..wan_attention import processes_of

OUTPUT = "proj_out"  # behind it every process has all tokens again


class ContextParallelMixin:
    """`enable_parallelism` of a model whose layers may be MHLA; comes before Diffusers' `ModelMixin`."""

    _why_no_context_parallelism = "its token axis has no plan of how to split it"

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, **kwargs):
        """As in Diffusers; a `ContextParallelConfig` as `parallel_config` serves as it does in `enable_parallelism`."""
        if isinstance(kwargs.get("parallel_config"), ContextParallelConfig):
            # Diffusers reads a field of it that only the outer kind of configuration has.
            kwargs["parallel_config"] = ParallelConfig(context_parallel_config=kwargs["parallel_config"])
        return super().from_pretrained(pretrained_model_name_or_path, **kwargs)

    def enable_parallelism(self, *, config, cp_plan=None) -> None:
        """As in Diffusers: spread the tokens of each call over the processes of `torch.distributed`.

        MHLA layers sum their blocks' summaries over all processes of the configuration, be it ring or Ulysses; softmax
        layers use what it names. Numbers of tokens that the processes do not divide need `ring_anything` or
        `ulysses_anything`.

        Raises ValueError on a model or configuration that cannot be spread; the model is unchanged then.
        """
        context = config if isinstance(config, ContextParallelConfig) else None
        context = getattr(config, "context_parallel_config", context)
        if context is not None:
            self.check_context_parallel(context)
            self.check_cache_of_processes(getattr(self, "_cache_config", None))
        elif isinstance(config, TensorParallelConfig) or getattr(config, "tensor_parallel_config", None):
            raise ValueError(
                f"{type(self).__name__} is not split by heads: give a ContextParallelConfig, which splits the tokens"
            )
        own_gather = context is not None and cp_plan is None and context_is_ragged(context)
        if own_gather:
            cp_plan = {name: plan for name, plan in self._cp_plan.items() if name != OUTPUT}
        super().enable_parallelism(config=config, cp_plan=cp_plan)
        if own_gather:
            gather = Gather(context._flattened_mesh.get_group())
            self.get_submodule(OUTPUT).register_forward_hook(gather)

    def check_context_parallel(self, context: ContextParallelConfig) -> None:
        if self._cp_plan is None:
            raise ValueError(
                f"{type(self).__name__} cannot be spread over processes: {self._why_no_context_parallelism}"
            )
        if any(isinstance(m, MHLASelfAttention) and m.normalizer == "official" for m in self.modules()):
            raise ValueError(
                "mhla_normalizer='official' cannot be spread over processes, it sums over single queries of other "
                "blocks: convert with the normalizer 'paper' or 'none'"
            )
        heads, degree = self.config.num_attention_heads, context.ulysses_degree
        layers = getattr(self, self._layers_in)
        softmax = [i for i, layer in enumerate(layers) if not isinstance(layer.attn1, MHLASelfAttention)]
        # Uneven numbers of heads are filled up to even ones, with less than one process's share.
        fits = heads % degree == 0 or (context.ulysses_anything and -heads % degree < -(-heads // degree))
        if softmax and not fits:
            raise ValueError(
                f"{degree} processes cannot share the {heads} heads of the softmax layers ({softmax[0]}, ...) by "
                f"ulysses_degree={degree}: give ring_degree={degree} instead"
            )
        if softmax and context.ring_degree > 1 and chosen_backend(layers[softmax[0]].attn1) == "native":
            raise ValueError(
                f"PyTorch's choice of kernel ('native') in the softmax layers ({softmax[0]}, ...) takes no part in a "
                "ring: call set_attention_backend('_native_cudnn') before this, which needs a GPU, or give "
                f"ulysses_degree={context.ring_degree} instead"
            )

    def check_cache_of_processes(self, config) -> None:
        """Raise ValueError on a cache whose decision is taken from each process's own tokens.

        Where one process skips the layers and another does not, that one waits for ever in their first sum.
        """
        if isinstance(config, FirstBlockCacheConfig):
            raise ValueError(
                "First-Block Cache decides from the tokens that a process has, and processes that decide differently "
                "wait for each other for ever: use MagCacheConfig, TaylorSeerCacheConfig or "
                "PyramidAttentionBroadcastConfig, which go by the step"
            )

    def enable_cache(self, config) -> None:
        """As in Diffusers, before `enable_parallelism` where a cache stands around whole layers.

        Raises ValueError on a cache that does not work over several processes.
        """
        if processes_of(self._parallel_config) is not None:
            self.check_cache_of_processes(config)
            if isinstance(config, (MagCacheConfig, SeaCacheConfig)):
                raise ValueError(
                    f"{type(config).__name__} would see the tokens before they are spread over the processes: call "
                    "enable_cache() before enable_parallelism()"
                )
        super().enable_cache(config)

    def _resolve_parallel_config(self, config):
        # Diffusers takes the process's device from the number of accelerators, which is 0 without one.
        if torch.accelerator.is_available() or not dist.is_initialized():
            return super()._resolve_parallel_config(config)
        if isinstance(config, ContextParallelConfig):
            config = ParallelConfig(context_parallel_config=config)
        context = config.context_parallel_config
        mesh = context.mesh or init_device_mesh(
            "cpu", context.mesh_shape, mesh_dim_names=context.mesh_dim_names
        )
        rank, ranks = dist.get_rank(), dist.get_world_size()
        config.setup(rank, ranks, torch.device("cpu"), mesh=mesh)
        self._parallel_config = config
        return config

    def local_timestep(self, latents: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
        """Of timesteps `(B, N)`, those of this process's tokens; any other are handed on.

        To be called with the latents before the stock forward pass. Raises ValueError on a number of tokens that the
        configuration does not split, where Diffusers would stop with a bare assertion.
        """
        share = processes_of(self._parallel_config)
        if share is None:
            return timestep
        tokens = math.prod(latents.shape[2:]) // math.prod(self.config.patch_size)
        if tokens < share.ranks:
            raise ValueError(f"{tokens} tokens for {share.ranks} processes: use at most {tokens} of them")
        if tokens % share.ranks and not context_is_ragged(self._parallel_config.context_parallel_config):
            raise ValueError(
                f"{tokens} tokens do not divide among {share.ranks} processes: give ContextParallelConfig("
                f"ulysses_degree={share.ranks}, ulysses_anything=True), or ring_degree and ring_anything"
            )
        start, stop = share.span(tokens)
        return timestep[:, start:stop] if timestep.ndim == 2 and timestep.shape[1] == tokens else timestep


def chosen_backend(attention: torch.nn.Module) -> str:
    """Name of the backend that a softmax attention uses: its own, or the one that is active for all."""
    own = attention.processor._attention_backend
    return AttentionBackendName(own or _AttentionBackendRegistry.get_active_backend()[0]).value


def context_is_ragged(context: ContextParallelConfig) -> bool:
    """Whether processes may have different numbers of tokens."""
    return context.ulysses_anything or context.ring_anything


class Gather(NamedTuple):
    """Forward hook: all processes' tokens `(B, N, C)` of outputs `(B, n, C)` with different n.

    Diffusers' own gathers pieces of different sizes, which gloo does not.
    """

    group: "dist.ProcessGroup"

    def __call__(self, module: torch.nn.Module, args: tuple, output: torch.Tensor) -> torch.Tensor:
        return _Gathered.apply(output, gather_size_by_comm(output.shape[1], self.group), self.group)


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor, sizes: list[int], group) -> torch.Tensor:
        ctx.sizes, ctx.rank = sizes, dist.get_rank(group)
        padded = F.pad(x, (0, 0, 0, max(sizes) - x.shape[1])).contiguous()
        pieces = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(pieces, padded, group=group)
        return torch.cat([piece[:, :size] for piece, size in zip(pieces, sizes, strict=True)], dim=1)

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        return grad.split(ctx.sizes, dim=1)[ctx.rank], None, None

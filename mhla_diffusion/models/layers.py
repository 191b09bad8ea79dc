"""What the layers of all our models have in common."""

from diffusers.hooks._helpers import TransformerBlockMetadata, TransformerBlockRegistry
from torch import nn

__all__ = ["known_to_caches"]


def known_to_caches(layer: type[nn.Module]) -> type[nn.Module]:
    """Class decorator of a layer that takes the hidden states and returns them.

    Block caches (FirstBlockCache and the like) find a layer's inputs and outputs by its exact class.
    """
    TransformerBlockRegistry.register(
        layer, TransformerBlockMetadata(return_hidden_states_index=0, return_encoder_hidden_states_index=None)
    )
    return layer

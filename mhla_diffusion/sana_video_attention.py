"""The self-attention modules that are put into SANA-Video, whose stock attention is linear already.

They are Wan's: features rotated in the numerator only, which is what stock SANA-Video computes, too. The norms of
queries and keys may be missing there, and the projections have no bias.
"""

from .wan_attention import (
    MHLAWanAttention,
    MHLAWanAttnProcessor,
    SoftmaxWanAttention,
    SoftmaxWanAttnProcessor,
)

# The norms of queries and keys that stock SANA-Video can have and that the operator knows.
QK_NORMS = ("rms_norm_across_heads", None)
MODEL_NAME = "MHLASanaVideoTransformer3DModel"


class MHLASanaVideoAttnProcessor(MHLAWanAttnProcessor):
    """Runs `mhla_attention` on the weights of an `MHLASanaVideoAttention`; holds nothing itself."""


class MHLASanaVideoAttention(MHLAWanAttention):
    """MHLA (arXiv 2601.07832) in SANA-Video's self-attention slot.

    With one block and the numerics of a converted model this is stock SANA-Video's attention: ReLU features, rotated
    in the numerator only, divided by the mass without rotation.
    """

    _processor_class = MHLASanaVideoAttnProcessor
    _model_name = MODEL_NAME


class SoftmaxSanaVideoAttnProcessor(SoftmaxWanAttnProcessor):
    """Softmax attention of rotated queries and keys, for comparisons; holds no weights."""


class SoftmaxSanaVideoAttention(SoftmaxWanAttention):
    """Softmax attention in SANA-Video's self-attention slot: the comparison partner of `MHLASanaVideoAttention`."""

    _processor_class = SoftmaxSanaVideoAttnProcessor
    _model_name = MODEL_NAME

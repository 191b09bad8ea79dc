"""Transformers whose self-attention is MHLA, as subclasses of the stock Diffusers models."""

"""Subclasses of the stock Diffusers pipelines, only where they add behaviour."""

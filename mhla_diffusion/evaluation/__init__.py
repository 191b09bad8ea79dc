"""Measuring what the pipelines make: features, scores and speed. Heavy dependencies load where they are used."""

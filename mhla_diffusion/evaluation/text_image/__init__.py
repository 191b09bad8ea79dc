"""Scores of pictures against the captions they were drawn from."""

"""Scores of pictures of emoji whose captions say colour, number and place, read from the pixels."""

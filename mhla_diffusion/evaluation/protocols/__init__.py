"""Protocols: files that say what is scored, against what, by which scorers, so that numbers can be repeated."""

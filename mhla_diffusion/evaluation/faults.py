"""What an evaluation refuses, each with the exit status that the command line gives."""


class MissingWeights(ValueError):
    """A network's weights were found in none of the places; nothing was downloaded."""

    exit_status = 3


class InsufficientSamples(ValueError):
    """Fewer samples than the number is defined for."""

    exit_status = 2


class ReferenceMismatch(ValueError):
    """Two sets, or a set and its reference, cannot be compared: another network, size, resize or protocol."""

    exit_status = 2

import sys

from mhla_diffusion.provenance import versions


def test_a_distribution_that_is_missing_is_said_to_be():
    assert versions(("no-such-distribution",)) == {
        "python": sys.version.split()[0],
        "no-such-distribution": None,
    }

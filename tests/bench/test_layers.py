"""The benchmark of layers covers `nn`."""

from benchmarks import layers


def test_every_layer_with_a_twin_has_a_row() -> None:
    """Except for the container of others."""
    assert layers.twins() - {case.name for case in layers.CASES} == {"Sequential"}

"""The axis names."""

from goose_strategy.mesh.axis import MeshAxis


def test_members_are_plain_strings():
    assert [f"{axis}" for axis in MeshAxis] == ["pp", "dp", "tp"]
    assert MeshAxis("tp") is MeshAxis.TP

"""The check that rooms talk through doors (`nox -s lint` runs it) finds what it should."""

from tests.doors import trespasses


def test_private_modules_and_names_are_told_from_public_ones():
    assert trespasses("from maxlib.nn._linear import Einsum", "plan") == ["line 1: maxlib.nn._linear.Einsum"]
    assert trespasses("from maxlib.nn import _linear", "plan") == ["line 1: maxlib.nn._linear"]
    assert trespasses("import maxlib.nn._linear", "plan") == ["line 1: maxlib.nn._linear"]
    assert not trespasses("from maxlib.nn._linear import Einsum\nfrom maxlib._utils.paths import dotted", "nn")
    assert not trespasses("from maxlib.nn import Einsum\nfrom maxlib.nn.router import Router", "plan")

"""Models of transformers, saved once for all tests of a worker."""

import functools

import pytest


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """A function of the name of a family, which returns a `Tiny`."""
    from loaders.tiny_models import Tiny

    return functools.cache(lambda family: Tiny(family, tmp_path_factory.mktemp(family)))

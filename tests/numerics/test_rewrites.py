import pytest
from rewrites import CONTEXTS, faults


@pytest.mark.parametrize("context", CONTEXTS, ids=lambda context: context.__name__)
def test_exact(context):
    assert not faults(context)

"""What the oldest transformers allowed gets wrong by itself, so that a compressed cache can be held against nothing."""

import pytest
import transformers
from packaging.version import Version

IS_OLDEST = Version(transformers.__version__) < Version("5.18")


def skip_what_it_gets_wrong(what: str) -> None:
    """Skip the running test on the oldest version, which gets `what` wrong with its own caches, too."""
    if IS_OLDEST:
        pytest.skip(f"transformers {transformers.__version__} gets {what} wrong with its own caches, too")

"""What older releases do otherwise, so that tests expect of each what it can do."""

from __future__ import annotations

from contextlib import AbstractContextManager
from importlib.metadata import version
from typing import Any

import lightning as L
import pytest
from packaging.version import Version


def before(release: str, package: str = "lightning") -> bool:
    """Whether an older release than this one is installed; of Lightning, the one that imports."""
    installed = L.__version__ if package == "lightning" else version(package)
    return Version(installed) < Version(release)


#: Batches that Lightning trains again after a resume from a checkpoint of ModelCheckpoint.
REPEATED = int(before("2.5"))

needs_model_parallel = pytest.mark.skipif(
    before("2.3"), reason="Lightning has no ModelParallelStrategy before 2.3"
)


def interrupted() -> AbstractContextManager[Any]:
    """What Ctrl+C does to a training: it exits, or before Lightning 2.4 returns with a warning."""
    if before("2.4"):
        return pytest.warns(UserWarning, match="Detected KeyboardInterrupt")
    return pytest.raises(SystemExit)

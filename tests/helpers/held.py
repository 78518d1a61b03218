"""A trial within this process, whose end is that of the fit alone."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any, NoReturn

import pytest
from torch.utils.data import BatchSampler, DataLoader

from helpers.small import trainer
from lightning_perf.trials import compat
from lightning_perf.trials.changes import Change
from lightning_perf.trials.trial import Spec, Trial


class Ended(Exception):
    """Instead of the end of the process."""


class Held(Trial):
    """Ends the fit alone."""

    def __init__(self, folder: Path, *changes: Change, **fields: Any) -> None:
        made = [[type(each).__name__, each.value] for each in changes]
        defaults = {"changes": made, "keeps": [], "warm_up": 4, "batches": 8}
        super().__init__(Spec(str(folder), str(folder), **(defaults | fields)))

    def _end(self, trainer: Any, error: BaseException | None = None) -> NoReturn:
        if not isinstance(error, Ended):
            self.result = {"error": self._reason(error)} if error else dict(self._result(trainer))
        raise Ended

    def fit(self, folder: Path, module: Any, *data: Any, **options: Any) -> dict[str, Any]:
        """The result of a fit."""
        made = trainer(folder, self, **({"max_epochs": 50} | options))
        self._isolate(made)
        with pytest.MonkeyPatch.context() as patched:
            own = {type(each.batch_sampler) for each in data if isinstance(each, DataLoader)}
            for kind in {BatchSampler, compat.Batches, *own} - {list, deque, type(None)}:
                patched.setattr(kind, "__iter__", kind.__iter__)  # which the trial changes
            with pytest.raises(Ended):
                self._fit(made.fit, made, module, *data)
        return self.result

"""A trial within this process: what it records of a fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NoReturn

import pytest
from helpers.small import Small, trainer

from lightning_perf.trials.changes import Change, LargerBatch
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
        self.result = dict(self._result(trainer))
        raise error or Ended

    def fit(self, folder: Path, module: Any, *data: Any, **options: Any) -> dict[str, Any]:
        """The result of a fit."""
        made = trainer(folder, self, max_epochs=50, **options)
        with pytest.raises(Ended):
            made.fit(self._prepare(made, module), *data)
        return self.result


def test_losses_of_accumulated_batches_are_whole(tmp_path: Path) -> None:
    """Lightning divides them; before the first step their mean is the loss of the larger batch."""
    base = Held(tmp_path).fit(tmp_path, Small(), accumulate_grad_batches=4)
    larger = LargerBatch({"batch_size": 16, "accumulate_grad_batches": 1})
    ours = Held(tmp_path, larger).fit(tmp_path, Small(), accumulate_grad_batches=4)
    four = [float(each) for each in base["losses"][:4]]
    assert sum(four) / 4 == pytest.approx(float(ours["losses"][0]))

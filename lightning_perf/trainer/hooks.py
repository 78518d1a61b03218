"""Lightning's stage hooks, written once and folded into a few verbs."""

from __future__ import annotations

import inspect
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Callback

from lightning_perf.errors import ConfigError, RecorderBusy, warn, without_credentials
from lightning_perf.trainer.driver import Driver
from lightning_perf.trainer.folding import fold
from lightning_perf.trainer.verbs import Verbs

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

    from lightning_perf.trainer.progress import Progress

#: Errors of set-up that the user can mend: these stop the run before it starts.
_FOR_THE_USER = (ConfigError, RecorderBusy, FileExistsError)
#: Lightning's hooks of every batch that no verb needs.
_UNUSED = (
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
)
#: What Lightning puts on each callback of a run: methods of the module, which has the Trainer.
_ATTACHED = ("log", "log_dict")


class PerfCallback(Verbs, Callback):
    """The base of our callbacks: override the verbs, never Lightning's hooks.

    The sanity check of validation is no stage. A verb that raises switches this callback off,
    with one warning, and training goes on.
    """

    #: Whether ``due`` is asked.
    reports = False
    #: Whether checkpoints carry the run's progress in this callback's state.
    keeps_progress = True

    def __init__(self) -> None:
        self._driver: Driver | None = None
        self._progress: Progress | None = None
        self._given_up = False
        #: Whether a Suite hosts this, which hears Lightning in its place.
        self._hosted = False
        self._settled = False
        # Those of its parts that have something to do before and after each batch.
        self._early: list[PerfCallback] = []
        self._late: list[PerfCallback] = []
        self._spared: list[str] = []

    @cached_property
    def state_key(self) -> str:
        """One key per kind of callback, from the first set-up on.

        Before that it is this object's alone: for two of a kind, which cannot both keep state,
        Lightning's constructor would raise an error that does not say what to do. Cached, since
        Lightning asks for it at every hook.
        """
        return self.kind if self._settled else f"{self.kind} {id(self)}"

    @property
    def kind(self) -> str:
        """The key of this kind of callback in checkpoints."""
        return f"lightning_perf.{type(self).__name__}"

    @property
    def parts(self) -> list[PerfCallback]:
        """The callbacks that this is, or hosts."""
        return [self]

    # -- dispatch ---------------------------------------------------------------------------------

    def call(self, verb: str, *args: Any, teach: bool = False) -> Any:
        """Call a verb so that no failure of ours reaches training.

        Args:
            verb: The method's name.
            *args: Its arguments.
            teach: Whether errors that the user can mend are raised all the same.

        Returns:
            What it returns; None if it failed, or this callback has given up.
        """
        if self._given_up:
            return None
        try:
            return getattr(self, verb)(*args)
        except Exception as error:
            if teach and isinstance(error, _FOR_THE_USER):
                raise
            self._give_up(verb, error)
            return None

    def _give_up(self, verb: str, error: Exception) -> None:
        self._given_up = True
        # Warnings that the user turned into errors must not stop training either.
        theirs = isinstance(error, OSError | ConfigError)
        ours = "" if theirs else " Please report this."
        with suppress(Exception):
            warn(
                f"{type(self).__name__} is off for the rest of this run: {verb} failed "
                f"({type(error).__name__}: {error}). Training goes on.{ours}"
            )
        with suppress(Exception):
            if self._driver is not None and verb != "close":
                self.close(self._driver, "failure")

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Join the trainer's driver."""
        if self._hosted:
            return
        if self._driver is not None:
            if self._driver.trainer is trainer:
                self._driver.abandon()  # nobody told of the end of its last run
            else:
                warn(
                    f"this {type(self).__name__} leaves the Trainer that it watched for another "
                    "one: give each Trainer a callback of its own."
                )
            self.leave("teardown")
        self.settle_key()
        driver = Driver.join(trainer, pl_module, self)
        self.enlist(driver)
        self._spare(*_UNUSED)
        driver.describe(self.settings())

    def settle_key(self) -> None:
        """Take the key of this kind, under which checkpoints have its state."""
        self._settled = True
        vars(self).pop("state_key", None)

    def enlist(self, driver: Driver) -> None:
        """Get ready for a run; errors that the user can mend are raised."""
        self._driver, self._progress, self._given_up = driver, driver.progress, False
        self.call("prepare", driver, teach=True)

    def busy(self, verb: str) -> bool:
        """Whether it has anything to do at a verb of every batch."""
        return getattr(type(self), verb) is not getattr(Verbs, verb)

    def discharge(self) -> None:
        """Know the run no more, nor the module that Lightning made it log by."""
        self._driver, self._hosted = None, False
        for name in (*self._spared, *_ATTACHED):
            vars(self).pop(name, None)
        self._spared.clear()

    def _spare(self, *hooks: str) -> None:
        """Have Lightning pass over hooks: it does so with what is not callable.

        On the object, so that a subclass may have them and call super(). That is most of what a
        callback costs a batch.
        """
        for hook in hooks:
            if getattr(getattr(self, hook), "__func__", None) is getattr(PerfCallback, hook):
                setattr(self, hook, None)
                self._spared.append(hook)

    def __getstate__(self) -> dict[str, Any]:
        # A run is a process's own: spawned processes and copies join theirs.
        left_out = {*self._spared, *_ATTACHED, "state_key"}
        own = {name: value for name, value in vars(self).items() if name not in left_out}
        none = {"_driver": None, "_progress": None, "_hosted": False, "_settled": False}
        return {**own, **none, "_early": [], "_late": [], "_spared": []}

    def settings(self) -> dict[str, object]:
        """The arguments that this was made with, for the run's params."""
        name = type(self).__name__
        arguments = list(inspect.signature(type(self).__init__).parameters)[1:]
        given = {key: getattr(self, key) for key in arguments if hasattr(self, key)}
        return {f"{name}/{key}": _readable(value) for key, value in given.items()}

    def state_dict(self) -> dict[str, Any]:
        """The run's progress, for callbacks that measure; plain values only."""
        if not self.keeps_progress or self._progress is None:
            return {}
        return {"progress": self._progress.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up the progress of the run that is resumed."""
        if self._driver is not None and "progress" in state_dict:
            self._driver.resume(state_dict["progress"])

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Leave it."""
        self.leave("teardown")

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Leave it; the user's exception goes on."""
        self.leave("exception")

    def leave(self, reason: str) -> None:
        """Close, and leave the trainer's driver; harmless without one.

        Args:
            reason: As for ``close``.
        """
        driver = self._driver
        if self._hosted:
            return
        if driver is None:
            self.discharge()  # it has not got so far, but Lightning has put its methods here
            return
        self.call("close", driver, reason)
        self.discharge()
        try:
            driver.leave(self, reason)
        except Exception as error:
            self._give_up("leave", error)

    def _begin(self, stage: str, word: str) -> None:
        driver = self._driver
        if driver is None or self._hosted:
            return
        leads, last = driver.members[0] is self, driver.members[-1] is self
        if leads:
            self._drive("enter", stage)
        self._early = [part for part in self.parts if part.busy("before_batch")]
        self._late = [part for part in self.parts if part.busy("after_batch")]
        if not self._early:
            self._spare(f"on_{word}_batch_start")
        if not (self._late or leads or last):
            self._spare(f"on_{word}_batch_end")
        # Before the first batch a user can still be told; within training no more.
        self.call("on_start", driver, teach=not driver.nested)

    def _end(self, stage: str) -> None:
        driver = self._driver
        if driver is None or driver.stage != stage or self._hosted:
            return
        self.call("on_end", driver)
        if driver.members[-1] is self:
            self._drive("report", True)
            self._drive("exit")

    def _drive(self, verb: str, *args: Any) -> None:
        """Move the shared driver on."""
        try:
            getattr(self._driver, verb)(*args)
        except Exception as error:
            self._all_give_up(verb, error)

    def _all_give_up(self, verb: str, error: Exception) -> None:
        """What all share has failed: none of us can go on."""
        assert self._driver is not None  # the hooks look first
        for member in list(self._driver.members):
            if isinstance(member, PerfCallback) and not member._given_up:
                member._give_up(verb, error)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Count the epoch."""
        driver = self._driver
        if driver is not None and driver.stage == "train" and driver.members[0] is self:
            self._drive("end_epoch")


def _readable(value: object) -> object:
    """A function by its name, whose address differs from run to run; a URL without passwords."""
    if isinstance(value, str):
        return without_credentials(value)
    return getattr(value, "__qualname__", value) if callable(value) else value


fold(PerfCallback)

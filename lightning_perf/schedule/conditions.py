"""Schedules by rank, stage and MLflow run tag."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_perf import checks
from lightning_perf.errors import ConfigError, warn
from lightning_perf.schedule.base import FOREVER, Composed, Context, Schedule, as_schedule

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping

    from lightning_perf.core.progress import Moment


class _Constant(Schedule):
    """Base of schedules that give every batch of a stage the same answer."""

    def quiet_until(self, moment: Moment) -> int:  # noqa: ARG002
        """Return `FOREVER`."""
        return FOREVER


class _Ranks(_Constant):
    """Base of schedules by rank."""

    #: The rank and the number of ranks, as attributes of `Ranks`, and what is numbered.
    _rank, _size, _what = "global_rank", "world_size", "processes in the run"

    def __init__(self, ranks: list[int] | int) -> None:
        self.ranks = checks.rank_list("ranks", ranks)

    def setup(self, context: Context) -> None:
        """Warn of ranks that the run does not have: it may have more when it is started again."""
        size = getattr(context.ranks, self._size)
        if max(self.ranks) >= size and context.ranks.global_rank == 0:
            warn(f"{self!r} includes ranks that do not exist: there are {size} {self._what}.")

    def window(self, moment: Moment) -> Hashable | None:
        """Return the single window."""
        return 0 if getattr(moment.ranks, self._rank) in self.ranks else None


class GlobalRank(_Ranks):
    """True on the given ranks of the run.

    Args:
        ranks: One or more global ranks, from 0.

    Raises:
        ConfigError: If no rank is given.

    Example:
        >>> from lightning_perf.schedule import Every
        >>> schedule = Every("100ba") & GlobalRank([0, 8])
    """


class LocalRank(_Ranks):
    """True on the given ranks of each node.

    Args:
        ranks: One or more local ranks, from 0.

    Raises:
        ConfigError: If no rank is given.

    Example:
        >>> from lightning_perf.schedule import Every
        >>> schedule = Every("100ba") & LocalRank(0)  # one process per node
    """

    _rank, _size, _what = "local_rank", "local_world_size", "processes on this node"


class Stages(_Constant):
    """True in the given stages.

    Args:
        stages: One or more of ``train``, ``validate``, ``test`` and ``predict``.

    Raises:
        ConfigError: If no stage is given or one is unknown.

    Example:
        >>> from lightning_perf.core.progress import Moment, Timestamp
        >>> schedule = Stages(["validate", "test"])
        >>> schedule(Moment("train", Timestamp(), Timestamp()))
        False
    """

    shared = True

    def __init__(self, stages: list[str] | str) -> None:
        self.stages = checks.stage_list("stages", stages)

    def window(self, moment: Moment) -> Hashable | None:
        """Return the stage."""
        return moment.stage if moment.stage in self.stages else None


class HasTag(Composed):
    """True where another schedule is, while the MLflow run has the given tag.

    Args:
        tag: The tag as ``key``, which matches any value, or as ``key=value``.
        schedule: The other schedule, or its string; `Always` if None.

    Raises:
        ConfigError: If the tag has no key or the schedule is not valid.

    Example:
        >>> schedule = HasTag("profile=1", schedule="every 20ba for 2ba")
    """

    def __init__(self, tag: str, schedule: Schedule | str | None = None) -> None:
        key, equals, value = tag.partition("=") if isinstance(tag, str) else ("", "", "")
        if not key:
            raise ConfigError("tag", tag, "is not a tag, expected key or key=value", '"profile=1"')
        self.tag = tag
        self.schedule = as_schedule(schedule)
        self._key, self._value = key, value if equals else None
        self._read_tags: Callable[[], Mapping[str, str]] = dict
        self._tagged = False
        super().__init__([self.schedule])

    def setup(self, context: Context) -> None:
        """Store the tag reader of the run; warn if there is none."""
        super().setup(context)
        if context.read_tags is None and context.ranks.global_rank == 0:
            warn(f"{self!r} is never true: add an MLFlowLogger to the Trainer, for its tags.")
        self.shared = False  # each rank sees a new tag at a different time
        self._read_tags, self._tagged = context.read_tags or dict, False

    def observe(self, moment: Moment) -> None:
        """Read the cached tags."""
        super().observe(moment)
        value = self._read_tags().get(self._key)
        self._tagged = value is not None and self._value in (None, value)

    def window(self, moment: Moment) -> Hashable | None:
        """Return the window of the other schedule, or None without the tag."""
        return self.schedule.window(moment) if self._tagged else None

    def quiet_until(self, moment: Moment) -> int:
        """Return what the other schedule does; its next batch if only the tag is missing."""
        if self.schedule(moment):
            return super().quiet_until(moment)
        return self.schedule.quiet_until(moment)

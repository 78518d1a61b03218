"""What runs inside the process of a trial: one change, some batches, and nothing left behind.

``lightning-perf try`` starts the user's command with an environment variable, and Lightning asks
our entry point for callbacks when it constructs a Trainer. From then on the first ``Trainer.fit``
of the process is the trial: loggers and checkpoints are moved to a temporary folder, the changes
are made, and after enough batches the result is written and the process is ended, so that no later
line of the script runs.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from functools import partial, wraps
from hashlib import blake2b
from inspect import isgeneratorfunction
from itertools import islice, pairwise
from math import lcm, prod
from pathlib import Path
from time import monotonic, perf_counter
from traceback import format_exception
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import numpy as np
import torch
from torch import Tensor

from lightning_perf.cgroup import usable_cpus
from lightning_perf.errors import describe, redacted
from lightning_perf.files import finite, read_json, write_text
from lightning_perf.flops.batch import MOST_OBJECTS, attributes, entries, shape_of, tensors
from lightning_perf.run.compat import (
    PassThroughProfiler,
    callback_class,
    loader_batch_size,
    training_queues,
    validation_loop,
)
from lightning_perf.run.context import current_run
from lightning_perf.tracking.summary import text_of
from lightning_perf.trials import compat
from lightning_perf.trials.changes import CHANGES, Seen, change_of, proposals
from lightning_perf.trials.process import RESULT, TRAINER, place_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from lightning.pytorch import Callback

    from lightning_perf.diagnosis import Verdict
else:
    Callback = callback_class()

#: Bytes of a tensor that are compared, and losses of a trial.
_COMPARED, _LOSSES = 1 << 16, 200
#: Containers and tensors in a dataset that are its state, not its data, have at most so many items.
_SMALL = 64
#: Weights that are saved, so that all trials begin with the same ones, have at most so many bytes.
_MOST_WEIGHTS = 2e9
#: Items that are read again, to learn whether they are random, and the seconds for it.
_ITEMS, _ITEM_SECONDS = 16, 10.0
#: Seconds to read the order of an epoch.
_ORDER_SECONDS = 5.0
#: An attribute of samplers, the epochs so far; and at most so many have an order of their own.
_EPOCHS, _MOST_EPOCHS = "_trial_epochs", 10_000
#: Seconds until a process ends by itself, if its parent does not end it.
_LONGEST_END = 60.0


class Spec(NamedTuple):
    """What a trial does."""

    #: For this trial alone, with its result; and for what all of them share, the first weights.
    folder: str
    shared: str
    #: Kinds and values of changes.
    changes: list[list[Any]]
    #: What it does besides training, of ``validation`` and ``checkpoint``.
    keeps: list[str]
    #: Batches before those that are timed, which are also those that are compared.
    warm_up: int
    #: Batches that are timed; None for the first run, which also diagnoses.
    batches: int | None
    #: Of the first run, timed: at least so many batches and seconds, and at most so many seconds;
    #: which are from the start in other trials.
    least: int = 60
    seconds: float = 10.0
    most_seconds: float = 180.0
    #: Of the random numbers from the first batch on.
    seed: int = 0
    #: Groups of changes that may be proposed; empty for all.
    only: tuple[str, ...] = ()


def joined(file: str) -> Trial:
    """The trial of this process."""
    trial = Trial(Spec(**read_json(Path(file))))
    Path(trial.spec.folder, TRAINER).touch()
    trial.attach()
    return trial


class Unsteady(Exception):
    """A trial has only batches that were loaded before they are timed, and would be too fast."""


class Trial(Callback):
    """Measures the first fit of a process, and ends the process.

    Args:
        spec: What to do.
    """

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.changes = [change_of(kind, value) for kind, value in spec.changes]
        self._folder = Path(spec.folder)
        self._notes: list[str] = []
        # Trainers whose outputs are moved, by their ids.
        self._isolated: set[int] = set()
        self._fits = False
        # The training's one loader; and those that are being set up.
        self._loader: Any = None
        self._loaders: list[Any] | None = None
        self._began = self._last = 0.0
        self._startup: float | None = None
        self._seconds: list[float] = []
        # Of the timed seconds, those for what a training does besides.
        self._besides = dict.fromkeys(("checkpoint", "validation"), 0.0)
        self._losses: list[Tensor] = []
        self._batches: list[str] = []
        self._weights: list[str] = []
        self._samples: list[str] = []
        # How the training's samples are put in order: the sampler, and how it is iterated over.
        self._sampler: Any = None
        self._iterate: Callable[..., Iterable[Any]] = iter
        # By sampler, the generators that it draws from after its first batch.
        self._drawn_later: dict[int, set[str]] = {}
        self._validates = False
        # The random numbers where orders began, and after the last batch; those that batches and
        # validations have drawn; and the batches before each validation.
        self._starts: list[dict[str, str]] = []
        self._random: dict[str, str] = {}
        self._drawn: dict[str, set[str]] = {"batch": set(), "validation": set()}
        self._validated: list[int] = []
        # Of the dataset at the end of an epoch; whether the training changes it before the next.
        self._state: str | None = None
        self._dataset_changes = self._restarts = False
        self._done = 0
        # Batches before those that are timed; whether none of these was loaded before.
        self._skipped: int | None = None
        self._began_empty = False
        #: The first run's own callback, which diagnoses.
        self.suite: Any = None

    @property
    def diagnoses(self) -> bool:
        """Whether this is the first run, whose verdicts decide what is tried."""
        return self.spec.batches is None

    # -- the Trainer ------------------------------------------------------------------------------

    def attach(self) -> None:
        """Wrap the functions of Lightning's Trainers, of both packages."""
        for package in compat.packages():
            for name in ("fit", "validate", "test", "predict"):
                original = getattr(package.Trainer, name)
                setattr(package.Trainer, name, self._around(original, name == "fit"))

    def _around(self, original: Callable[..., Any], fits: bool) -> Callable[..., Any]:
        @wraps(original)
        def call(trainer: Any, *args: Any, **kwargs: Any) -> Any:
            self._isolate(trainer)
            if fits and not self._fits and not compat.is_tuning(trainer):
                self._fit(partial(original, trainer), trainer, *args, **kwargs)
            return original(trainer, *args, **kwargs)

        return call

    def _fit(
        self, fit: Callable[..., Any], trainer: Any, model: Any = None, *args: Any, **kwargs: Any
    ) -> NoReturn:
        """The fit that is tried: the process ends with it."""
        self._fits = True
        write_text(self._folder / TRAINER, "in Trainer.fit")
        try:
            fit(self._prepare(trainer, model), *args, **kwargs)
        except BaseException as error:  # also SystemExit, which ends a script
            self._end(trainer, error)
        self._end(trainer)

    def _isolate(self, trainer: Any) -> None:
        """Move what a Trainer writes to the trial's folder; before it is set up."""
        if id(trainer) in self._isolated:
            return
        self._isolated.add(id(trainer))
        compat.move_root(trainer, self._folder)
        moved = [compat.moved_logger(each, self._folder) for each in trainer.loggers]
        for logger, other in zip(trainer.loggers, moved, strict=True):
            if isinstance(other, compat.Discarded):
                self._note(f"{type(logger).__name__} writes nothing in trials")
        trainer.loggers = moved
        if type(trainer.profiler).__name__ != PassThroughProfiler.__name__:
            self._note(f"{type(trainer.profiler).__name__} is off in trials")
            trainer.profiler = PassThroughProfiler()
        strategy = trainer.strategy
        strategy.save_checkpoint = partial(self._save, strategy)
        strategy.remove_checkpoint = partial(self._remove, strategy)
        self._reduce(trainer)

    def _save(self, strategy: Any, checkpoint: Any, filepath: Any, *args: Any, **opts: Any) -> None:
        file = Path(filepath)
        if self._folder not in file.parents:
            file = self._folder / file.name
        type(strategy).save_checkpoint(strategy, checkpoint, file, *args, **opts)

    def _remove(self, strategy: Any, filepath: Any) -> None:
        if self._folder in Path(filepath).parents:
            type(strategy).remove_checkpoint(strategy, filepath)

    def _reduce(self, trainer: Any) -> None:
        """Take away callbacks that write files, or read what a trial does not have."""
        trainer.callbacks = [each for each in trainer.callbacks if self._stays(each)]

    def _stays(self, callback: Any) -> bool:
        keeps, kind = self.spec.keeps, type(callback)
        if callback in (self, self.suite):
            return True
        if compat.is_a(callback, "ModelCheckpoint"):
            callback.dirpath = None  # below the Trainer's folder
            return self.diagnoses or "checkpoint" in keeps
        if compat.is_a(callback, "EarlyStopping"):
            return self.diagnoses or "validation" in keeps
        if compat.is_a(callback, "Checkpoint"):
            self._note(f"{kind.__name__} is off in trials")
            return False
        return not kind.__module__.startswith("lightning_perf.")

    def _note(self, text: str) -> None:
        if text not in self._notes:
            self._notes.append(text)

    # -- the fit ----------------------------------------------------------------------------------

    def _prepare(self, trainer: Any, model: Any) -> Any:
        """Make the changes, and give all trials the same weights and random numbers."""
        known = sorted({kind.group for kind in CHANGES})
        for name in self.spec.only:
            if name not in known:
                raise ValueError(f"--only {name} is not a group of changes: {', '.join(known)}")
        if trainer.num_nodes > 1:
            raise RuntimeError(f"trials are of one node, and this training has {trainer.num_nodes}")
        trainer.num_sanity_val_steps = 0
        if not self.diagnoses and "validation" not in self.spec.keeps:
            trainer.limit_val_batches = 0
        loop, strategy = trainer.fit_loop, trainer.strategy
        loop.setup_data = partial(self._set_up_data, loop)
        strategy.process_dataloader = partial(self._process_loader, strategy)
        strategy.batch_to_device = partial(self._transfer, strategy)
        if (validation := validation_loop(trainer)) is not None:
            validation.run = partial(self._timed, "validation", validation.run)
        trainer.save_checkpoint = partial(self._timed, "checkpoint", trainer.save_checkpoint)
        with suppress(Exception):  # such as weights that do not exist yet
            self._share_weights(trainer, getattr(model, "_orig_mod", model))
        for change in self.changes:
            model = change.apply(trainer, model)
        compat.seed_all(self.spec.seed)
        self._began = perf_counter()
        return model

    def _timed(self, name: str, call: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Call what is not training; a checkpoint within validation counts as a checkpoint."""
        self._validates |= name == "validation"
        state = self._random_states() if name == "validation" else {}
        began, before = perf_counter(), sum(self._besides.values())
        try:
            return call(*args, **options)
        finally:
            within = sum(self._besides.values()) - before
            self._besides[name] += perf_counter() - began - within
            if state:
                self._validates = False
                self._random = self._random_states()
                self._drawn[name] |= compat.drawn(state, self._random)
                self._validated.append(self._done)

    def _random_states(self) -> dict[str, str]:
        return compat.random_states(compat.generators_of(self._loader))

    def _share_weights(self, trainer: Any, module: Any) -> None:
        """Begin with the weights of the first trial: not all scripts seed them."""
        file = Path(self.spec.shared) / "weights.pt"
        if file.exists():
            module.load_state_dict(torch.load(file, weights_only=True))
            return
        weights = module.state_dict()
        if (
            trainer.global_rank == 0
            and sum(each.nbytes for each in weights.values()) < _MOST_WEIGHTS
        ):
            # Other ranks may read it meanwhile.
            torch.save(weights, file.with_suffix(".part"))
            file.with_suffix(".part").replace(file)

    def _set_up_data(self, loop: Any) -> None:
        self._loaders = []  # those of validation are set up elsewhere
        try:
            type(loop).setup_data(loop)
        finally:
            if self._loaders:
                self._loader = self._loaders[0] if len(self._loaders) == 1 else None
            self._loaders = None

    def _process_loader(self, strategy: Any, loader: Any) -> Any:
        if self._loaders is not None:
            arguments = {key: value for each in self.changes for key, value in each.loader.items()}
            compat.end_workers(loader)
            if arguments:
                compat.change_loader(loader, arguments)
            if not isinstance(loader, torch.utils.data.DataLoader):
                self._note(f"a {type(loader).__name__} is no DataLoader whose arguments are tried")
            if self._loader is None and not self._loaders:  # a stream has no truth value
                self._sampler = getattr(loader, "_index_sampler", None)
                self._iterate = getattr(type(self._sampler), "__iter__", iter)
                self._record_samples(loader)
            elif self._loaders:
                self._note("arguments of several training DataLoaders are not tried")
            self._loaders.append(loader)
        return type(strategy).process_dataloader(strategy, loader)

    def _record_samples(self, loader: Any) -> None:
        """Record which samples the first batches have, whatever the dataset makes of them."""
        sampler = getattr(loader, "batch_sampler", None)
        kind: Any = type(sampler)
        original = getattr(kind, "__iter__", None)
        if original is None:
            return

        def recorded(each: Any) -> Any:
            if self._validates:  # of the same class
                yield from original(each)
                return
            # Before the first item of an epoch.
            if each is sampler:
                if self._state not in (None, self._state_now()):
                    self._dataset_changes = True
                if len(self._starts) < self.spec.warm_up:
                    self._starts.append(compat.random_states(compat.generators_of(loader)))
            for samples in self._in_order(each, original):
                if each is sampler and len(self._samples) < self.spec.warm_up:
                    self._samples.append(repr(samples))
                yield samples

        try:
            kind.__iter__ = recorded
            self._sampler, self._iterate = sampler, original
        except TypeError:  # of an immutable class, such as a list
            vars(loader)["batch_sampler"] = compat.Batches(sampler)
            self._record_samples(loader)

    def _in_order(self, sampler: Any, iterate: Callable[..., Iterable[Any]]) -> Iterator[Any]:
        """The batches of a sampler, whose order has random numbers of its own in each epoch.

        Workers draw it earlier: within a search of Lightning's for the learning rate, for one, or
        before the numbers of the batches that are computed meanwhile.
        """
        epoch = getattr(sampler, _EPOCHS, 0)
        with suppress(AttributeError):  # of a class with slots
            setattr(sampler, _EPOCHS, epoch + 1)
        own = compat.OwnRandomNumbers(_MOST_EPOCHS * self.spec.seed + epoch)
        with own:
            batches = iter(iterate(sampler))
            more = [*islice(batches, 1)]
        yield from more
        if (later := self._drawn_later.get(id(sampler))) is None:
            later = set()
            for _ in range(self.spec.warm_up):
                with own:
                    more = [*islice(batches, 1)]
                later |= own.drawn
                yield from more
            self._drawn_later[id(sampler)] = later
        # Of most samplers that is nothing, and no batch takes longer.
        own.keep(later)
        while later and more:
            with own:
                more = [*islice(batches, 1)]
            yield from more
        yield from batches

    def _state_now(self) -> str:
        """What workers that stay have copies of: the dataset's attributes, such as the epoch.

        Those of the datasets, transforms and small containers within it are included.
        """
        collate = getattr(self._loader, "collate_fn", None)
        waiting = [getattr(self._loader, "dataset", None), getattr(collate, "__self__", collate)]
        found: list[Any] = []
        seen: set[int] = set()
        while waiting and len(seen) < MOST_OBJECTS:
            value = waiting.pop()
            shape = shape_of(value)
            if shape is not None:
                found.append(digest(value) if prod(shape) <= _SMALL else None)
            elif isinstance(value, int | float | str):
                found.append(value)
            elif id(value) not in seen:
                seen.add(id(value))
                parts = entries(value) or attributes(value)
                waiting += parts.values() if len(parts) <= _SMALL else ()
        return repr(found)

    def _transfer(self, strategy: Any, batch: Any, *args: Any, **options: Any) -> Any:
        # Before the transfer, so that the device is not waited for.
        if self._startup is None and strategy.lightning_module.trainer.training:
            self._batches.append(digest(batch))
        return type(strategy).batch_to_device(strategy, batch, *args, **options)

    # -- hooks ------------------------------------------------------------------------------------

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """The module's own callbacks are attached now."""
        self._reduce(trainer)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Make the changes that need the optimizers."""
        for config in trainer.lr_scheduler_configs:
            config.strict = False  # it may monitor what validation logs
        for change in self.changes:
            change.begin(trainer)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Time the batch; end the process after the last one."""
        self._done += 1
        self._restarts |= self._state is not None
        spec = self.spec
        if self._done <= min(spec.warm_up, trainer.num_training_batches):
            before, self._random = self._random, self._random_states()
            self._drawn["batch"] |= compat.drawn(before, self._random)
        # In later epochs, the order of samples may be another one.
        if self._done == min(spec.warm_up, trainer.num_training_batches):
            self._weights = [digest([*pl_module.parameters()])]
        begins, ends = self._begins(trainer), self._has_enough(trainer)
        if self._done == spec.warm_up or begins or ends:
            synchronize(trainer)
        now = perf_counter()
        if self._done == spec.warm_up:
            self._startup = now - self._began
        if self._skipped is not None:
            self._seconds.append(now - self._last)
        if begins:
            self._skipped, self._seconds = self._done, []
            self._besides = dict.fromkeys(self._besides, 0.0)
        self._last = now
        if trainer.is_last_batch:
            self._state = self._state_now()
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if isinstance(loss, Tensor) and len(self._losses) < _LOSSES:
            # Lightning has divided it. It is read at the end: no batch waits for it.
            self._losses.append(loss.detach() * trainer.accumulate_grad_batches)
        # One decides: clocks and workers of ranks differ, and one that ends alone fails the others.
        if trainer.global_rank == 0:
            self._end_in_time(trainer, ends)

    def _end_in_time(self, trainer: Any, ends: bool) -> None:
        spec, now = self.spec, self._last
        if spec.batches is not None:
            if not ends and now - self._began >= spec.most_seconds and training_queues(trainer):
                self._end(trainer, self._unsteady("raise --minutes"))
        elif self._seconds:
            elapsed = now - self._began - (self._startup or 0.0)
            enough = len(self._seconds) >= spec.least and elapsed >= spec.seconds
            ends = enough or elapsed >= spec.most_seconds
        if ends:
            self._end(trainer)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """The training is shorter. A process that is forked or spawned has no later line."""
        queues = [] if self.diagnoses else training_queues(trainer)
        if queues and not (self._seconds and self._began_empty) and not trainer.global_rank:
            self._end(trainer, self._unsteady("the training ends"))
        # Workers deliver as many batches at once as there are workers.
        whole = lcm(*(each.workers for each in queues))
        self._seconds = self._seconds[: len(self._seconds) // whole * whole]
        self._end(trainer)

    def _begins(self, trainer: Any) -> bool:
        """Whether the next batch is the first one that is timed, maybe once more.

        Batches that workers have loaded before, such as in a slow first step, come faster than they
        are loaded. They have no effect once their queue was empty, nor if workers keep it full.
        """
        queues = [] if self.diagnoses else training_queues(trainer)
        if self._done < max([self.spec.warm_up, *(each.size for each in queues)]):
            return False
        is_empty = all(each.is_empty for each in queues)
        if self._skipped is not None:  # full at first, but workers do not keep up
            begins = is_empty and not self._began_empty
        else:
            begins = all(each.is_full or each.is_empty for each in queues)
        self._began_empty |= begins and is_empty
        return begins

    def _has_enough(self, trainer: Any) -> bool:
        """Whether the last batch is timed: whole rounds of workers, whose queue is as at first."""
        if self.spec.batches is None or self._skipped is None:
            return False
        more = self._done - self._skipped - self.spec.batches
        queues = training_queues(trainer)
        in_round = more < 0 or more % lcm(*(each.workers for each in queues))
        return not in_round and (self._began_empty or all(each.is_full for each in queues))

    def _unsteady(self, why: str) -> Unsteady:
        return Unsteady(f"workers load too far ahead to be timed in {self._done} batches: {why}")

    # -- the end ----------------------------------------------------------------------------------

    def _end(self, trainer: Any, error: BaseException | None = None) -> NoReturn:
        """Write the result, on rank 0 or where it failed, and wait for the end of all processes.

        The parent ends them together, so that no other rank fails, and no later line runs of the
        script, or of one that has started it.
        """
        file = self._folder / RESULT
        try:
            if (error is not None or not trainer.global_rank) and not file.exists():
                content = self._result(trainer) if error is None else {
                    "error": self._reason(error), "late": isinstance(error, Unsteady)
                }  # fmt: skip
                write_text(file, text_of(content))
        except BaseException as failure:
            write_text(file, text_of({"error": describe(failure)}))
        finally:
            time.sleep(_LONGEST_END)
            os._exit(1)

    def _reason(self, error: BaseException) -> str:
        """Why a fit failed; of a training as it is also where, as that is the script's."""
        where = place_of("".join(format_exception(error))) if self.diagnoses else ""
        return _reason(error) + where

    def _result(self, trainer: Any) -> Mapping[str, Any]:
        cuda = trainer.strategy.root_device.type == "cuda"
        epoch = trainer.num_training_batches
        content: dict[str, Any] = {
            "seconds": sum(self._seconds),
            "besides": self._besides,
            "timed": len(self._seconds),
            "done": self._done,
            "median": float(np.median(self._seconds)) if self._seconds else None,
            "startup": self._startup,
            "losses": [repr(float(loss)) for loss in self._losses],
            "batches": self._batches,
            "samples": self._samples[: self.spec.warm_up],
            "weights": self._weights,
            "memory": torch.cuda.max_memory_allocated() if cuda else None,
            "batch_size": loader_batch_size(self._loader),
            "workers": getattr(self._loader, "num_workers", 0),
            "prefetch": getattr(self._loader, "prefetch_factor", None),
            "epoch": int(epoch) if np.isfinite(epoch) else None,
            "dataset_changes": self._dataset_changes,
            "stays": bool(
                getattr(self._loader, "num_workers", 0) and self._loader.persistent_workers
            ),
            "starts": self._starts,
            "drawn": {name: sorted(each) for name, each in self._drawn.items()},
            "validated": self._validated,
            "world_size": trainer.world_size,
            "notes": self._notes,
        }
        content |= self._proposed(trainer) if self.diagnoses else {}
        return {name: finite(value) for name, value in content.items()}

    def _proposed(self, trainer: Any) -> dict[str, Any]:
        """What the diagnosis of the first run suggests to try."""
        members: list[Any] = []
        if (run := current_run(trainer)) is not None:
            members = list(run.members)
            run.leave("teardown")
        verdicts: list[Verdict] = next(
            (each.verdicts for each in members if hasattr(each, "verdicts")), []
        )
        loader = self._loader if isinstance(self._loader, torch.utils.data.DataLoader) else None
        seen = Seen(
            trainer, trainer.lightning_module, loader,
            {verdict.code: verdict for verdict in reversed(verdicts)}, usable_cpus(),
            self._restarts,
        )  # fmt: skip
        expected = {
            "validation": trainer.enable_validation,
            "checkpoint": bool(trainer.checkpoint_callbacks),
        }
        unseen = [name for name in expected if expected[name] and not self._besides[name]]
        if unseen:
            self._note(
                f"the first run had no {' and no '.join(unseen)}, and what is measured leaves the "
                "time for it out: raise --seconds"
            )
        config = compat.command_line_config(trainer)
        candidates = []
        for change in proposals(seen, tuple(self.spec.only)):
            arguments: dict[tuple[str, ...], Any] = {}
            arguments |= {("trainer", key): value for key, value in change.trainer.items()}
            for key, value in change.loader.items():
                if path := compat.path_of(config, key, getattr(loader, key)):
                    arguments[path] = value
            candidates.append({
                "kind": type(change).__name__, "value": change.value, "name": change.name,
                "group": change.group, "exact": change.exact, "keeps": list(change.keeps),
                "predicted": change.predicted(seen), "period": finite(change.period(seen)),
                "trainer": change.trainer, "loader": change.loader, "code": change.code,
                "yaml": [[list(path), value] for path, value in arguments.items()],
            })  # fmt: skip
        return {
            "verdicts": [verdict.as_dict() for verdict in verdicts],
            "candidates": candidates,
            "dataset": kind_of_items(loader),
            "order": self._order(trainer, loader),
            "command_line": bool(config),
        }

    def _order(self, trainer: Any, loader: Any) -> dict[str, Any]:
        """Which random numbers decide the order of samples, and whether it matters when."""
        names = compat.generators_of(loader)
        length = None
        with suppress(Exception):  # of a stream
            length = len(loader)
        streams = isinstance(getattr(loader, "dataset", None), torch.utils.data.IterableDataset)
        # Of several loaders, none is known. Ranks have one each, and own ones may wait for others.
        parts = self._sampler, getattr(self._sampler, "sampler", None)
        alone = trainer.world_size == 1 or all(compat.is_known(each) for each in parts)
        sampler = self._sampler if loader is not None and alone else None
        found = Drawn() if streams else draws_of(sampler, self._iterate, names)
        return found._asdict() | {
            "seeds": next((k for k, v in names.items() if v is loader.generator), "torch"),
            "cut": length is None or trainer.num_training_batches < length,
            "epochs": trainer.max_epochs,
        }


def _reason(error: BaseException) -> str:
    """The line that says why; of an error in a worker the last one of the traceback within."""
    if isinstance(error, SystemExit):
        return f"sys.exit({error.code!r}) is called in Trainer.fit"
    if isinstance(error, Unsteady):
        return str(error)
    if "Traceback (most recent call last):" in str(error):
        return redacted(str(error).strip().splitlines()[-1])
    return describe(error).partition("\n")[0]


def synchronize(trainer: Any) -> None:
    """Wait for a GPU, whose work the host's clock does not see otherwise."""
    if trainer.strategy.root_device.type == "cuda":
        torch.cuda.synchronize()


def digest(batch: Any) -> str:
    """A short text that differs between batches, of up to 64 KB of each tensor."""
    found = blake2b(digest_size=8)
    for _, each in tensors(batch, seen=set()):
        with suppress(Exception):  # such as a sparse one
            flat = torch.as_tensor(each).detach().reshape(-1)
            step = max(flat.nbytes // _COMPARED, 1)
            found.update(flat[::step].cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def kind_of_items(loader: Any) -> str:
    """How a DataLoader makes items and batches: ``fixed``, ``random``, ``stateful`` or ``unknown``.

    What draws random numbers differs in a worker, which has its own, and still is the same
    training. What depends on the items that were read before is not.
    """
    try:
        count = len(loader.dataset)
        end, result = monotonic() + _ITEM_SECONDS, "fixed"
        compat.seed_all(0)
        unused = compat.random_states()
        for number in range(0, count, max(count // _ITEMS, 1)):
            first, again = _item(loader, number), _item(loader, number)
            if first != again:
                return "stateful"
            if compat.random_states() != unused:
                result = "random"
            if monotonic() > end:
                break
        return result if count else "unknown"
    except Exception:  # such as an iterable dataset, or keys instead of numbers
        return "unknown"


def _item(loader: Any, number: int) -> str:
    """What an item contains."""
    compat.seed_all(0)
    return digest(loader.collate_fn([loader.dataset[number]]))


class Drawn(NamedTuple):
    """The generators of random numbers that a sampler draws from in an epoch."""

    #: For its first batch, for others, and after the last one, which workers ask for.
    first: Sequence[str] = ()
    later: Sequence[str] = ()
    end: Sequence[str] = ()
    #: Whether it draws when it is iterated over, which DataLoaders with workers do twice.
    eager: bool = False


def draws_of(
    sampler: Any,
    iterate: Callable[..., Iterable[Any]],
    generators: Mapping[str, torch.Generator],
) -> Drawn:
    """What a sampler draws from; all where that is not known.

    A sampler whose order differs although it draws from the same state has numbers of its own,
    which count as drawn at the end: what is drawn in an epoch changes the next ones.
    """
    everything = [*compat.random_states(generators)]
    states = {name: each.get_state() for name, each in generators.items()}
    end, orders = monotonic() + _ORDER_SECONDS, list[str]()
    try:
        for _ in range(2):
            compat.seed_all(0)
            for name, each in generators.items():
                each.set_state(states[name])
            marks = [compat.random_states(generators)]
            batches = iter(iterate(sampler))
            orders.append(repr(next(batches)))
            marks.append(compat.random_states(generators))
        for _ in islice(batches, len(sampler) - 1):
            if monotonic() > end:
                raise TimeoutError
        marks.append(compat.random_states(generators))
        next(batches, None)
        marks.append(compat.random_states(generators))
    except Exception:  # such as a source of batches that is no sampler
        return Drawn(everything, everything, everything, eager=True)
    first, later, ends = (sorted(compat.drawn(a, b)) for a, b in pairwise(marks))
    ends += ["own"] if len({*orders}) > 1 else []
    return Drawn(first, later, ends, bool(first or ends) and not isgeneratorfunction(iterate))

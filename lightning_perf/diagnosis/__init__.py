"""Why a run is slow: signals -> rules -> verdicts -> report. No torch, no Lightning.

To apply a rule of your own as well, use ``Diagnosis(rules=[*RULES, mine])``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import TYPE_CHECKING

from lightning_perf.checks import is_list
from lightning_perf.diagnosis.rules import (
    LEAST,
    PROMISE,
    SEVERITIES,
    FunctionRule,
    Impact,
    Rule,
    Unclaimed,
    Verdict,
    costs,
    loading,
    machine,
    ranks,
    steps,
)
from lightning_perf.diagnosis.rules.lateness import Lateness
from lightning_perf.diagnosis.signals import COMPUTE, Signals, Unknown
from lightning_perf.errors import ConfigError, describe
from lightning_perf.units import counted, duration

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = [
    "CODES",
    "PROMISE",
    "RULES",
    "SEVERITIES",
    "Findings",
    "FunctionRule",
    "Impact",
    "Rule",
    "Signals",
    "Unknown",
    "Verdict",
    "diagnose",
]

#: When a rank is a straggler, also in `Timings`.
LATENESS = Lateness(chronic=0.7, fewest=3, share=0.05, once=0.10, explained=0.8)
_GROWTH = machine.Growth(100e6, share=0.10, soon=3600.0, continues=0.4, samples=6)
_WORKERS = loading.Workers(busy=60.0, per_cpu=4, first=0.02, more=0.10, contested=0.17, named=20.0)
_input_bound = partial(loading.input_bound, least=_WORKERS, lateness=LATENESS)
_IDLING = machine.Idling(idle=0.3, computing=0.7, waiting=0.05)
_logger_bound = partial(costs.logger_bound, named=0.8, aim=0.0125, left=4, follows=(0.5, 8.0))
_slowdown = partial(steps.slowdown, ratio=1.10, sustained=50, varies=1.4, named=0.2, late=LATENESS)
_low_gpu_utilization = partial(machine.low_gpu_utilization, least=_IDLING._replace(idle=0.5))
#: All rules of the package with their thresholds, the most specific first: a second that several
#: could claim belongs to the first of them. The last number of a rule is the share of the wall time
#: from which on a cause is worth a warning; its function explains the others.
RULES: tuple[Rule, ...] = (
    FunctionRule("cpu-saturated", partial(machine.cpu_saturated, hidden=0.02, named=20.0), 0.10),
    FunctionRule("gc-pauses", partial(steps.gc_pauses, named=0.8), 0.03),
    FunctionRule("recompile", partial(steps.recompile, fewest=3), 0.05),
    FunctionRule("transfer-bound", costs.transfer_bound, 0.10),
    FunctionRule("callback-bound", partial(costs.callback_bound, named=0.8), 0.05),
    FunctionRule("logger-bound", _logger_bound, 0.05),
    FunctionRule("checkpoint-bound", partial(costs.checkpoint_bound, aim=0.025, left=2), 0.05),
    FunctionRule("validation-bound", costs.validation_bound, 0.15),
    FunctionRule("epoch-restart", loading.epoch_restart, 0.05),
    FunctionRule("communication-bound", ranks.communication_bound, 0.10),
    FunctionRule("straggler", partial(ranks.straggler, least=LATENESS), 0.10),
    FunctionRule("periodic-stall", partial(steps.periodic_stall, fewest=3, alike=0.2), 0.10),
    FunctionRule("input-bound", _input_bound, 0.10),
    FunctionRule("sync-bound", machine.sync_bound, 0.10),
    FunctionRule("warmup", partial(steps.warmup, share=0.05, seconds=0.4, ratio=10.0), 0.05),
    FunctionRule("slowdown", _slowdown, 0.10),
    FunctionRule("host-memory-growth", partial(machine.host_memory_growth, least=_GROWTH)),
    FunctionRule("device-memory-growth", partial(machine.device_memory_growth, least=_GROWTH)),
    FunctionRule("throttled", partial(machine.throttled, percent=10.0, critical=50.0)),
    FunctionRule("launch-bound", partial(machine.launch_bound, least=_IDLING), 0.10),
    FunctionRule("low-gpu-utilization", _low_gpu_utilization, 0.10),
    FunctionRule("slow-precision", partial(machine.slow_precision, ratio=2.0)),
    FunctionRule("compute-bound", partial(steps.compute_bound, share=0.8, low_mfu=0.4)),
)
#: All codes, which are stable.
CODES = (*(rule.code for rule in RULES), "healthy")
#: Batches that a diagnosis needs.
_FEWEST_BATCHES = 30
#: The share of the time above which the step of an optimizer is unusually slow.
_OPTIMIZER = 0.25


@dataclass(frozen=True, slots=True)
class Findings:
    """What is wrong, and what is not known."""

    #: The most costly first, those of ``info`` last. Without a warning the first one is
    #: ``healthy``, unless a cause takes twice its threshold or next to nothing, which is uncertain,
    #: ranks wait for one another, and which rank is late is not known, or the training hung.
    #: Empty if nothing is known.
    verdicts: Sequence[Verdict] = ()
    #: Why rules gave no answer, by their codes.
    abstained: Mapping[str, str] = field(default_factory=dict)

    @property
    def metrics(self) -> dict[str, float]:
        """The largest share of the wall time of each code, as ``diagnosis/CODE``."""
        shares: dict[str, float] = {}
        for verdict in filter(lambda verdict: verdict.share, self.verdicts):
            key = f"diagnosis/{verdict.code}"
            shares[key] = max(verdict.share, shares.get(key, 0.0))
        return shares


def checked_rules(rules: Sequence[Rule]) -> list[Rule]:
    """Rules as a list; ConfigError if they are not rules."""
    example = "[*lightning_perf.diagnosis.RULES]"
    if not is_list(rules):
        raise ConfigError("rules", rules, "is not a list", example)
    for rule in rules:
        if not callable(rule) or not isinstance(getattr(rule, "code", None), str):
            problem = "is not a rule: rules are callable and have a code"
            raise ConfigError("rules", rule, problem, example)
    return list(rules)


def reachable(rules: Sequence[Rule] | None) -> set[str]:
    """The codes and severities of the verdicts that rules may reach; None for `RULES`."""
    return {*(rule.code for rule in (RULES if rules is None else rules)), "healthy", *SEVERITIES}


def _uncertain(verdict: Verdict, abstained: Mapping[str, str]) -> bool:
    """Whether a share may be worth a warning, and is far above its lower bound.

    Or whether it is worth one, and its rule cannot name the cause.
    """
    limits = {rule.code: rule.threshold for rule in RULES if isinstance(rule, FunctionRule)}
    limit, least = limits.get(verdict.code, inf), verdict.evidence.get("lower_bound_share", inf)
    if verdict.code in abstained and min(verdict.share, float(least)) >= limit:
        return True
    return verdict.share >= 2 * limit > 2 * float(least)


def diagnose(signals: Signals, rules: Sequence[Rule] | None = None) -> Findings:
    """Apply rules to signals; a rule that fails or lacks a signal is listed with its reason.

    Without rules, `RULES` are applied. No second is in two verdicts: it belongs to the first rule
    that claims it.

    Example:
        >>> diagnose(Signals(windows=[])).abstained
        {'all': '0 measured batches, and a diagnosis needs 30'}
    """
    if signals.batches < _FEWEST_BATCHES:
        measured = counted(signals.batches, "measured batch")
        why = f"{measured}, and a diagnosis needs {_FEWEST_BATCHES}"
        return Findings(abstained={"all": why})
    if not signals.wall.sum() > 0:
        return Findings(abstained={"all": "the time of the batches was not measured"})
    verdicts: list[Verdict] = []
    abstained: dict[str, str] = {}
    unclaimed = Unclaimed(signals)
    for rule in RULES if rules is None else rules:
        try:
            if isinstance(rule, FunctionRule):
                verdicts += rule(signals, unclaimed)
            else:
                verdicts += map(unclaimed.limited, rule(signals))
        except Unknown as why:
            abstained[rule.code] = str(why)
        except Exception as error:
            abstained[rule.code] = f"the rule failed ({describe(error)})"
    verdicts.sort(key=lambda verdict: (verdict.severity == "info", -verdict.share))
    warned = bool(verdicts) and verdicts[0].severity != "info"
    if not (warned or signals.hung or any(_uncertain(each, abstained) for each in verdicts)):
        verdicts.insert(0, _healthy(signals, found=bool(verdicts)))
    return Findings(verdicts, abstained)


def _healthy(signals: Signals, found: bool) -> Verdict:
    """The verdict without a warning; ``found`` says whether there is one of ``info``."""
    advice = "No cause is worth a warning."
    if not found:
        own = sum(signals.share(signals.category(name)) for name in COMPUTE)
        advice = (
            f"No cause was found. Forward, backward and the optimizer take {own:.0%} of the "
            "time; what runs inside of them is not examined."
        )
    if signals.step_seconds < LEAST:
        advice = (
            f"No cause is worth a warning. Batches of {duration(signals.step_seconds)} are "
            "mostly overhead of Python and Lightning: larger ones do more work each."
        )
    optimizer = signals.share(signals.category("optimizer_step"))
    if optimizer > _OPTIMIZER:
        advice += f" The optimizer's step takes {optimizer:.0%} of the time, which is unusual."
    return Verdict("healthy", "info", advice=advice)

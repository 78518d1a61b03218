"""What a run costs: device hours and energy, of the run and of each verdict."""

from __future__ import annotations

import os
from fnmatch import filter as matching
from math import isfinite
from typing import TYPE_CHECKING, Any

from lightning_perf.errors import ConfigError
from lightning_perf.units import three_digits

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from lightning_perf.core.window import Window

#: The user's factors in the environment: what it multiplies, and its result.
_PRICE, _CO2 = "LIGHTNING_PERF_PRICE_PER_GPU_HOUR", "LIGHTNING_PERF_KG_CO2_PER_KWH"
#: Costs of shorter runs are not shown, in device hours.
_LEAST = 0.1


def cost_of(
    window: Window,
    device: str,
    device_seconds: float,
    verdicts: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """The cost of a run: the section of ``summary.json``, which ``docs/summary.md`` describes.

    Args:
        window: The whole run, with the power of its GPUs if it was sampled.
        device: ``GPU``, ``core``, or another kind of device.
        device_seconds: The seconds of the run, times its devices.
        verdicts: Each has a code, and its share of this time.
    """
    whole = {"hours": device_seconds / 3600}
    if device == "GPU" and (joules := energy(window)):
        whole["kwh"] = joules / 3.6e6
    parts = [
        {"code": each["code"], **{name: each["share"] * value for name, value in whole.items()}}
        for each in verdicts
        if each.get("share")
    ]
    return {"device": device, **whole, **({"verdicts": parts} if parts else {})}


def energy(window: Window) -> float:
    """The energy of all GPUs in joules: their power, integrated over its samples.

    0 if it was not sampled, or not to the end.
    """
    columns = matching(window.columns, "system/gpu_slot_*/gpu_power")
    joules = sum(window.total(name) for name in columns)
    return joules if isfinite(joules) else 0.0


def priced(
    cost: Mapping[str, Any], price: str | None = None, kg_co2: str | None = None
) -> dict[str, Any]:
    """A cost with money, in the currency of the price, and CO2.

    Args:
        cost: As from `cost_of`.
        price: Of a GPU hour; by default from the environment.
        kg_co2: Of a kWh; by default from the environment.

    Raises:
        ConfigError: One of them is not a number from 0 on.

    Example:
        >>> found = priced({"device": "GPU", "hours": 61.0, "kwh": 30.0}, "2", "0.4")
        >>> found["money"], found["kg_co2"]
        (122.0, 12.0)
    """
    found = dict(cost)
    amounts = ("hours", price, _PRICE, "money"), ("kwh", kg_co2, _CO2, "kg_co2")
    for amount, given, variable, name in amounts:
        text = os.environ.get(variable, "") if given is None else given
        try:
            factor = float(text or 0.0)
        except ValueError:
            factor = -1.0
        if not 0 <= factor < 1e9:
            raise ConfigError(variable, text, "is not a number from 0 on", "2.5")
        if text and amount in cost and cost["device"] == "GPU":
            found |= {name: factor * cost[amount], f"{name}_per_{amount}": factor}
    return found


def texts(cost: Mapping[str, Any]) -> Iterator[str]:
    r"""Lines about a cost, and about that of each verdict; none for a short run.

    Example:
        >>> part = {"code": "input-bound", "hours": 14.2, "kwh": 7.0}
        >>> cost = {"device": "GPU", "hours": 61.0, "kwh": 30.0, "verdicts": [part]}
        >>> print(*texts(priced(cost, "2", "0.4")), sep="\n")
        61.0 GPU hours, 30.0 kWh, money 122 (2 per GPU hour), 12.0 kg CO2 (0.4 kg per kWh)
        input-bound: 14.2 GPU hours, 7.00 kWh
    """
    if cost["hours"] < _LEAST and "money" not in cost:
        return
    units = {
        "hours": ("", f"{cost['device']} hours"),
        "kwh": ("", "kWh"),
        "money": ("money ", f"({cost.get('money_per_hours', 0):g} per GPU hour)"),
        "kg_co2": ("", f"kg CO2 ({cost.get('kg_co2_per_kwh', 0):g} kg per kWh)"),
    }
    for part in (cost, *cost.get("verdicts", ())):
        amounts = (f"{a}{three_digits(part[n])} {z}" for n, (a, z) in units.items() if n in part)
        yield (f"{part['code']}: " if "code" in part else "") + ", ".join(amounts)

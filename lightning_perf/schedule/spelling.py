"""The nearest right spelling of a time or a schedule that is misspelt."""

from __future__ import annotations

import re
from difflib import get_close_matches

#: All units, for messages.
UNITS = "ep ba step sp tok sec dur, or 1h20m40s"

_UNIT = {
    **dict.fromkeys(("ep", "epoch", "epochs"), "ep"),
    **dict.fromkeys(("ba", "batch", "batches"), "ba"),
    **dict.fromkeys(("step", "steps"), "step"),
    **dict.fromkeys(("sp", "sample", "samples"), "sp"),
    **dict.fromkeys(("tok", "token", "tokens"), "tok"),
    **dict.fromkeys(("sec", "secs", "second", "seconds"), "sec"),
    **dict.fromkeys(("dur", "duration"), "dur"),
    **dict.fromkeys(("h", "hr", "hour", "hours"), "h"),
    **dict.fromkeys(("m", "min", "mins", "minute", "minutes"), "m"),
}
_WORDS = ("every", "for", "first", "at", "always", "never")
_NUMBER_AND_UNIT = re.compile(r"([\d.]+)\s*([a-z]*)")


def nearest_time(text: str) -> str:
    """The time that was probably meant; the text itself where there is none.

    Example:
        >>> nearest_time("10 Batches"), nearest_time("10setp"), nearest_time("100")
        ('10ba', '10step', '100ba')
    """
    match = _NUMBER_AND_UNIT.fullmatch(text.strip().lower())
    if match is None:
        return text
    number, unit = match.groups()
    if not unit:
        return f"{number}{'dur' if number.startswith('0.') else 'ba'}"
    near = get_close_matches(unit, _UNIT, n=1)
    return f"{number}{_UNIT[near[0]]}" if near else text


def nearest_schedule(text: str) -> str:
    """The schedule that was probably meant; it may still be none.

    Example:
        >>> nearest_schedule("evry 10 batches for 3step")
        'every 10ba for 3step'
    """
    joined = re.sub(rf"(\d)\s+(?!{'|'.join(_WORDS)})(?=[a-z])", r"\1", text.lower())
    return " ".join(_nearest_word(word) for word in joined.split())


def _nearest_word(word: str) -> str:
    if word[0].isdigit():
        return nearest_time(word)
    near = get_close_matches(word, _WORDS, n=1)
    return near[0] if near else word

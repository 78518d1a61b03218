"""Texts of errors and warnings, which never contain secrets."""

import pickle
import warnings

import pytest

from lightning_perf.errors import (
    ConfigError,
    PerfWarning,
    RecorderBusy,
    describe,
    warn,
    without_credentials,
)

ADDRESSES = [
    ("https://me:secret@host/x", "https://host/x"),
    ("postgresql://me:s@cr@t@host:5432/db", "postgresql://host:5432/db"),
    ("PUT https://host/x?signature=secret&a=b failed", "PUT https://host/x failed"),
    ("'https://host?token=secret' is gone", "'https://host' is gone"),
    ("exceeded with url: /api/x?token=secret (refused)", "exceeded with url: /api/x (refused)"),
    ("http://a:secret@b/c and http://d:secret@e/f?g", "http://b/c and http://e/f"),
    ("/home/me@work/what?/file was not sent", "/home/me@work/what?/file was not sent"),
    ("http://host:5000/a@b", "http://host:5000/a@b"),
]


@pytest.mark.parametrize(("text", "expected"), ADDRESSES)
def test_warnings_contain_no_secret(text, expected):
    """Addresses lose user, password and query string; paths and other text are unchanged."""
    with pytest.warns(PerfWarning) as caught:
        warn(text)
    assert str(caught[0].message) == f"lightning_perf: {expected}"


@pytest.mark.parametrize(("text", "expected"), ADDRESSES)
def test_error_descriptions_contain_no_secret(text, expected):
    """Descriptions in the list of pending uploads are redacted in the same way."""
    assert describe(OSError(text)) == f"OSError: {expected}"


def test_descriptions_are_short():
    """A server that answers with an HTML page does not fill the list with it."""
    assert len(describe(OSError("long " * 1000))) == 300


def test_addresses_of_databases_keep_their_query():
    """Databases have options there, without which a later upload could not connect."""
    address = "postgresql://me:secret@host/db?sslmode=require"
    assert without_credentials(address) == "postgresql://host/db?sslmode=require"


@pytest.mark.parametrize(
    ("problem", "example", "expected"),
    [
        ("is too small", "100", "size=1 is too small. Try size=100."),
        ("is no option", None, "size=1 is no option."),
        ("is no option: did you mean sizes?", None, "size=1 is no option: did you mean sizes?"),
    ],
)
def test_a_config_error_says_what_works(problem, example, expected):
    """Field, value, problem and example form sentences, also after pickling."""
    error = ConfigError("size", 1, problem, example)
    assert str(error) == str(pickle.loads(pickle.dumps(error))) == expected


def test_a_busy_recorder_names_both_and_a_remedy():
    """The remedy fits the holder, also after pickling."""
    error = RecorderBusy("PyTorch", "Trainer(profiler=X())", "remove one of the two")
    expected = "PyTorch cannot record while Trainer(profiler=X()) does: remove one of the two."
    assert str(error) == str(pickle.loads(pickle.dumps(error))) == expected


@pytest.mark.parametrize("kind", [DeprecationWarning, FutureWarning, UserWarning])
@pytest.mark.parametrize("module", ["lightning_perf", "lightning_perf.charts.memory"])
def test_warning_filters_of_tests_do_not_match_our_modules(module, kind):
    """Filters for other packages, such as lightning, do not match ours."""
    with pytest.raises(kind, match="planted"):
        warnings.warn_explicit("planted", kind, "file.py", 1, module)
    if kind is DeprecationWarning:
        warnings.warn_explicit("planted", kind, "file.py", 1, module.replace("_perf", ""))

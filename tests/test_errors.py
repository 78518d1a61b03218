"""What we say when something goes wrong, and what we never say."""

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


@pytest.mark.parametrize(("text", "told"), ADDRESSES)
def test_no_warning_tells_a_secret(text, told):
    """Addresses lose user, password and query string; paths and all else stay as they are."""
    with pytest.warns(PerfWarning) as caught:
        warn(text)
    assert str(caught[0].message) == f"lightning_perf: {told}"


@pytest.mark.parametrize(("text", "told"), ADDRESSES)
def test_no_description_of_an_error_tells_a_secret(text, told):
    """What is written into the list of pending uploads is redacted alike."""
    assert describe(OSError(text)) == f"OSError: {told}"


def test_descriptions_are_short():
    """A server that answers with a page of HTML does not fill the list with it."""
    assert len(describe(OSError("long " * 1000))) == 300


def test_an_address_keeps_its_query_where_it_is_needed():
    """Databases have their settings there, without which a later upload could not connect."""
    address = "postgresql://me:secret@host/db?sslmode=require"
    assert without_credentials(address) == "postgresql://host/db?sslmode=require"


@pytest.mark.parametrize(
    ("problem", "example", "told"),
    [
        ("is too small", "100", "size=1 is too small. Try size=100."),
        ("is no option", None, "size=1 is no option."),
        ("is no option: did you mean sizes?", None, "size=1 is no option: did you mean sizes?"),
    ],
)
def test_a_bad_setting_is_told_with_what_works(problem, example, told):
    """Field, value, problem and example read as sentences, also after a pickle."""
    error = ConfigError("size", 1, problem, example)
    assert str(error) == str(pickle.loads(pickle.dumps(error))) == told


def test_a_busy_recorder_names_both_and_a_remedy():
    """The remedy fits the holder, also after a pickle."""
    error = RecorderBusy("PyTorch", "Trainer(profiler=X())", "remove one of the two")
    told = "PyTorch cannot record while Trainer(profiler=X()) does: remove one of the two."
    assert str(error) == str(pickle.loads(pickle.dumps(error))) == told


@pytest.mark.parametrize("kind", [DeprecationWarning, FutureWarning, UserWarning])
@pytest.mark.parametrize("module", ["lightning_perf", "lightning_perf.charts.png"])
def test_no_filter_of_the_tests_hides_a_warning_of_our_modules(module, kind):
    """Those that ignore other packages, such as lightning, do not match ours."""
    with pytest.raises(kind, match="planted"):
        warnings.warn_explicit("planted", kind, "file.py", 1, module)
    if kind is DeprecationWarning:
        warnings.warn_explicit("planted", kind, "file.py", 1, module.replace("_perf", ""))

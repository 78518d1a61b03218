"""Texts of errors and warnings, which never contain secrets."""

import pickle
import re
import warnings

import pytest
from hypothesis import given
from hypothesis import strategies as st

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
    ("http://host:5 failed (a@b)", "http://host:5 failed (a@b)"),
    ("postgresql://ml:pa/ss+w0rd=@db/mlflow", "postgresql://db/mlflow"),
    ("mysql+pymysql://ml:p#w?x@db/mlflow is away", "mysql+pymysql://db/mlflow is away"),
    ("postgresql://ml:pa ss@db/mlflow", "postgresql://db/mlflow"),
    ("ftp://ml:a/b@host/x", "ftp://host/x"),
    ("http://ml:pa/ss@host/x", "http://host/x"),
    ("'http://ml:12/ss' and 'a@b'", "'http://ml:12/ss' and 'a@b'"),
    ("http://ml:12?ss@host/x", "http://host/x"),
    ("http://ml:12#ss@host/x", "http://host/x"),
    ("http://ml:secret\n@host/x is away\na@b", "http://host/x is away\na@b"),
    ("postgresql://db/mlflow?user=ml&password=secret", "postgresql://db/mlflow"),
]


@pytest.mark.parametrize(("text", "expected"), ADDRESSES)
def test_warnings_contain_no_secret(text, expected):
    """Addresses lose user, password and query string; paths and other text are unchanged."""
    with pytest.warns(PerfWarning) as caught:
        warn(text)
    assert str(caught[0].message) == f"lightning_perf: {expected}".replace("\n", r"\n")


def test_a_warning_is_one_line():
    """A path or an error of several lines does not look like another message."""
    with pytest.warns(PerfWarning) as caught:
        warn("no /tmp/a\n\x1b[2Jb")
    assert str(caught[0].message) == r"lightning_perf: no /tmp/a\n\x1b[2Jb"


@pytest.mark.parametrize("error", [OSError, ValueError])
def test_a_warning_that_cannot_be_shown_is_logged(monkeypatch, caplog, error):
    """Such as by Lightning, which needs the current folder, in a folder that was deleted."""

    def show(*warning):
        raise error

    monkeypatch.setattr("warnings.showwarning", show)
    warnings.simplefilter("always")  # until the end of the test
    warn("still there")
    assert "still there" in caplog.text
    caplog.clear()


@pytest.mark.parametrize(("text", "expected"), ADDRESSES)
def test_error_descriptions_contain_no_secret(text, expected):
    """Descriptions in the list of pending uploads are redacted in the same way."""
    assert describe(OSError(text)) == f"OSError: {expected}"


def test_descriptions_are_short():
    """A server that answers with an HTML page does not fill the list with it."""
    assert len(describe(OSError("long " * 1000))) == 300


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("postgresql://me:secret@host/db?sslmode=x", "postgresql://host/db"),
        ("postgresql:///db?password=secret", "postgresql:///db"),
        ("https://host/c?sig=secret", "https://host/c"),
        ("http://host?x=secret", "http://host"),
        ("weird+x://host/?k=a secret", "weird+x://host/"),
        ("http://host/#token=secret", "http://host/"),
        ("http://host#a secret", "http://host"),
        ("sqlite:////C#/my runs.db?timeout=3", "sqlite:////C#/my runs.db"),
        ("file:///runs#2", "file:///runs#2"),
        ("runs#2", "runs#2"),
    ],
)
def test_addresses_have_neither_query_nor_fragment(address, expected):
    """Whatever their options are called; a path of this machine may have a number sign."""
    assert without_credentials(address) == expected
    assert "secret" not in describe(OSError(f"cannot read '{address.replace(' ', '')}': no"))


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
@pytest.mark.parametrize("module", ["lightning_perf", "lightning_perf.profilers.programs"])
def test_warning_filters_of_tests_do_not_match_our_modules(module, kind):
    """Filters for other packages, such as lightning, do not match ours."""
    with pytest.raises(kind, match="planted"):
        warnings.warn_explicit("planted", kind, "file.py", 1, module)
    if kind is DeprecationWarning:
        warnings.warn_explicit("planted", kind, "file.py", 1, module.replace("_perf", ""))


@given(
    scheme=st.sampled_from(["http", "HTTPS", "postgresql", "mysql+pymysql", "s3"]),
    password=st.text("Zé/?#@:\"' )%.-", max_size=9),
    rest=st.sampled_from(["", ":5000/x", "/db?password=S3CRET&sslmode=x", "/a b"]),
)
def test_no_password_of_an_address_is_shown(scheme: str, password: str, rest: str) -> None:
    """Unescaped characters, also those that end an address, do not let a part of it through."""
    address = f"{scheme}://me:S3{password}CR@host{rest}"
    for text in (address, f"'{address}'", f"cannot read {address}: refused"):
        for shown in (without_credentials(address), str(ConfigError("uri", text, "is", None))):
            assert not re.search("S3|CR|Z", shown), shown
        assert not re.search("S3|CR|Z", describe(OSError(text)))

"""Sends events, such as critical verdicts, to a function or a URL of the user at once."""

from __future__ import annotations

import json
import re
from base64 import b64encode
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote_to_bytes, urlsplit

from lightning_perf.background import Worker
from lightning_perf.errors import ConfigError, WarningDigest
from lightning_perf.files import finite

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

#: Seconds for a post, and for the events that wait at the end of a run.
_TIMEOUT = 5.0
#: Events that may wait for a slow receiver; further ones are dropped.
_MOST = 16
_SLOW = "the receiver is too slow"


class Notifier:
    """Passes events to a function, or posts them to a URL, on a thread of its own.

    Only `close` waits, and nothing raises: the first event that does not arrive is a warning.
    The URL of a webhook is a secret: it is in no message, and this object has no readable text.

    Args:
        target: A function that is called with each event, or the URL of a webhook.

    Raises:
        ConfigError: The target is neither.

    Example:
        >>> seen = []
        >>> notifier = Notifier(seen.append)
        >>> notifier({"event": "verdict", "text": "owl: input-bound (critical)"})
        >>> notifier.close()
        >>> seen
        [{'event': 'verdict', 'text': 'owl: input-bound (critical)'}]
    """

    def __init__(self, target: Callable[[dict[str, Any]], object] | str) -> None:
        is_url = isinstance(target, str) and re.match(r"https?://[^\s/]", target)
        if not (callable(target) or is_url):
            problem = "is neither a function nor a URL that begins with http:// or https://"
            # Without the value, which may be the URL without its beginning.
            raise ConfigError("notify", type(target), problem, "'https://example.com/hook'")
        self._target, self._digest = target, WarningDigest()
        self._worker = Worker("lightning_perf notify", _MOST)

    def __reduce__(self) -> tuple[Any, ...]:  # a thread is not copied
        return type(self), (self._target,)

    def __call__(self, event: Mapping[str, Any]) -> None:
        """Send an event soon; it is dropped if too many wait."""
        if not self._worker.submit(partial(self._send, dict(event), self._digest), "notify"):
            _warn(self._digest, _SLOW)

    def close(self, until: Callable[[], bool] = lambda: False) -> None:
        """Wait a few seconds at most for the events that are not sent; may be used again."""
        worker, digest = self._worker, self._digest
        self._worker, self._digest = Worker("lightning_perf notify", _MOST), WarningDigest()
        if not worker.close(_TIMEOUT, until):
            worker.abandon(0.0)
            _warn(digest, _SLOW)
        digest.summarize()

    def _send(self, event: dict[str, Any], digest: WarningDigest) -> None:
        try:
            self._target(event) if callable(self._target) else post(self._target, event)
        except BaseException as error:  # whose message may have the URL
            code = getattr(error, "code", None)  # of HTTP
            name = type(error).__name__
            _warn(digest, f"{name} {code}" if isinstance(code, int) else name)


def _warn(digest: WarningDigest, why: str) -> None:
    message = f"notify: an event did not arrive ({why}). Training continues."
    digest.once("events for notify did not arrive", message)


def post(url: str, content: object) -> None:
    """Post a value as JSON; a user and password in the URL are sent as HTTP's basic credentials.

    Raises:
        OSError: The server cannot be reached, is too slow or refuses it.
    """
    from urllib.request import HTTPRedirectHandler, Request, build_opener

    class NoRedirect(HTTPRedirectHandler):
        """Treats redirects as errors: following most of them sends a GET without the content."""

        def redirect_request(self, *_: object) -> None:
            """Follow no redirect."""

    body = json.dumps(finite(content), default=str).encode()
    headers, parts = {"Content-Type": "application/json"}, urlsplit(url)
    user, at, host = parts.netloc.rpartition("@")
    if at:  # which urllib takes for a part of the host
        url, secret = parts._replace(netloc=host).geturl(), b64encode(unquote_to_bytes(user))
        headers["Authorization"] = f"Basic {secret.decode()}"
    request = Request(url, body, headers)  # noqa: S310 (of the user)
    with build_opener(NoRedirect).open(request, timeout=_TIMEOUT):
        pass

"""The key set of the issuer of tokens (JWKS), from a file or a URL, kept in memory.

The set is read for the first token. It is read again for a token that arrives more than
``sasl.oauthbearer.jwks.endpoint.refresh.ms`` later or names a key that is not in the set, because issuers
replace their keys. It is read at most once in RETRY_MS, so that tokens with invented key ids can't make the
broker flood the issuer. If reading fails, the last keys stay in use.
"""

# Tests: tests/security/test_oauth_logins.py

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from http.client import HTTPException
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Final
from urllib.parse import urlsplit
from urllib.request import url2pathname, urlopen

from kafkalite.errors import SaslAuthenticationFailedError
from kafkalite.limits import MIB
from kafkalite.log_fields import Fields
from kafkalite.security.oauth import VerificationKey, check_installed, key_of, read_key_set

logger = logging.getLogger(__name__)

RETRY_MS: Final = 60_000
TIMEOUT_MS: Final = 3_000  #: of reading the whole key set
MAX_BYTES: Final = MIB
_REMOTE: Final = ("http", "https")


class TokenKeys:
    """Finds the keys of an issuer. Thread-safe. ``find`` may block while the key set is read.

    ``url`` is an ``http:``, ``https:`` or ``file:`` URL, or the path of a file. Raises MissingExtraError.
    """

    def __init__(self, url: str, *, refresh_ms: int, monotonic_ms: Callable[[], int]) -> None:
        check_installed()
        self._url = url
        self._refresh_ms = refresh_ms
        self._now_ms = monotonic_ms
        self._lock = threading.Lock()  # held while the key set is read
        self._keys: dict[str, VerificationKey] = {}
        self._stale_ms: int | None = None  # when the keys are read again; None before the first time
        self._next_read_ms: int | None = None  # not before this time
        self._reader: threading.Thread | None = None  # of a read without a result so far

    def find(self, kid: str | None) -> VerificationKey:
        """Return the key that a token names. Raises SaslAuthenticationFailedError if it is not found."""
        key = self._known(kid)
        if key is None:
            with self._lock:
                key = self._known(kid)
                if key is None and self._may_read():
                    self._read()
                    key = key_of(self._keys, kid)
        if key is None:
            reason = (
                "names no key of the issuer" if self._keys else "can't be checked: the broker has no keys"
            )
            raise SaslAuthenticationFailedError(f"the token is refused: it {reason}")
        return key

    def _known(self, kid: str | None) -> VerificationKey | None:
        """Return the key in memory, or None if there is none, or if the keys must be read again now."""
        is_fresh = self._stale_ms is not None and self._now_ms() < self._stale_ms
        return key_of(self._keys, kid) if is_fresh or not self._may_read() else None

    def _may_read(self) -> bool:
        return self._next_read_ms is None or self._now_ms() >= self._next_read_ms

    def _read(self) -> None:
        self._next_read_ms = self._now_ms() + RETRY_MS  # first: other threads go on with the last keys
        try:
            keys = read_key_set(self._content())
        except (OSError, HTTPException, ValueError) as error:
            fields = Fields(url=self._url, reason=str(error), retry_s=RETRY_MS // 1000, keys=len(self._keys))
            logger.error("key set of tokens not read %s", fields)
        else:
            self._keys, self._stale_ms = keys, self._now_ms() + self._refresh_ms
            logger.info("key set of tokens read %s", Fields(url=self._url, keys=len(keys)))

    def _content(self) -> bytes:
        """Return the contents. Raises OSError, HTTPException, and ValueError for more than MAX_BYTES.

        A daemon thread reads them, and this thread waits for it up to TIMEOUT_MS. The timeout of a socket is
        not sufficient, because an issuer may send one byte at a time. Such an issuer occupies only the daemon
        thread, which does not keep the process from exiting.
        """
        if self._reader is not None and self._reader.is_alive():  # after a timeout
            raise TimeoutError("the issuer has not completed its last response yet")
        results: SimpleQueue[bytes | Exception] = SimpleQueue()

        def read() -> None:
            try:
                results.put(self._downloaded())
            except Exception as error:
                results.put(error)

        self._reader = threading.Thread(target=read, name="kafkalite-token-keys", daemon=True)
        self._reader.start()
        try:
            found = results.get(timeout=TIMEOUT_MS / 1000)
        except Empty:
            raise TimeoutError(f"it was not complete after {TIMEOUT_MS} ms") from None
        self._reader = None
        if isinstance(found, Exception):
            raise found
        return found

    def _downloaded(self) -> bytes:
        parts = urlsplit(self._url)
        path = Path(url2pathname(parts.path) if parts.scheme == "file" else self._url)
        content = bytearray()
        with (
            urlopen(self._url, timeout=TIMEOUT_MS / 1000) if parts.scheme in _REMOTE else path.open("rb")
        ) as stream:
            while part := stream.read1(MAX_BYTES):
                content += part
                if len(content) > MAX_BYTES:
                    raise ValueError(f"it has more than {MAX_BYTES} bytes")
        return bytes(content)

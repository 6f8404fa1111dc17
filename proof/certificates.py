"""Certificates for the tests of TLS: an authority, certificates that it issued, and how to name them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from kafkalite.broker.config import BrokerConfig
from kafkalite.transport.dev_certificates import CA_CERTIFICATE, DevAuthority, make_dev_certificates

HOSTS: Final = ("localhost", "127.0.0.1", "::1")


class DevCertificates:
    """A directory with ``ca.pem`` of the authority, and keystores: ``broker.pem``, ``client.pem``, others."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        make_dev_certificates(directory, ["broker"], ["client"], HOSTS)
        self.authority = DevAuthority.read(directory)

    def __truediv__(self, name: str) -> Path:
        return self.directory / name

    def issue(self, name: str, common_name: str = "broker", **options: Any) -> Path:
        """Write the keystore ``name``; the other arguments are those of ``DevAuthority.issue``."""
        path = self.directory / name
        path.write_bytes(self.authority.issue(common_name, **{"hosts": HOSTS, **options}))
        return path

    def ssl(self, keystore: str | None = None, **settings: Any) -> dict[str, Any]:
        """Return the ``ssl_...`` settings of a side that trusts the authority and has ``keystore``."""
        own = {} if keystore is None else {"ssl_keystore_location": str(self / keystore)}
        return {"ssl_truststore_location": str(self / CA_CERTIFICATE), **own, **settings}

    def client(self, keystore: str | None = None, **settings: Any) -> dict[str, Any]:
        """Return the settings of a client."""
        return {"security_protocol": "SSL", **self.ssl(keystore, **settings)}

    def broker(self, keystore: str = "broker.pem", **settings: Any) -> dict[str, Any]:
        """Return the settings of a broker on a free port."""
        return {"listeners": "SSL://127.0.0.1:0", **self.ssl(keystore, **settings)}

    def config(self, keystore: str | None = None, **settings: Any) -> BrokerConfig:
        """Return a config with the settings of ``ssl``, for a TlsContext."""
        return BrokerConfig(**self.ssl(keystore, **settings))

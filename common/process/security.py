"""The shared token of a run and its certificates.

Only this module and `services/rollout/api_key_launcher.py`, which needs the standard library alone,
read them from the environment.

`API_TOKEN` is not a setting, so no file written by a run contains it. Every service requires it and
every client sends it as `Authorization: Bearer …`; when it is unset or empty, no service asks for
it.
"""

import hmac
import ipaddress
import os
import re
import ssl
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from common.errors import ConfigError

TOKEN = "API_TOKEN"  # noqa: S105
_TRACKERS = ("WANDB_API_KEY", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN")
_SECRETS = (
    TOKEN,
    "HF_TOKEN",
    "HUGGING_FACE_HUB_TOKEN",
    "JUDGE_API_KEY",
    "TEACHER_API_KEY",
    "TINKER_KEYS",
    *_TRACKERS,
)
_SHOWN = b"[secret]"
_SHORTEST = 16
_SAFE = re.compile(r"[A-Za-z0-9._~+/=-]+")  # the characters that RFC 6750 allows after "Bearer "


def token(env: Mapping[str, str] | None = None) -> str | None:
    """Returns the token of this run, or None. Raises ConfigError, without the value, if it is too
    short or cannot be sent.
    """
    value = (os.environ if env is None else env).get(TOKEN, "")
    if not value:
        return None
    problem = ""
    if len(value) < _SHORTEST:
        problem = f"has {len(value)} characters, but needs at least {_SHORTEST}"
    elif not _SAFE.fullmatch(value):
        problem = "has characters that cannot be sent in a header"
    if problem:
        raise ConfigError(
            f"the token {problem}", field=TOKEN, remedy="make a token with: openssl rand -hex 32"
        )
    return value


def authorization(env: Mapping[str, str] | None = None) -> dict[str, str]:
    """Returns the header that every client of the run sends; empty without a token."""
    value = token(env)
    return {"authorization": f"Bearer {value}"} if value else {}


def accepts(expected: str, headers: Iterable[tuple[bytes, bytes]]) -> bool | None:
    """Whether these headers (names in lower case) contain the token; None when they have no
    credentials.
    """
    given = [value.partition(b" ") for name, value in headers if name == b"authorization"]
    if not given:
        return None
    # The router sends two tokens, the caller's and its own. Tokens are compared in constant time.
    return all(
        hmac.compare_digest(value.strip(), expected.encode()) and scheme.lower() == b"bearer"
        for scheme, _, value in given
    )


class SecretRedactor:
    """Replaces the values of secret variables, of this process's environment or of others."""

    def __init__(self, *envs: Mapping[str, str]) -> None:
        values = [env.get(name, "") for env in envs or (os.environ,) for name in _SECRETS]
        found = {value.encode("utf-8", "surrogateescape") for value in values}
        self._secrets = sorted((value for value in found if len(value) >= 8), key=len, reverse=True)

    def redact_bytes(self, text: bytes) -> bytes:
        for secret in self._secrets:
            text = text.replace(secret, _SHOWN)
        return text

    def redact(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret.decode(errors="replace"), _SHOWN.decode())
        return text


def is_loopback(host: str) -> bool:
    """Whether a server at `host` is reachable only from this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@dataclass(frozen=True)
class Tls:
    """Files in PEM format. Without a certificate services speak plain HTTP."""

    certificate: str = ""
    key: str = ""
    authority: str = ""
    """Certificates that clients trust; the system's when empty."""

    @property
    def scheme(self) -> str:
        return "https" if self.certificate else "http"


def tls(env: Mapping[str, str] | None = None) -> Tls:
    """Reads TLS_CERT, TLS_KEY and TLS_CA. Raises ConfigError when one is missing or cannot be
    read.
    """
    env = os.environ if env is None else env
    found = {name: env.get(name, "") for name in ("TLS_CERT", "TLS_KEY", "TLS_CA")}
    if bool(found["TLS_CERT"]) != bool(found["TLS_KEY"]):
        missing = "TLS_KEY" if found["TLS_CERT"] else "TLS_CERT"
        raise ConfigError(
            "a certificate needs its key, and a key its certificate",
            field=missing,
            remedy=f"set {missing} too, or set neither",
        )
    for name, path in found.items():
        if path and not os.access(path, os.R_OK):
            raise ConfigError(
                "this file cannot be read",
                field=name,
                value=path,
                remedy="name a file in PEM format",
            )
    # In the order of its fields.
    return Tls(*(str(Path(path).absolute()) if path else "" for path in found.values()))


def check_certificate(files: Tls) -> None:
    """Raises ConfigError when certificate and key cannot be used together."""
    if not files.certificate:
        return
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(
            files.certificate, files.key, lambda: ""
        )
    except (ssl.SSLError, OSError, ValueError) as error:
        raise ConfigError(
            f"the certificate cannot be used: {error}",
            field="TLS_CERT, TLS_KEY",
            value=f"{files.certificate}, {files.key}",
            remedy="name a PEM certificate (its chain behind it) and its key without a passphrase",
        ) from None


def trusted() -> ssl.SSLContext:
    """Returns the TLS context of clients: it verifies names and dates, against TLS_CA if set.
    Raises ConfigError.
    """
    authority = tls().authority
    try:
        return ssl.create_default_context(cafile=authority or None)
    except (ssl.SSLError, OSError) as error:
        raise ConfigError(
            f"no certificate can be read: {error}",
            field="TLS_CA",
            value=authority,
            remedy="name a PEM file with certificates in TLS_CA",
        ) from None

"""A certificate authority and its certificate, made with openssl, for every address that a local
run may use."""

import subprocess
from dataclasses import dataclass
from pathlib import Path

NODES = [
    f"127.{block}.{task}.{node}"
    for block in range(1, 255)
    for task in range(1, 6)
    for node in (1, 2)
]


@dataclass(frozen=True)
class Certificates:
    """Files in PEM format."""

    authority: Path
    certificate: Path
    key: Path

    def env(self) -> dict[str, str]:
        return {
            "TLS_CERT": str(self.certificate),
            "TLS_KEY": str(self.key),
            "TLS_CA": str(self.authority),
        }


def make_certificates(directory: Path) -> Certificates:
    directory.mkdir(parents=True, exist_ok=True)
    made = Certificates(*(directory / name for name in ("ca.pem", "cert.pem", "key.pem")))
    names = ["DNS:localhost", *(f"IP:{address}" for address in ("127.0.0.1", *NODES))]
    extensions = f"subjectAltName={','.join(names)}\nbasicConstraints=CA:FALSE\nextendedKeyUsage=serverAuth\n"
    (directory / "extensions").write_text(extensions)
    new_key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
    _openssl(
        directory,
        "req",
        "-x509",
        *new_key,
        "-days",
        "2",
        "-subj",
        "/CN=test authority",
        "-keyout",
        "ca.key",
        "-out",
        "ca.pem",
    )
    _openssl(
        directory, "req", *new_key, "-subj", "/CN=test", "-keyout", "key.pem", "-out", "request.pem"
    )
    signed_by = (
        "-CA",
        "ca.pem",
        "-CAkey",
        "ca.key",
        "-CAcreateserial",
        "-days",
        "2",
        "-extfile",
        "extensions",
    )
    _openssl(directory, "x509", "-req", "-in", "request.pem", *signed_by, "-out", "cert.pem")
    return made


def _openssl(directory: Path, *words: str) -> None:
    subprocess.run(["openssl", *words], cwd=directory, check=True, capture_output=True)

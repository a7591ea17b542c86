"""Certificates for tests of TLS, made by openssl: a CA, what it signs, and what it has revoked."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

CONFIG = """
[ca]
default_ca = own
[own]
database = {folder}/index
new_certs_dir = {folder}
default_md = sha256
default_crl_days = 30
"""


class Authority:
    """A CA in `folder`; `cert` is what those who trust it are given."""

    def __init__(self, folder: Path, name: str) -> None:
        if shutil.which("openssl") is None:
            pytest.skip("no openssl here (apt-get install openssl)")
        self.folder = folder / name
        self.folder.mkdir(parents=True)
        self.cert, self._key = self.folder / "ca.pem", self.folder / "ca-key.pem"
        (self.folder / "config").write_text(CONFIG.format(folder=self.folder))
        (self.folder / "index").write_text("")
        self._openssl(
            *("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "30"),
            *("-subj", f"/CN={name}", "-keyout", self._key, "-out", self.cert),
        )

    def sign(self, name: str, *, usage: str = "serverAuth") -> tuple[Path, Path]:
        """A certificate for 127.0.0.1 and its key."""
        cert, key, asked, extensions = (self.folder / f"{name}{end}" for end in (".pem", "-key.pem", ".csr", ".ext"))
        extensions.write_text(f"subjectAltName=IP:127.0.0.1\nextendedKeyUsage={usage}\n")
        self._openssl(
            *("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-subj", f"/CN={name}"),
            *("-keyout", key, "-out", asked),
        )
        self._openssl(
            *("x509", "-req", "-in", asked, "-CA", self.cert, "-CAkey", self._key, "-CAcreateserial", "-days", "30"),
            *("-extfile", extensions, "-out", cert),
        )
        return cert, key

    def revoke(self, *certificates: Path) -> Path:
        """The list of revoked certificates, with these on it."""
        crl = self.folder / "crl.pem"
        ours = ("-config", self.folder / "config", "-keyfile", self._key, "-cert", self.cert)
        for certificate in certificates:
            self._openssl("ca", *ours, "-revoke", certificate)
        self._openssl("ca", *ours, "-gencrl", "-out", crl)
        return crl

    def _openssl(self, *arguments: str | Path) -> None:
        subprocess.run(["openssl", *arguments], check=True, capture_output=True)


def joined(folder: Path, *parts: Path) -> Path:
    """One PEM file with all parts, as haproxy wants certificate and key."""
    path = folder / f"{'+'.join(part.stem for part in parts)}-joined.pem"
    path.write_text("".join(part.read_text() for part in parts))
    return path

"""Temporary certificate authority for tests, and the files that services read."""

import datetime as dt
import ipaddress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from penstock_common.config.sections import ClientTlsConfig, TlsConfig
from penstock_common.rpc.credentials import ClientCredentials

DAY = dt.timedelta(days=1)


class Identity:
    """A certificate, its key, and the CA that peers must trust, as PEM. ``chain`` also has the issuer's certificate."""

    def __init__(self, certificate: bytes, key: bytes, ca: bytes) -> None:
        self.certificate = certificate
        self.key = key
        self.ca = ca

    def write(self, directory: Path) -> "Files":
        """Write ``tls.crt``, ``tls.key`` and ``ca.crt`` into a directory. Each file is replaced atomically."""
        directory.mkdir(exist_ok=True)
        for name, data in (("tls.crt", self.certificate), ("tls.key", self.key), ("ca.crt", self.ca)):
            replace(directory / name, data)
        return Files(directory)


class Files:
    """Paths of certificate files, and TLS configurations with these paths."""

    def __init__(self, directory: Path) -> None:
        self.certificate = str(directory / "tls.crt")
        self.key = str(directory / "tls.key")
        self.ca = str(directory / "ca.crt")

    def server(self, *, mutual: bool = True) -> TlsConfig:
        """Return the TLS config of a listener. ``mutual``: whether clients need certificates."""
        return TlsConfig(certificate=self.certificate, key=self.key, ca=self.ca if mutual else "")

    def client(self, *, server_name: str = "") -> ClientTlsConfig:
        """Return the TLS config of a client, which presents its certificate."""
        return ClientTlsConfig(ca=self.ca, certificate=self.certificate, key=self.key, server_name=server_name)

    def credentials(self, *, server_name: str = "") -> ClientCredentials:
        """Return credentials for channels of such a client."""
        return ClientCredentials(self.client(server_name=server_name), field="tls")


def replace(path: Path, data: bytes) -> None:
    """Write a file atomically: into a temporary file, then renamed over the old one."""
    beside = path.with_name(path.name + ".new")
    beside.write_bytes(data)
    beside.replace(path)


class Authority:
    """Certificate authority. ``ca`` is its certificate as PEM, which peers must trust."""

    def __init__(self, name: str = "test CA", *, days: int = 1) -> None:
        """Create the authority. ``days``: lifetime of its certificate."""
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        certificate = (
            _builder(self._name, self._name, self._key, days=days)
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .sign(self._key, hashes.SHA256())
        )
        self.ca = certificate.public_bytes(serialization.Encoding.PEM)

    def issue(
        self,
        *names: str,
        uris: tuple[str, ...] = (),
        expired: bool = False,
        early: bool = False,
        ca: bytes = b"",
        days: int = 1,
    ) -> Identity:
        """Issue a certificate for DNS names and URIs. It is also valid for 127.0.0.1 and localhost.

        ``expired``: it has expired. ``early``: it is not valid yet. ``ca``: CA that its owner trusts, by default this
        authority. ``days``: lifetime.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, names[0] if names else "nobody")])
        alternatives: list[x509.GeneralName] = [x509.DNSName(name) for name in (*names, "localhost")]
        alternatives += [x509.UniformResourceIdentifier(uri) for uri in uris]
        alternatives.append(x509.IPAddress(ipaddress.ip_address("127.0.0.1")))
        shift = -10 * DAY if expired else 10 * DAY if early else 0 * DAY
        certificate = (
            _builder(subject, self._name, key, shift, days=days)
            .add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        return Identity(
            certificate.public_bytes(serialization.Encoding.PEM),
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            ),
            ca or self.ca,
        )


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    shift: dt.timedelta = 0 * DAY,
    *,
    days: int,
) -> x509.CertificateBuilder:
    now = dt.datetime.now(dt.UTC) + shift
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - DAY)
        .not_valid_after(now + days * DAY)
    )

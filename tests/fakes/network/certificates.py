"""A throwaway certificate authority, and the files that a service reads of it."""

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
    """A certificate (its issuer's follows in ``chain``), its key, and the CA that peers should trust, as PEM."""

    def __init__(self, certificate: bytes, key: bytes, ca: bytes) -> None:
        self.certificate = certificate
        self.key = key
        self.ca = ca

    def write(self, directory: Path) -> "Files":
        """Put them into a directory as ``tls.crt``, ``tls.key`` and ``ca.crt``, each replaced at once."""
        directory.mkdir(exist_ok=True)
        for name, data in (("tls.crt", self.certificate), ("tls.key", self.key), ("ca.crt", self.ca)):
            replace(directory / name, data)
        return Files(directory)


class Files:
    """The paths that a configuration names, and the configurations that name them."""

    def __init__(self, directory: Path) -> None:
        self.certificate = str(directory / "tls.crt")
        self.key = str(directory / "tls.key")
        self.ca = str(directory / "ca.crt")

    def server(self, *, mutual: bool = True) -> TlsConfig:
        """A listener's. ``mutual``: its clients need certificates."""
        return TlsConfig(certificate=self.certificate, key=self.key, ca=self.ca if mutual else "")

    def client(self, *, server_name: str = "") -> ClientTlsConfig:
        """A client's, which shows its certificate."""
        return ClientTlsConfig(ca=self.ca, certificate=self.certificate, key=self.key, server_name=server_name)

    def credentials(self, *, server_name: str = "") -> ClientCredentials:
        """For channels of such a client."""
        return ClientCredentials(self.client(server_name=server_name), field="tls")


def replace(path: Path, data: bytes) -> None:
    """Write a file atomically: into a temporary file, then renamed over the old one."""
    beside = path.with_name(path.name + ".new")
    beside.write_bytes(data)
    beside.replace(path)


class Authority:
    """Issues certificates. ``ca`` is what its peers trust, as PEM."""

    def __init__(self, name: str = "test CA", *, days: int = 1) -> None:
        """``days``: how long its certificate lasts."""
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
        """A certificate for DNS names and URIs, good for 127.0.0.1 and localhost as well.

        ``expired``, ``early``: its time is over, or has not begun. ``ca``: what its bearer trusts, when not this
            authority.
        ``days``: how long it lasts.
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

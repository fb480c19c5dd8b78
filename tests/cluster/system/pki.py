"""The cluster's certificates.

One authority signs all certificates except the aggregation layer's, which has its own.
"""

import datetime as dt
import ipaddress
from dataclasses import dataclass
from pathlib import Path

import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from tests.cluster.system.addresses import API_SERVICE, CLUSTER_DOMAIN, CONTROL_PLANE

VALID = dt.timedelta(days=2)


@dataclass(frozen=True)
class KeyPair:
    """The paths of a certificate and its key, both PEM."""

    certificate: Path
    key: Path


class Authority:
    """Certificate authority that writes certificates into ``directory``.

    The authority's own certificate is ``NAME.crt``.
    """

    def __init__(self, directory: Path, name: str) -> None:
        self._directory = directory
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self._certificate = (
            _builder(self._name, self._name, self._key.public_key())
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .sign(self._key, hashes.SHA256())
        )
        self.pair = _write(directory, name, self._certificate, self._key)

    def issue(self, name: str, *, user: str, groups: tuple[str, ...] = (), hosts: tuple[str, ...] = ()) -> KeyPair:
        """Issue a certificate in ``NAME.crt`` for ``user`` in ``groups``, and for a server with the names ``hosts``."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name(
            [
                x509.NameAttribute(NameOID.COMMON_NAME, user),
                *(x509.NameAttribute(NameOID.ORGANIZATION_NAME, group) for group in groups),
            ]
        )
        usages = [ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH]
        builder = _builder(subject, self._name, key.public_key()).add_extension(
            x509.ExtendedKeyUsage(usages), critical=False
        )
        if hosts:
            builder = builder.add_extension(
                x509.SubjectAlternativeName([_host(host) for host in hosts]), critical=False
            )
        return _write(self._directory, name, builder.sign(self._key, hashes.SHA256()), key)


@dataclass(frozen=True)
class Pki:
    """All certificates, keys and kubeconfigs of the control plane and the nodes."""

    directory: Path
    authority: Authority
    front_proxy_authority: Authority

    @classmethod
    def create(cls, directory: Path) -> "Pki":
        """Create the authorities, and the key that signs service account tokens."""
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "service-account.key").write_bytes(
            rsa.generate_private_key(public_exponent=65537, key_size=2048).private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        return cls(directory, Authority(directory, "ca"), Authority(directory, "front-proxy-ca"))

    @property
    def service_account_key(self) -> Path:
        """Return the private key that signs service account tokens."""
        return self.directory / "service-account.key"

    def api_server(self) -> KeyPair:
        """Certificate that the API server presents inside and outside of the cluster."""
        hosts = (
            "kubernetes",
            "kubernetes.default",
            "kubernetes.default.svc",
            f"kubernetes.default.svc.{CLUSTER_DOMAIN}",
        )
        return self.authority.issue(
            "kube-apiserver",
            user="kube-apiserver",
            hosts=(*hosts, "localhost", "127.0.0.1", CONTROL_PLANE, API_SERVICE),
        )

    def front_proxy(self) -> KeyPair:
        """Client certificate that the API server presents to servers of aggregated APIs."""
        return self.front_proxy_authority.issue("front-proxy-client", user="front-proxy-client")

    def kubeconfig(self, name: str, *, user: str, groups: tuple[str, ...] = ()) -> Path:
        """Write a kubeconfig for ``user`` into ``NAME.kubeconfig``."""
        pair = self.authority.issue(name, user=user, groups=groups)
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "clusters": [
                {
                    "name": "test",
                    "cluster": {
                        "server": f"https://{CONTROL_PLANE}:6443",
                        "certificate-authority": str(self.authority.pair.certificate),
                    },
                }
            ],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": name, "namespace": "default"}}],
            "users": [
                {"name": name, "user": {"client-certificate": str(pair.certificate), "client-key": str(pair.key)}}
            ],
        }
        path = self.directory / f"{name}.kubeconfig"
        path.write_text(yaml.safe_dump(config))
        return path


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _builder(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
    now = dt.datetime.now(dt.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(hours=1))
        .not_valid_after(now + VALID)
    )


def _write(directory: Path, name: str, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> KeyPair:
    pair = KeyPair(directory / f"{name}.crt", directory / f"{name}.key")
    pair.certificate.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    pair.key.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return pair

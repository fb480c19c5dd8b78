"""TLS credentials for gRPC servers and channels."""

from collections.abc import Sequence

import grpc

from penstock_common.config.sections import ClientTlsConfig, TlsConfig
from penstock_common.security.tls import Certificates, TlsMaterial, watched_material

_ADVICE = {
    "certificate has expired": "the server's certificate has expired",
    "certificate is not yet valid": "the server's certificate is not valid yet",
    "CERTIFICATE_VERIFY_FAILED": "no authority in tls.ca has issued the server's certificate",
    "Hostname Verification": "the server's certificate does not contain the host's name; see tls.server_name",
    "WRONG_VERSION_NUMBER": "the server does not use TLS; give the server a certificate, or leave tls.ca empty",
}


def server_credentials(
    config: TlsConfig, *, field: str, certificates: Certificates | None = None
) -> grpc.ServerCredentials:
    """Return credentials that use the current files at each handshake. Raises ConfigError if the TLS files cannot be
    used.

    New files do not affect open connections. ``certificates`` receives the expiry times of these certificates.
    """
    watched = watched_material(config, field=field, certificates=certificates)
    used = watched.current()

    def newer() -> grpc.ServerCertificateConfiguration | None:
        """Return a new certificate configuration, or None if the TLS files are unchanged.

        gRPC calls this function before each handshake, on a thread of gRPC.
        """
        nonlocal used
        material = watched.current()
        if certificates is not None:
            certificates.handshake(field, material.ends)
        if material is used:
            return None
        used = material
        return _configuration(material)

    return grpc.dynamic_ssl_server_credentials(
        _configuration(used),
        newer,  # type: ignore[arg-type]  # None is documented but missing in the stub
        require_client_authentication=bool(config.ca),
    )


class ClientCredentials:
    """Credentials for the client channels to one service. A channel uses the content of the TLS files at the time when
    the channel is created. Without TLS settings, channels do not use TLS.
    """

    def __init__(self, config: ClientTlsConfig, *, field: str, certificates: Certificates | None = None) -> None:
        """Read the TLS files. Raises ConfigError if the files cannot be used. ``certificates`` receives the expiry
        times of these certificates.
        """
        self._watched = watched_material(config, field=field, certificates=certificates) if config.enabled else None
        self._server_name = config.server_name

    def channel(
        self,
        address: str,
        options: Sequence[tuple[str, int | str]] = (),
        interceptors: Sequence[grpc.aio.ClientInterceptor] = (),
    ) -> grpc.aio.Channel:
        """Return a new channel with these options."""
        if self._watched is None:
            return grpc.aio.insecure_channel(address, options, interceptors=interceptors)
        material = self._watched.current()
        credentials = grpc.ssl_channel_credentials(material.ca, material.key or None, material.certificate or None)
        if self._server_name:
            options = [*options, ("grpc.ssl_target_name_override", self._server_name)]
        return grpc.aio.secure_channel(address, credentials, options, interceptors=interceptors)


NO_TLS = ClientCredentials(ClientTlsConfig(), field="tls")


def is_of_tls(details: str) -> bool:
    """Return whether the details of a failed call name TLS as the cause. If so, a server listens at the address."""
    return any(sign in details for sign in _ADVICE)


def advised(details: str) -> str:
    """Return the details of a failed call, with an explanation if TLS is the cause of the failure."""
    for sign, meaning in _ADVICE.items():
        if sign in details:
            return f"{details} ({meaning})"
    return details


def _configuration(material: TlsMaterial) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration(
        [(material.key, material.certificate)], root_certificates=material.ca or None
    )

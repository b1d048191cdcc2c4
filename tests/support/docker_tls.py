"""An engine's socket behind TLS, as `dockerd --tlsverify` offers it: an authority of its own, and papers for all."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import ssl
from collections.abc import AsyncIterator
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID


class Authority:
    """Signs certificates, and keeps them as the engine's clients want them: ca.pem, cert.pem and key.pem."""

    def __init__(self) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "authority of a test")])
        usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
        self._own = (
            self._unsigned(self._name, self._key)
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .add_extension(usage, critical=True)
            .sign(self._key, hashes.SHA256())
        )

    def directory(self, path: Path) -> Path:
        """Write the papers of somebody who may be server and client at 127.0.0.1; the directory."""
        path.mkdir()
        key = ec.generate_private_key(ec.SECP256R1())
        usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        made = (
            self._unsigned(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test")]), key)
            .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), critical=False)
            .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        pem = serialization.Encoding.PEM
        (path / "ca.pem").write_bytes(self._own.public_bytes(pem))
        (path / "cert.pem").write_bytes(made.public_bytes(pem))
        (path / "key.pem").write_bytes(
            key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        )
        return path

    def _unsigned(self, name: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + datetime.timedelta(hours=1))
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        )


@contextlib.asynccontextmanager
async def behind_tls(socket: str, papers: Path) -> AsyncIterator[str]:
    """Relay a port with TLS to an engine's socket; its endpoint."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=papers / "ca.pem")
    context.load_cert_chain(papers / "cert.pem", papers / "key.pem")
    context.verify_mode = ssl.CERT_REQUIRED
    clients: set[asyncio.StreamWriter] = set()

    async def copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(65536):
                target.write(data)
                await target.drain()
        target.close()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        clients.add(writer)
        there, back = await asyncio.open_unix_connection(socket)
        await asyncio.gather(copy(reader, back), copy(there, writer))

    server = await asyncio.start_server(relay, "127.0.0.1", 0, ssl=context)
    try:
        yield f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for writer in clients:
            writer.close()
        await server.wait_closed()

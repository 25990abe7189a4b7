"""Who may talk to whom: a certificate authority, the server's certificate, and a key per site.

For trying a federation out, and for small ones. A hospital will have an authority of its own: put
its certificates where these lie. A site's private key is best made at the site (`ssfl site init`)
and never leaves it; the coordinator needs the public half alone.
"""

import datetime
import ipaddress
import os
import re
from collections.abc import Sequence
from pathlib import Path
from shlex import quote

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from ssfl.errors import ConfigError

LOOPBACK = ("localhost", "127.0.0.1", "::1")
"""The coordinator talks to its own SuperLink by these."""
LONGEST = 36500
"""Days that a certificate may be for."""


def make_authority(folder: Path, hosts: Sequence[str], days: int = 365) -> None:
    """A CA (ca.pem, ca.key) and a certificate for a server known as `hosts` (server.pem, .key)."""
    if not 0 < days <= LONGEST:
        raise ConfigError(f"--days {days}: give a number from 1 to {LONGEST}")
    names = list(dict.fromkeys([*hosts, *LOOPBACK]))
    alternatives = x509.SubjectAlternativeName(list(map(_san, names)))
    for name in ("ca.key", "server.key"):
        if (folder / name).exists():
            raise ConfigError(f"{folder / name} exists already: give another folder, or remove it")
    folder.mkdir(parents=True, exist_ok=True)
    ca_key, server_key = ec.generate_private_key(ec.SECP384R1()), _new_key()
    authority = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "ssfl federation CA")])
    ca = (
        _certificate(authority, authority, ca_key.public_key(), days)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs=True), critical=True)
        .add_extension(_key_name(ca_key), critical=False)
        .sign(ca_key, hashes.SHA384())
    )
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, names[0][:64])])
    server = (
        _certificate(subject, authority, server_key.public_key(), days)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(alternatives, critical=False)
        .add_extension(_usage(signs=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False
        )
        .sign(ca_key, hashes.SHA384())
    )
    (folder / "ca.pem").write_bytes(ca.public_bytes(Encoding.PEM))
    (folder / "server.pem").write_bytes(server.public_bytes(Encoding.PEM))
    write_secret(folder / "ca.key", _pem(ca_key))
    write_secret(folder / "server.key", _pem(server_key))


def make_site_key(folder: Path) -> Path:
    """A key pair for a site (site.key, site.pub); gives the public half's path."""
    private, public = folder / "site.key", folder / "site.pub"
    if private.exists():
        raise ConfigError(
            f"{private} exists already, and a new key would lock this site out: change what is in "
            f"{folder / 'site.toml'}, start with other images by `ssfl site start "
            f"{quote(str(folder))} --data FOLDER`, or make the site in another folder"
        )
    folder.mkdir(parents=True, exist_ok=True)
    key = _new_key()
    write_secret(private, key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
    public.write_bytes(key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH))
    return public


def write_secret(path: Path, content: bytes) -> None:
    """Write what only its owner may read."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(handle, "wb") as file:
        file.write(content)


def check_authority(certificate: Path) -> None:
    """Say what is wrong with a ca.pem before a site relies on it."""
    try:
        x509.load_pem_x509_certificates(certificate.read_bytes())
    except (OSError, ValueError):
        raise ConfigError(
            f"{certificate} is no certificate: ask the coordinator for the federation's ca.pem"
        ) from None


def check_dates(certificate: Path) -> None:
    """Say that a certificate is of the past, which nobody would believe any more."""
    try:
        ends = x509.load_pem_x509_certificate(certificate.read_bytes()).not_valid_after_utc
    except (OSError, ValueError) as error:
        raise ConfigError(f"{certificate} is no certificate: {error}") from None
    if ends < datetime.datetime.now(datetime.UTC):
        raise ConfigError(
            f"{certificate} has expired ({ends:%Y-%m-%d}): renew yours, or make others with "
            "`ssfl certs` in a new folder, put its ca.pem into every site's folder, and copy "
            "keys/sites over"
        )


def server_names(certificate: Path) -> list[str]:
    """The hosts that a server certificate is for."""
    try:
        parsed = x509.load_pem_x509_certificate(certificate.read_bytes())
        names = parsed.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (OSError, ValueError, x509.ExtensionNotFound) as error:
        raise ConfigError(f"{certificate} is not a server certificate: {error}") from None
    hosts = names.get_values_for_type(x509.DNSName)
    return [*hosts, *(str(ip) for ip in names.get_values_for_type(x509.IPAddress))]


def _new_key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP384R1())


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))


def _key_name(key: ec.EllipticCurvePrivateKey) -> x509.SubjectKeyIdentifier:
    return x509.SubjectKeyIdentifier.from_public_key(key.public_key())


def _certificate(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))
        .not_valid_after(now + datetime.timedelta(days=days))
    )


def _san(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        if re.fullmatch(r"[\w*-]{1,63}(\.[\w-]{1,63})*", host, re.ASCII) is None:
            raise ConfigError(
                f"--host {host}: give a name like fl.example.org, or an address, without a port"
            ) from None
        return x509.DNSName(host)


def _usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs,
        key_cert_sign=signs,
        crl_sign=signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )

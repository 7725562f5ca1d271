"""Private keys, and files that only their owner may read."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from dpscaffold.atomic import sync_folder
from dpscaffold.deployment.protocol.messages import new_key, public_of
from dpscaffold.errors import BadInput

PEM = serialization.Encoding.PEM


def make_signing_key(path: Path) -> str:
    """A new Ed25519 key in a file of mode 0600; returns its public half."""
    key = new_key()
    write_secret(path, private_pem(key))
    return public_of(key)


def make_node_key(path: Path) -> str:
    """A new ECDSA P-384 key in a file of mode 0600; returns its public half in PEM."""
    key = ec.generate_private_key(ec.SECP384R1())
    write_secret(path, private_pem(key))
    public = key.public_key().public_bytes(PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    return public.decode()


def read_signing_key(path: Path) -> Ed25519PrivateKey:
    """The Ed25519 key in a file that only its owner can read."""
    key = read_private_key(path)
    if not isinstance(key, Ed25519PrivateKey):
        raise BadInput(
            "wrong-key-kind", f"{path} holds another kind of key; an Ed25519 key is needed"
        )
    return key


def read_node_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """The node key in a file that only its owner can read."""
    key = read_private_key(path)
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.curve.name != "secp384r1":
        raise BadInput(
            "wrong-key-kind", f"{path} holds another kind of key; an ECDSA P-384 key is needed"
        )
    return key


def read_private_key(path: Path) -> object:
    """A private key of any kind in a file that only its owner can read."""
    content = read_secret(path)
    try:
        return serialization.load_pem_private_key(content, None)
    except (ValueError, TypeError) as error:
        raise BadInput(
            "not-a-private-key", f"{path} is not a private key in PEM without a password"
        ) from error


def read_secret(path: Path) -> bytes:
    """A file's content, refused where others can read it."""
    try:
        mode = path.stat().st_mode
        content = path.read_bytes()
    except OSError as error:
        raise BadInput("file-unreadable", f"{path} cannot be read: {error.strerror}") from error
    if stat.S_IMODE(mode) & 0o077:
        raise BadInput(
            "key-readable-by-others",
            f"{path} can be read by others (mode {stat.S_IMODE(mode):04o}); run chmod 600 {path}",
        )
    return content


def write_secret(path: Path, content: bytes) -> None:
    """A new file of mode 0600; an existing one is never overwritten."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise BadInput("keys-exist", f"{path} exists, and keys are never overwritten") from None
    with os.fdopen(handle, "wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())


def write_whole(path: Path, *pieces: bytes | memoryview) -> None:
    """Replace a file whole, readable by its owner alone, by these bytes one after the other; on
    disk when this returns."""
    partial = path.with_name(f".{path.name}.partial")
    handle = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        for piece in pieces:
            rest = memoryview(piece)
            while rest:
                rest = rest[os.write(handle, rest) :]  # a full disk raises on the next, empty write
        os.fsync(handle)
    finally:
        os.close(handle)
    os.replace(partial, path)
    sync_folder(path.parent)


def open_to_others(path: Path, bits: int) -> bool:
    """Whether users other than the owner have one of these permissions (such as 0o022, writing),
    and can reach the file through all its folders."""
    path = path.resolve()
    mode, folders = path.stat().st_mode & bits, [f.stat().st_mode for f in path.parents]
    group = bool(mode & 0o070) and all(folder & 0o011 for folder in folders)
    return group or (bool(mode & 0o007) and all(folder & 0o001 for folder in folders))


def private_pem(key: Ed25519PrivateKey | ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())

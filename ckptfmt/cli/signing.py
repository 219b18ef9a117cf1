"""``sign``: sign a checkpoint with a key, or add the signature of another program."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from ckptfmt.api import sign
from ckptfmt.cli.console import Console, clean, print_json
from ckptfmt.cli.places import open_place
from ckptfmt.errors import Code, err
from ckptfmt.signing.signer import Signer


def run(arguments: argparse.Namespace) -> int:
    """Sign a checkpoint, print the path of the signature, and return the exit code.

    Raises: StateError(ARGUMENT); TrustError(SIGNATURE_MISSING) for a bundle of another checkpoint;
        IntegrityError(NOT_COMMITTED and others); StoreError.
    """
    if (arguments.key is None) == (arguments.bundle is None):
        remedy = "Write `ckptfmt sign PATH --key FILE`, or `ckptfmt sign PATH --bundle FILE`."
        raise err(Code.ARGUMENT, "either --key or --bundle is needed", remedy=remedy)
    open_place(arguments.path)
    key = None
    bundle = None
    if arguments.key is not None:
        key = Signer(
            key=arguments.key,
            password=_read_password(arguments.password_env),
            certificates=arguments.certificates,
        )
    else:
        bundle = _read_bundle(arguments.bundle)
    signature = sign(arguments.path, key, bundle=bundle)
    if arguments.json:
        print_json({"target": arguments.path, "signature": signature})
        return 0
    told = "signed" if bundle is None else "added, not verified"
    Console().line((told, "green bold"), f"  {clean(arguments.path)}: {clean(signature)}")
    return 0


def _read_password(variable: str | None) -> str | None:
    """Return a password from the environment. Raises: StateError(ARGUMENT)."""
    if variable is None:
        return None
    if variable not in os.environ:
        remedy = f"Set {variable} to the password of the key."
        detail = f"the environment has no variable {variable!r}"
        raise err(Code.ARGUMENT, detail, where="--password-env", remedy=remedy)
    return os.environ[variable]


def _read_bundle(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        detail = f"the file can't be read: {error.strerror}"
        remedy = "Give the file of a bundle of Sigstore."
        raise err(Code.ARGUMENT, detail, where=path, remedy=remedy) from error

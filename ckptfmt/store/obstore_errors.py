"""Errors of obstore: their codes, remedies, and texts without secrets."""

from __future__ import annotations

import re
from typing import Final

from ckptfmt.errors import Code

#: Remedies by a part of the error's text.
_REMEDIES: Final = {
    "NoSuchBucket": "Create the bucket, or give the name of one that is there.",
    "InvalidUri": "Begin the endpoint (AWS_ENDPOINT_URL, or config=) with http:// or https://.",
    # The address of a cloud machine's credential service, used if the environment has no
    # credentials.
    "169.254.169.254": (
        "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY: this machine tells of no role."
    ),
}
_STATUS: Final = re.compile(r"status code: ([0-9]{3})")
#: The query of a URL may contain a signature, and the part before an @ a password.
_SECRETS: Final = re.compile(r"(?<=://)[^/@\s]*@|\?[^\s\"']*")
_TEXT_LENGTH: Final = 400


def is_panic(error: BaseException) -> bool:
    """Return whether an error is a panic: an unexpected error in obstore, and no `Exception`."""
    return type(error).__name__ == "PanicException"


def without_secrets(text: str) -> str:
    """Return a text without the possible credentials in URLs.

    >>> without_secrets("https://me:secret@host/a?X-Amz-Signature=1 is gone")
    'https://host/a is gone'
    """
    return _SECRETS.sub("", text)


def text_of(error: BaseException) -> str:
    """Return obstore's message for users.

    Text after the first line, or after a tag, is for obstore's developers and is left out.
    """
    return without_secrets(re.split(r"\n|: <", str(error), maxsplit=1)[0])[:_TEXT_LENGTH]


def code_of(error: BaseException, *, missing: Code) -> tuple[Code, str | None]:
    """Return the code for an error of obstore, and a remedy where the code's own doesn't fit.

    Args:
        missing: the code for a missing object.
    """
    known = next((remedy for part, remedy in _REMEDIES.items() if part in str(error)), None)
    code, remedy = _code_of(error, missing)
    return code, known or remedy


def _code_of(error: BaseException, missing: Code) -> tuple[Code, str | None]:
    kind = type(error).__name__
    text = str(error)
    status = status_of(error)
    if isinstance(error, FileNotFoundError) and "NoSuchBucket" not in text:
        return missing, None
    if "Quota" in text or status == 507:
        return Code.NO_SPACE, None
    is_denied = isinstance(error, PermissionError) or kind in (
        "PermissionDeniedError",
        "UnauthenticatedError",
    )
    if is_denied or status in (401, 403):
        return (
            Code.STORE_ACCESS,
            "Check the credentials, their permissions, and the name of the bucket.",
        )
    is_refused = status is not None and 400 <= status < 500 and status not in (408, 409, 429)
    is_ours = (
        isinstance(error, ValueError | TypeError | FileNotFoundError) or "builder error" in text
    )
    if is_refused or is_ours or is_panic(error):
        return Code.STORE_IO, None
    return (
        Code.STORE_NO_ANSWER,
        "Try again when it answers; if it never did, check the endpoint and the network.",
    )


def status_of(error: BaseException) -> int | None:
    """Return the status code of the HTTP answer in an error's text; None without a status code."""
    found = _STATUS.search(str(error))
    return int(found[1]) if found else None

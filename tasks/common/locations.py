"""Locations of files: a folder on this machine, or `s3://bucket/prefix` (AWS, MinIO, R2, Ceph, ...)
through s3fs.

Credentials, region and endpoint come only from the usual AWS environment and profiles
(`AWS_ACCESS_KEY_ID`, `AWS_PROFILE`, `AWS_ENDPOINT_URL`, ...): no parameter accepts them. A location
that contains a user name or a key is refused before it can reach a log. The libraries that sign
requests log them at debug level, session token included; this is disabled here.

An object appears atomically, and overwriting replaces it atomically. Left out: locking (S3 has
none), other stores."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import urlsplit

import fsspec
from aiohttp import ClientError as HttpError
from botocore import exceptions as boto

from tasks.common.files import ArtifactError, WriteError, explain_write

# Requests that are refused, time out, or get 5xx or "slow down" are repeated after a random wait of
# up to 1, 2, 4, 8, 16 seconds. So a server may be away for 15 seconds on average and 30 at most,
# and a server that accepts but never responds costs at most 80 seconds. AWS_MAX_ATTEMPTS sets
# another number of attempts. By default s3fs would repeat all of them five times.
ATTEMPTS = 6
CONNECT_SECONDS = 5
READ_SECONDS = 8

SIGNERS = ("aiobotocore", "boto3", "botocore", "s3fs", "s3transfer")
MISSING = (
    boto.NoCredentialsError,
    boto.PartialCredentialsError,
    boto.CredentialRetrievalError,
    boto.ProfileNotFound,
    boto.UnauthorizedSSOTokenError,
)
SILENT = (boto.HTTPClientError, boto.ConnectionError, HttpError, TimeoutError, ConnectionError)
UNREACHED = (OSError, boto.BotoCoreError, boto.ClientError, HttpError)
"""Exceptions of reading or writing a location that are not caused by its content."""


def is_remote(location: str) -> bool:
    """Return whether `location` is in a bucket. Raise ArtifactError if it is not valid."""
    scheme, separator, rest = location.partition("://")
    if not separator:
        return False
    if scheme != "s3":  # the rest may contain credentials
        raise ArtifactError(f"{scheme}:// is not a location: use a folder or s3://bucket/prefix")
    bucket = rest.partition("/")[0]
    if "@" in bucket or (":" in bucket and not bucket.startswith("arn:")):  # a secret may have a /
        raise ArtifactError(
            "a location (s3://) must not contain credentials: set AWS_ACCESS_KEY_ID and its secret"
        )
    if not rest.strip("/"):
        raise ArtifactError(f"{location!r} has no bucket: use s3://bucket/prefix")
    return True


def open_location(location: str) -> tuple[Any, str]:
    """Return the file system (fsspec) of `location`, and the path in it, without a trailing slash.

    This sends no request yet. Use the file system inside `reaching(location)`."""
    if not is_remote(location):
        return fsspec.filesystem("file"), str(Path(location).expanduser().absolute())
    quiet_loggers()
    url = urlsplit(named_endpoint() or "https://aws")
    if url.scheme not in ("http", "https") or "@" in url.netloc:
        raise ArtifactError(
            f"{location}: AWS_ENDPOINT_URL must be http://host:port or https://host without a path"
        )
    attempts = os.environ.get("AWS_MAX_ATTEMPTS", str(ATTEMPTS))
    if not attempts.isdecimal() or int(attempts) == 0:
        raise ArtifactError(f"AWS_MAX_ATTEMPTS is {attempts!r}: it must be a whole number above 0")
    config = {
        "connect_timeout": CONNECT_SECONDS,
        "read_timeout": READ_SECONDS,
        "retries": {"mode": "standard", "total_max_attempts": int(attempts)},
    }
    files = fsspec.filesystem("s3", config_kwargs=config, use_listings_cache=False)
    files.retries = 1  # else each attempt above counts five times
    return files, location.removeprefix("s3://").rstrip("/")


def quiet_loggers() -> None:
    """Keep the libraries that sign requests from logging them, whatever the program's log level
    is."""
    for name in SIGNERS:
        logger = logging.getLogger(name)
        logger.setLevel(max(logger.level, logging.WARNING))


@contextmanager
def reaching(location: str) -> Iterator[None]:
    """Turn an error in reading or writing `location` into an ArtifactError that states the remedy.
    The error is a WriteError if the local disk refused a write.

    This is not meant for damaged content: a caller that may set a damaged file aside reads its
    bytes inside this block, and parses them outside."""
    try:
        yield
    except WriteError:
        raise
    except UNREACHED as error:
        if not is_remote(location) and (message := explain_write(error, Path(location))):
            raise WriteError(message) from error
        why = explain(error) if is_remote(location) else getattr(error, "strerror", None) or error
        raise ArtifactError(f"{location}: {why}") from error


@contextmanager
def open_file(location: str) -> Iterator[BinaryIO]:
    """Yield the file at `location`, to be read in pieces. Raise the errors of `reaching`, also
    during reads."""
    files, path = open_location(location)
    with reaching(location), files.open(path, "rb") as file:
        yield file


def explain(error: Exception) -> str:
    """Return the fault and the remedy, without text in which a server or a library may quote a
    credential."""
    if isinstance(error, MISSING):
        return "no credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
    if isinstance(error, OSError) and error.filename:  # a full disk, or another user's folder
        return f"{error.filename}: {error.strerror}"
    if isinstance(error, PermissionError):
        return (
            f"access denied{code(error)}: check the credentials, and that they allow listing, "
            "reading and writing here"
        )
    if isinstance(error, FileNotFoundError):
        return (
            f"there is no such bucket or file{code(error)}: check its name and the endpoint "
            f"({endpoint()})"
        )
    if isinstance(error, SILENT):
        return (
            f"the server does not respond ({type(error).__name__}; endpoint: {endpoint()}). "
            "Earlier files are complete: run the same command again when it is back"
        )
    word = code(error) or f" ({getattr(error, 'strerror', None) or 'no reason given'})"
    return (
        f"{type(error).__name__}{word}; endpoint: {endpoint()}. Fix this, and run the same "
        "command again"
    )


def code(error: Exception) -> str:
    """Return the server's own error code, such as ` (NoSuchBucket)`, or an empty string."""
    response = getattr(error, "response", None) or getattr(error.__cause__, "response", None) or {}
    found = response.get("Error", {}).get("Code")
    return f" ({found})" if found else ""


def named_endpoint() -> str | None:
    """Return the S3 endpoint from the environment, or None."""
    return os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")


def endpoint() -> str:
    """Return a description of the S3 endpoint for messages."""
    return named_endpoint() or "the profile's, or AWS; set AWS_ENDPOINT_URL to change it"

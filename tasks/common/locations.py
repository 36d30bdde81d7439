"""Places where files lie: a folder of this machine, or `s3://bucket/prefix` (AWS, MinIO, R2, Ceph,
...) through s3fs.

Credentials, region and endpoint come from the usual AWS environment and profiles
(`AWS_ACCESS_KEY_ID`, `AWS_PROFILE`, `AWS_ENDPOINT_URL`, ...) and from nowhere else: no parameter
takes them. A location with a user name or a key in it is refused before it can reach a log. The
libraries that sign requests log them when they debug, session token included; here they never do.

An object appears whole or not at all, and overwriting replaces it whole. Left out: locking (S3 has
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

from tasks.common import disk
from tasks.common.files import ArtifactError, WriteError

# Requests that are refused, time out, or are answered with 5xx or "slow down" are sent again after
# a random wait of up to 1, 2, 4, 8, 16 seconds: a server may be away for a quarter of a minute (on
# average; half of one at most), and one that accepts and is silent costs at most 80 seconds.
# AWS_MAX_ATTEMPTS sets another number of tries. By itself s3fs would repeat all of it five times.
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
"""What reading or writing a location may raise, when it is not what is read that is wrong."""


def is_remote(location: str) -> bool:
    """Whether `location` is in a bucket; ArtifactError when it is neither that nor a path."""
    scheme, separator, rest = location.partition("://")
    if not separator:
        return False
    if "@" in rest.partition("/")[0]:
        raise ArtifactError(
            f"a location ({scheme}://) must not hold credentials: set AWS_ACCESS_KEY_ID and its "
            "secret"
        )
    if scheme != "s3":
        raise ArtifactError(f"{location!r} is not a location: give a folder or s3://bucket/prefix")
    if not rest.strip("/"):
        raise ArtifactError(f"{location!r} names no bucket: s3://bucket/prefix")
    return True


def open_location(location: str) -> tuple[Any, str]:
    """The file system (fsspec) that holds `location`, and the path in it, without a slash at its
    end.

    Nothing is asked of the server yet. Use it under `reaching(location)`.
    """
    if not is_remote(location):
        return fsspec.filesystem("file"), str(Path(location).expanduser().absolute())
    quiet_loggers()
    url = urlsplit(named_endpoint() or "https://aws")
    if url.scheme not in ("http", "https") or "@" in url.netloc:
        raise ArtifactError(
            f"{location}: AWS_ENDPOINT_URL must be http://host:port or https://host, and no more"
        )
    attempts = int(os.environ.get("AWS_MAX_ATTEMPTS", ATTEMPTS))
    config = {
        "connect_timeout": CONNECT_SECONDS,
        "read_timeout": READ_SECONDS,
        "retries": {"mode": "standard", "total_max_attempts": attempts},
    }
    files = fsspec.filesystem("s3", config_kwargs=config, use_listings_cache=False)
    files.retries = 1  # the attempts above are counted once, not five times over
    return files, location.removeprefix("s3://").rstrip("/")


def quiet_loggers() -> None:
    """Keep the libraries that sign requests from logging them, whatever level the program logs
    at."""
    for name in SIGNERS:
        logger = logging.getLogger(name)
        logger.setLevel(max(logger.level, logging.WARNING))


@contextmanager
def reaching(location: str) -> Iterator[None]:
    """Turn what goes wrong while `location` is read or written into an ArtifactError that says what
    to do.

    Damage to what is there is not meant: a caller that may set a damaged file aside reads its bytes
    in here, and looks at them outside."""
    try:
        yield
    except WriteError:
        raise
    except UNREACHED as error:
        if not is_remote(location) and (said := disk.explain(error, Path(location))):
            raise WriteError(said) from error
        why = explain(error) if is_remote(location) else getattr(error, "strerror", None) or error
        raise ArtifactError(f"{location}: {why}") from error


@contextmanager
def open_file(location: str) -> Iterator[BinaryIO]:
    """The file at `location`, to be read in pieces. Errors, also while it is read, as of
    `reaching`."""
    files, path = open_location(location)
    with reaching(location), files.open(path, "rb") as file:
        yield file


def explain(error: Exception) -> str:
    """What went wrong and what to do, without anything that a server or a library may quote from a
    credential."""
    if isinstance(error, MISSING):
        return "no credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
    if (
        isinstance(error, OSError) and error.filename
    ):  # of this machine: a disk may be full, a folder not ours
        return f"{error.filename}: {error.strerror}"
    if isinstance(error, PermissionError):
        return (
            f"access denied{code(error)}: check the credentials, and that they may list, read and "
            "write here"
        )
    if isinstance(error, FileNotFoundError):
        return (
            f"there is no such bucket or file{code(error)}: check its name and the endpoint "
            f"({endpoint()})"
        )
    if isinstance(error, SILENT):
        return (
            f"the server does not answer ({type(error).__name__}; endpoint: {endpoint()}). What "
            "was written before is "
            "whole: run the same command again when it is back"
        )
    word = code(error) or f" ({getattr(error, 'strerror', None) or 'no reason given'})"
    return (
        f"{type(error).__name__}{word}; endpoint: {endpoint()}. Run the same command again when "
        "that is repaired"
    )


def code(error: Exception) -> str:
    """The server's own word for the error, such as ` (NoSuchBucket)`, where it gave one."""
    response = getattr(error, "response", None) or getattr(error.__cause__, "response", None) or {}
    found = response.get("Error", {}).get("Code")
    return f" ({found})" if found else ""


def named_endpoint() -> str | None:
    """The endpoint that the environment names."""
    return os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")


def endpoint() -> str:
    """The endpoint in words."""
    return named_endpoint() or "that of the profile, or AWS; AWS_ENDPOINT_URL sets another"

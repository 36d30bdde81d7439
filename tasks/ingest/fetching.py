"""A source's file on this machine: a local path as it is; `s3://`, `https://`, `hf://datasets/...`
are fetched first.

What is parsed is always a complete local file, so a broken connection can neither shorten a source
nor leave half of it ingested. Hugging Face's files stay in its own cache; others are removed
afterwards. Left out: `http://` (anyone on the network could change golds), except on this machine's
loopback; patterns that name many files."""

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import urlsplit

import httpx
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

from tasks.common.files import ArtifactError, temporary_folder
from tasks.common.locations import is_remote, open_file, reaching
from tasks.common.progress import progress

HUB = re.compile(r"hf://datasets/(?P<name>[\w.-]+/[\w.-]+?)(@(?P<revision>[\w.-]+))?/(?P<file>.+)")
LOOPBACK = ("127.0.0.1", "localhost", "::1")
ATTEMPTS = 4  # of a download
SECONDS = 30.0  # without an answer from a web server
CHUNK = 1 << 20  # bytes


@contextmanager
def local_file(location: str, folder: Path | None) -> Iterator[Path]:
    """Yield the path of a complete copy of `location`, fetched if necessary into `folder` (None:
    the system's temporary folder).

    Raises ArtifactError naming the location and what to do."""
    scheme = location.partition("://")[0] if "://" in location else ""
    if scheme == "hf":
        yield from_hub(location)
    elif scheme in ("http", "https", "s3"):
        with temporary_folder(folder, "fetched") as temporary:
            target = temporary / "file"
            with target.open("wb") as file:
                (from_bucket if scheme == "s3" else from_web)(location, file)
            yield target
    else:
        is_remote(location)  # raises ArtifactError for any other scheme
        path = Path(location).expanduser().absolute()
        with reaching(location):
            path.open("rb").close()
        yield path


def from_bucket(location: str, file: BinaryIO) -> None:
    """Copy an object, piece by piece."""
    with open_file(location) as source:
        shutil.copyfileobj(source, file, CHUNK)


def from_hub(location: str) -> Path:
    """Return the file's path in the hub's cache. Credentials come from HF_TOKEN or `hf auth login`,
    never from params.yaml."""
    match = HUB.fullmatch(location)
    if match is None:
        raise ArtifactError(
            f"{location} is not a file of the hub: "
            "hf://datasets/ORG/NAME@REVISION/PATH/OF/THE/FILE is one"
        )
    try:
        found = hf_hub_download(
            match["name"], match["file"], repo_type="dataset", revision=match["revision"]
        )
    except LocalEntryNotFoundError as error:
        raise ArtifactError(
            f"{location} is not in the hub's cache, and the hub cannot be reached: connect, unset "
            "HF_HUB_OFFLINE, or download the file elsewhere and set its path"
        ) from error
    except (HfHubHTTPError, OSError, ValueError, httpx.HTTPError) as error:
        raise ArtifactError(f"{location}: {type(error).__name__}: {first_line(error)}") from error
    return Path(found)


def from_web(location: str, file: BinaryIO) -> None:
    """Download a file, again from the start when the connection breaks. What follows `?` in the
    address is never shown."""
    for attempt in range(1, ATTEMPTS + 1):
        file.seek(0)
        file.truncate()
        try:
            return download(location, file)
        except httpx.HTTPStatusError as error:
            status = error.response.status_code
            if status < 500 or attempt == ATTEMPTS:
                raise ArtifactError(
                    f"{shown(location)}: the server answers {status}: check the address"
                ) from error
        except httpx.HTTPError as error:
            if attempt == ATTEMPTS:
                raise ArtifactError(
                    f"{shown(location)} cannot be fetched ({type(error).__name__}, {ATTEMPTS} "
                    "attempts): run again later, or download the file elsewhere and set its path"
                ) from error
    raise AssertionError("the last attempt returns or raises")


def download(location: str, file: BinaryIO) -> None:
    """Make one attempt. httpx raises when fewer bytes arrive than were announced.

    Each hop of a redirection has a connection of its own: a server may close the one before without
    saying so, and a request sent on it would be lost."""
    # every redirection is checked like the first address
    hooks: dict[str, list[Any]] = {
        "request": [lambda request: check_address(str(request.url), location)]
    }
    with (
        httpx.Client(
            follow_redirects=True,
            timeout=SECONDS,
            event_hooks=hooks,
            headers={"Connection": "close"},
        ) as client,
        client.stream("GET", location) as response,
    ):
        response.raise_for_status()
        plain = "content-encoding" not in response.headers
        length = int(response.headers.get("content-length", 0)) if plain else 0
        with progress(length or None, "download", "B") as bar:
            for piece in response.iter_bytes(CHUNK):
                file.write(piece)
                bar.update(len(piece))


def check_address(address: str, location: str) -> None:
    """Raise ArtifactError for an address that is not encrypted or contains credentials."""
    url = urlsplit(address)
    if url.scheme != "https" and url.hostname not in LOOPBACK:
        raise ArtifactError(
            f"{shown(location)} leads to {url.scheme}://{url.hostname}: only https:// is read; use "
            "an address that stays encrypted"
        )
    if "@" in url.netloc:
        raise ArtifactError(
            f"an address (https://{url.hostname}) must not hold credentials: remove them"
        )


def shown(location: str) -> str:
    """Return a location for messages: without user, password, and what follows `?` (the key of a
    signed address)."""
    scheme, separator, rest = location.partition("://")
    if not separator:
        return location
    return f"{scheme}{separator}{rest.partition('@')[2] or rest}".partition("?")[0]


def first_line(error: Exception) -> str:
    """Return the first line of an error's message."""
    return (str(error).strip().splitlines() or [""])[0]

"""Provide a source's file on this machine: a local path is used directly; `s3://`, `https://` and
`hf://datasets/...` are fetched first.

The parsed file is always complete and local, so a broken connection cannot truncate a source or
leave it partly ingested. Files from Hugging Face stay in its cache; other fetched files are removed
afterwards. Not supported: `http://` (anyone on the network could change golds), except on this
machine's loopback; patterns that match several files."""

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import urlsplit

import fsspec
import httpx
import httpx2
from huggingface_hub import constants, hf_hub_download, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

from tasks.common.files import ArtifactError, temporary_folder
from tasks.common.locations import is_remote, open_file, reaching
from tasks.common.processes.ports import LOOPBACK
from tasks.common.progress import progress
from tasks.common.redaction import has_credentials

HUB = re.compile(r"hf://datasets/(?P<name>[\w.-]+/[\w.-]+?)(@(?P<revision>[\w.-]+))?/(?P<file>.+)")
ATTEMPTS = 4  # of a download
SECONDS = 30.0  # to wait for a web server
CHUNK = 1 << 20  # bytes


@contextmanager
def local_file(location: str, folder: Path | None, max_bytes: int | None = None) -> Iterator[Path]:
    """Yield the local path of the file at `location`. A remote file is fetched into `folder` (None:
    the system's temporary folder) or the hub's cache; with `max_bytes`, only its beginning.

    If it cannot be read, raise an ArtifactError that names the location and the remedy."""
    scheme = location.partition("://")[0] if "://" in location else ""
    if scheme == "hf" and max_bytes is None:
        yield from_hub(location)
    elif scheme in FETCHED:
        with temporary_folder(folder, "fetched") as temporary:
            target = temporary / "file"
            with target.open("wb") as file:
                FETCHED[scheme](location, file, max_bytes)
            yield target
    else:
        is_remote(location)  # raises ArtifactError for any other scheme
        path = Path(location).expanduser().absolute()
        with reaching(location):
            path.open("rb").close()
        yield path


def from_bucket(location: str, file: BinaryIO, max_bytes: int | None) -> None:
    """Copy an object in chunks, or its first `max_bytes`."""
    with open_file(location) as source:
        if max_bytes is not None:
            file.write(source.read(max_bytes))
            return
        shutil.copyfileobj(source, file, CHUNK)


def head_from_hub(location: str, file: BinaryIO, max_bytes: int | None) -> None:
    """Copy a hub file's first `max_bytes`; use the cache if it has the file, or when offline."""
    with reaching_hub(location) as match:
        name, file_name, revision = match["name"], match["file"], match["revision"]
        found = try_to_load_from_cache(name, file_name, repo_type="dataset", revision=revision)
        is_here = isinstance(found, str) or constants.HF_HUB_OFFLINE
        path = str(from_hub(location)) if is_here else location
        with fsspec.open(path, "rb") as source:
            file.write(source.read(max_bytes or -1))


def from_hub(location: str) -> Path:
    """Return the file's path in the hub's cache, after downloading it if it is not there."""
    with reaching_hub(location) as match:
        name, revision = match["name"], match["revision"]
        return Path(hf_hub_download(name, match["file"], repo_type="dataset", revision=revision))


@contextmanager
def reaching_hub(location: str) -> Iterator[re.Match[str]]:
    """Yield the match of HUB in `location`. Raise ArtifactError if there is none, and for errors in
    the block. Credentials come from HF_TOKEN or `hf auth login`, never from params.yaml."""
    match = HUB.fullmatch(location)
    if match is None:
        raise ArtifactError(
            f"{location} is not a file of the hub: "
            "hf://datasets/ORG/NAME@REVISION/PATH/OF/THE/FILE is one"
        )
    try:
        yield match
    except (LocalEntryNotFoundError, httpx2.TransportError) as error:
        raise ArtifactError(
            f"{location} is not in the hub's cache, and the hub cannot be reached: connect, unset "
            "HF_HUB_OFFLINE, or download the file elsewhere and set its path"
        ) from error
    except (HfHubHTTPError, OSError, ValueError, httpx2.HTTPError) as error:
        first_line = str(error).strip().partition("\n")[0]
        raise ArtifactError(f"{location}: {type(error).__name__}: {first_line}") from error


def from_web(location: str, file: BinaryIO, max_bytes: int | None) -> None:
    """Download a file or its first bytes. Start again if the connection breaks or the server fails
    (5xx). For other errors or after ATTEMPTS, raise ArtifactError."""
    for attempt in range(1, ATTEMPTS + 1):
        file.seek(0)
        file.truncate()
        try:
            return download(location, file, max_bytes)
        except httpx.HTTPStatusError as error:
            status = error.response.status_code
            if status < 500 or attempt == ATTEMPTS:
                raise ArtifactError(
                    f"{location}: the server responded with {status}: check the address"
                ) from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            if attempt == ATTEMPTS:
                raise ArtifactError(
                    f"{location} cannot be fetched ({type(error).__name__}, {ATTEMPTS} "
                    "attempts): run again later, or download the file elsewhere and set its path"
                ) from error
    raise AssertionError("the last attempt returns or raises")


def download(location: str, file: BinaryIO, max_bytes: int | None = None) -> None:
    """Make one download attempt, and stop after about `max_bytes`. httpx raises an error if fewer
    bytes arrive than Content-Length states.

    Each hop of a redirect uses its own connection: a server may close the previous one without
    notice, and a request sent on it would be lost."""
    # every redirect is checked like the first address
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
                if max_bytes is not None and file.tell() >= max_bytes:
                    return


def check_address(address: str, location: str) -> None:
    """Raise ArtifactError for an address with credentials, or without TLS except on loopback."""
    url = urlsplit(address)
    if url.scheme != "https" and url.hostname not in LOOPBACK:
        raise ArtifactError(
            f"{location} leads to {url.scheme}://{url.hostname}: only https:// is read; use "
            "an address that stays encrypted"
        )
    if has_credentials(address):
        raise ArtifactError(
            f"an address (https://{url.hostname}) must not contain credentials: remove them"
        )


FETCHED = {"hf": head_from_hub, "http": from_web, "https": from_web, "s3": from_bucket}

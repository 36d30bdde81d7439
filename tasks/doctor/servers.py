"""Whether the model servers of `engine.urls` answer, asked for their models as the engine asks."""

import json
import os
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

from tasks.common.files import ArtifactError
from tasks.engines.settings import parse_url

Values = Mapping[str, Any]
SECONDS = 5.0
REFUSED = (401, 403)


class NoRedirects(urllib.request.HTTPRedirectHandler):
    """The key is for the server that was named."""

    def redirect_request(self, *_: Any) -> None:
        return None


def check(values: Values) -> tuple[list[str], list[str]]:
    """(errors, remarks): a server that does not answer is an error where no other does, for the
    engine goes on with those that are there."""
    engine = values["engine"]
    if engine["name"] not in ("server", "auto"):
        return [], []
    wrong, silent = list[str](), list[str]()
    for url in engine["urls"]:
        try:
            ask(parse_url(url))
        except ArtifactError as error:
            wrong.append(str(error))
        except OSError as error:
            reason = getattr(error, "reason", None) or error
            silent.append(f"engine.urls: {url} does not answer ({reason})")
    if len(silent) == len(engine["urls"]):
        return [*wrong, *(f"{said}: start the server, or correct the URL" for said in silent)], []
    return wrong, silent


def ask(url: str) -> None:
    """Raise ArtifactError for an answer that no engine can use, and OSError where there is none."""
    key = os.environ.get("OPENAI_API_KEY", "")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), NoRedirects)
    try:
        with opener.open(
            urllib.request.Request(f"{url}/models", headers=headers), timeout=SECONDS
        ) as answer:
            models = json.loads(answer.read(1 << 20))
    except urllib.error.HTTPError as error:
        if error.code >= 500:  # it may be loading its model
            raise OSError(f"it answers {error.code}") from error
        why = "; set OPENAI_API_KEY" if error.code in REFUSED else ""
        raise ArtifactError(f"engine.urls: {url}/models answers {error.code}{why}") from error
    except ValueError as error:
        raise ArtifactError(f"engine.urls: {url}/models does not answer in JSON") from error
    if not isinstance(models, dict) or not models.get("data"):
        raise ArtifactError(f"engine.urls: {url}/models lists no model")

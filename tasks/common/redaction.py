"""Remove secrets from URLs, before they are shown or recorded."""

import re
from urllib.parse import urlsplit

ADDRESS = re.compile(
    r"""(?P<scheme>\b[a-z][a-z0-9+.-]*://)(?:[^/\s"'?]*@)?(?P<rest>[^\s"'?]*)(?:\?[^\s"']*)?""",
    re.IGNORECASE,
)


def without_secrets(text: str) -> str:
    """Return the text with every URL reduced to scheme, host and path. The user, the password and
    the query, which contains the key of a signed URL, are removed."""
    return ADDRESS.sub(r"\g<scheme>\g<rest>", text)


def has_credentials(address: str) -> bool:
    """Return whether a URL contains a user name or a password."""
    return "@" in urlsplit(address).netloc

"""Remove secrets from addresses, before they are shown or recorded."""

import re
from urllib.parse import urlsplit

ADDRESS = re.compile(
    r"""(?P<scheme>\b[a-z][a-z0-9+.-]*://)(?:[^/\s"'@?]*@)?(?P<rest>[^\s"'?]*)(?:\?[^\s"']*)?""",
    re.IGNORECASE,
)


def without_secrets(text: str) -> str:
    """Return the text with every address reduced to scheme, host and path: without user, password,
    and the query after `?`, the key of a signed address."""
    return ADDRESS.sub(r"\g<scheme>\g<rest>", text)


def has_credentials(address: str) -> bool:
    """Return whether an address contains a user or a password."""
    return "@" in urlsplit(address).netloc

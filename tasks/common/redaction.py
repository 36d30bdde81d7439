"""Find secrets in addresses, and remove them before an address is shown or recorded."""

import re

# A user name and a password. A password with a slash, as in many keys of buckets, follows a colon
# that does not begin a port; an access point (arn:) has colons without a password.
USER = r"""(?:[^/\s"'?]*@|(?!arn:)[^/\s"'@:]+:(?!\d{1,5}(?:[/?\s"']|$))[^\s"']*@)"""
SCHEME = r"\b[a-z][a-z0-9+.-]{0,19}://"
ADDRESS = re.compile(
    rf"""(?P<scheme>{SCHEME}){USER}?(?P<rest>[^\s"'?]*)(?:\?[^\s"']*[^\s"':;,.])?""", re.IGNORECASE
)
CREDENTIALS = re.compile(rf"\s*{SCHEME}{USER}", re.IGNORECASE)


def without_secrets(text: str) -> str:
    """Return the text with every URL reduced to scheme, host and path. The user, the password and
    the query, which contains the key of a signed URL, are removed."""
    return ADDRESS.sub(r"\g<scheme>\g<rest>", text)


def has_credentials(address: str) -> bool:
    """Return whether a text begins with a URL that contains a user name or a password."""
    return CREDENTIALS.match(address) is not None

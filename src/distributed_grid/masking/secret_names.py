"""Names of secrets: options, variables and keys whose value is a secret, and values that are none.

A name is compared in lower case with `_` between its parts: `--db-password`, `dbPassword` and `DB_PASSWORD` are one.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from typing import Final

MASK: Final = "***"
MIN_RANDOM_CHARS: Final = 20
MIN_ENTROPY_BITS: Final = 3.0
"""Per character: random hexadecimal digits have almost four, other random letters and digits more."""
MAX_NAME_CHARS: Final = 120
"""Of a longer name only the end counts."""

_CAMEL_CASE = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_SEPARATORS = re.compile(r"[^a-z0-9]+")
_GLUED_NAME = re.compile(r"-D(?=.)|-[A-Za-z](?=[A-Z][A-Z0-9_]+$)")
"""`-Dname` of Java, `-eNAME` of docker."""
_SECRET_NAME = re.compile(
    # with anything before it: PGPASSWORD, keyStorePassword, clientsecret
    r"(?:passwords?|passwd|passphrase|passwort|passcode|secrets?|api_?keys?|mnemonic)$"
    # a word of its own: MYSQL_PWD, --auth, X-Auth-Token
    r"|(?:^|_)(?:pass|pwd|pw|passw|tokens?|auth|authorization|bearer|credentials?|creds?|cookies?|dsn|webhook|otp|jwt"
    r"|passkey|psk)$"
    r"|(?:ssh|db|user|usr|my|mysql|pg|sql|smtp|mail|imap|ftp|root|admin|key|store|http|https|proxy|ldap|bind|redis"
    r"|mongo|login|auth|web|wifi|rcon|svn|vpn|vnc|rpc|api|app|zip|enc|cert|ca|bot)(?:pass|pwd)$"
    r"|(?:gh|git|github|gitlab|npm|auth|access|refresh|bot|api|csrf|xsrf|session|bearer|vault|slack|hf|id)token$"
    r"|(?:access|secret|private|session|signing|encryption|account|storage|master|shared|subscription|consumer|auth|app"
    r"|client|service|admin|deploy|hmac|jwt|webhook|instrumentation|ingest|write)_?keys?$"
    r"|(?:^|_)(?:user|so|token|card|security)_pin$|^pin$"
    r"|connection_?string$|webhook_url$|secret_key_base$|secret_?value$"
)
_NO_SECRET = re.compile(
    r"(?:^|_)(?:pad|bos|eos|unk|sep|cls|mask|special|image|stop|start|end|next|page|starting|continuation|sync|max|min"
    r"|num|n|new|total|per|context|prompt|completion|input|output|first|last|cancellation)_tokens?$"
    r"|(?:^|_)(?:first|second|last|single|two|multi|num|n|by|one|dry|high|low|band|all)_?pass$"
)
_KEY_LIKE = re.compile(r"(?:^|_)(?:keys?|hash|salt|seed_phrase|sas|sig|signature)$")
"""A secret if the value looks random."""
_PASSWORD_NAME = re.compile(r"passwords?$|passwd$|passphrase$|passcode$|pwd$|pw$")
_COUNTED = re.compile(r"tokens$")
_NUMBERED = re.compile(r"pass$")
_SWITCHES = frozenset(
    {"", "true", "false", "yes", "no", "none", "null", "nil", "auto", "on", "off", "ask", "prompt", "stdin", "-", MASK}
)
_SCHEMES = frozenset(
    {"basic", "bearer", "digest", "kerberos", "negotiate", "ntlm", "md5", "trust", "peer", "sasl", "ldap", "oauth"}
    | {"oauth2", "jwt", "token", "tokens", "anonymous", "required", "optional", "enabled", "disabled", "x509", "tls"}
    | {"plain", "login", "device", "gssapi", "scram-sha-256", "mtls", "iam", "apikey", "key", "password"}
)
_VARIABLE = re.compile(
    r"\$(?:[A-Z_][A-Z0-9_]*|[0-9@*#?]|\{\w+\}|\(.*)|%[A-Z_][A-Z0-9_]*%|\{\{.*\}\}|\$\{\{.*", re.DOTALL
)
_CODE_VARIABLE = re.compile(r"\$\{?\w+\}?")
_PATH = re.compile(
    r"(?:/|\./|~/|\.\./)|@[\w.~-]{0,80}[/.]|(?:env|file|fd|cmd):|op://|arn:aws|projects/|(?:id|src|type)="
)
_ONE_SLASH = re.compile(r"/[A-Za-z0-9+]{19,}={0,2}$")
"""A random text that only begins like a path."""
_FILE_NAME = re.compile(
    r"[\w./~+-]{1,200}\.(?:pem|key|crt|cer|der|p12|pfx|jks|json|ya?ml|txt|toml|ini|cfg|conf|env|gpg|asc|pub|keystore|sqlite)$",
    re.IGNORECASE,
)


def normal_name(name: str) -> str:
    """A name in lower case, its parts separated by `_`, without dashes before it."""
    name = name[-MAX_NAME_CHARS:]
    glued = _GLUED_NAME.match(name)
    plain = name[glued.end() :] if glued is not None else name
    return _SEPARATORS.sub("_", _CAMEL_CASE.sub("_", plain).lower()).strip("_")


def is_secret_name(name: str) -> bool:
    """True if the value of such an option, variable or key is a secret, whatever it looks like."""
    plain = normal_name(name)
    return _SECRET_NAME.search(plain) is not None and _NO_SECRET.search(plain) is None


def holds_secret(name: str, value: str, *, in_code: bool = False) -> bool:
    """True if a value of this name is a secret: by the name, or by a name like `key` and a value like a random one."""
    plain = normal_name(name)
    if not plain or _NO_SECRET.search(plain):
        return False
    if _SECRET_NAME.search(plain):
        return not (is_plain(plain, value) or is_reference(value, plain, in_code=in_code))
    return _KEY_LIKE.search(plain) is not None and not is_reference(value, plain, in_code=in_code) and is_random(value)


def is_plain(name: str, value: str) -> bool:
    """True if a value is only a switch, a scheme (`--auth basic`), or a number (`--max-tokens 512`, `-pass 2`)."""
    if value.isdecimal():
        return bool(_COUNTED.search(name)) or (len(value) <= 2 and bool(_NUMBERED.search(name)))
    lower = value.lower()
    return lower in _SWITCHES or (lower in _SCHEMES and name.endswith(("auth", "authorization")))


def is_reference(value: str, name: str = "", *, in_code: bool = False) -> bool:
    """True if a value only says where the secret is: a variable, or the path of a file."""
    if _VARIABLE.fullmatch(value) or (in_code and (value == "$" or _CODE_VARIABLE.fullmatch(value))):
        return True
    if _PATH.match(value):
        return _ONE_SLASH.match(value) is None or not is_random(value)
    return _FILE_NAME.match(value) is not None and _PASSWORD_NAME.search(name) is None


def is_random(value: str) -> bool:
    """True if a text is long, has letters and digits, and no order that one sees."""
    if len(value) < MIN_RANDOM_CHARS or "/" in value[1:2]:
        return False
    value = value[:1000]
    counts = Counter(value)
    bits = -sum(n / len(value) * math.log2(n / len(value)) for n in counts.values())
    return bits >= MIN_ENTROPY_BITS and any(c.isdigit() for c in value) and any(c.isalpha() for c in value)

"""Patterns of secrets: names whose value is a secret, forms of known tokens, options of well-known programs.

A name is compared in lower case with `_` between its parts: `--db-password`, `dbPassword` and `DB_PASSWORD` are one.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from typing import Final, NamedTuple

MASK: Final = "***"
MIN_RANDOM_CHARS: Final = 20
MIN_ENTROPY_BITS: Final = 3.0
"""Per character: random hexadecimal digits have almost four, other random letters and digits more."""
MAX_NAME_CHARS: Final = 120  # of a longer name only the end counts

_CAMEL_CASE = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_SEPARATORS = re.compile(r"[^a-z0-9]+")
_GLUED_NAME = re.compile(r"-D(?=.)|-[A-Za-z](?=[A-Z][A-Z0-9_]+$)")  # `-Dname` of Java, `-eNAME` of docker
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
_ONE_SLASH = re.compile(r"/[A-Za-z0-9+]{19,}={0,2}$")  # a random text that only begins like a path
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
    """True if the value of such an option, variable or key is always a secret."""
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
    """True if a value is a reference to the secret: a variable, or the path of a file."""
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


MIN_TOKEN_CHARS: Final = 15  # no token of a known kind is shorter
# The caller does not choose the words of a process: no pattern takes more than linear time, repetitions are bounded.
_W = r"[A-Za-z0-9_-]"
_SHAPES: Final = (
    r"A(?:KIA|SIA|GPA|IDA|ROA|BIA|CCA)[A-Z0-9]{16}",  # AWS
    rf"gh[pousr]_[A-Za-z0-9]{{16,}}|github_pat_{_W}{{16,}}",  # GitHub
    rf"gl(?:pat|dt|rt|cbt|ptt|ft|soat|agent|imt)-{_W}{{12,}}",  # GitLab
    rf"xox[abdeoprs]-{_W}{{10,}}|xapp-{_W}{{10,}}|xoxe\.xox[bp]-{_W}{{10,}}",  # Slack
    rf"sk-(?={_W}{{0,100}}[0-9]){_W}{{16,}}",  # OpenAI, Anthropic
    rf"[rs]k_(?:live|test|prod)_{_W}{{10,}}|whsec_{_W}{{16,}}",  # Stripe
    rf"hf_[A-Za-z0-9]{{16,}}|gsk_{_W}{{20,}}|r8_{_W}{{20,}}|nvapi-{_W}{{20,}}|pplx-{_W}{{20,}}|xai-{_W}{{20,}}",
    rf"AIza{_W}{{30,}}|ya29\.[A-Za-z0-9_.-]{{10,}}|GOCSPX-{_W}{{10,}}|1//0{_W}{{20,}}",  # Google
    rf"npm_[A-Za-z0-9]{{16,}}|pypi-(?={_W}{{0,100}}[0-9]){_W}{{16,}}|rubygems_[0-9a-f]{{20,}}",  # package registries
    rf"dckr_(?:pat|oat)_{_W}{{12,}}|do[opr]_v1_{_W}{{16,}}|tskey-{_W}{{12,}}|dapi[0-9a-f]{{32}}|pul-[0-9a-f]{{40}}",
    rf"SG\.{_W}{{10,}}\.{_W}{{10,}}|key-[0-9a-f]{{32}}|SK[0-9a-f]{{32}}|NRAK-[A-Z0-9]{{20,}}",
    rf"shp(?:at|ss|ca|pa)_[0-9a-fA-F]{{20,}}|sq0(?:atp|csp)-{_W}{{16,}}|lin_api_{_W}{{16,}}|figd_{_W}{{16,}}",
    rf"dp\.(?:pt|st|ct|sa)\.{_W}{{16,}}|{_W}{{14}}\.atlasv1\.{_W}{{20,}}|glsa_{_W}{{16,}}|glc_{_W}{{20,}}",
    rf"sntrys_{_W}{{16,}}|ATATT3{_W}{{16,}}|CFPAT-{_W}{{16,}}",
    rf"hv[sbr]\.{_W}{{12,}}|s\.(?=[A-Za-z]*[0-9])[A-Za-z0-9]{{24}}(?![A-Za-z0-9.])",  # Vault
    r"AGE-SECRET-KEY-[A-Z0-9]{10,}",
    rf"eyJ{_W}{{8,1500}}+\.[A-Za-z0-9_.-]{{8,}}",  # JSON web tokens, signature included
    rf"[0-9]{{8,10}}:AA{_W}{{30,}}",  # Telegram bots
)
_KNOWN = re.compile(rf"(?<![A-Za-z0-9])(?:{'|'.join(_SHAPES)})")
_PEM = re.compile(
    r"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY[A-Z ]{0,10}-----"
    r".*?(?:-----END [A-Z0-9 ]{0,40}PRIVATE KEY[A-Z ]{0,10}-----|\Z)",
    re.DOTALL,
)
_WEBHOOK = re.compile(
    r"(?P<kept>hooks\.slack\.com/(?:services|workflows)/|(?:discord|discordapp)\.com/api/webhooks/|webhook\.office\.com/)"
    r"[^\s'\"]+"
)


def mask_tokens(text: str) -> str:
    """A text without known tokens, private keys and webhook addresses."""
    if "-----BEGIN " in text:
        text = _PEM.sub(MASK, text)
    if "hook" in text:
        text = _WEBHOOK.sub(rf"\g<kept>{MASK}", text)
    if len(text) >= MIN_TOKEN_CHARS:
        text = _KNOWN.sub(MASK, text)
    return text


class ProgramSecrets(NamedTuple):
    """Places of secrets in the command line of one program."""

    options: frozenset[str] = frozenset()  # the next word is a secret
    glued: frozenset[str] = frozenset()  # the rest of the same word is one, too
    flags: str = ""  # one-letter options without a value that may precede the letter, as in `curl -su USER:PASSWORD`
    subcommand: frozenset[str] = frozenset()  # `options` and `glued` count only after one of these words
    allows_path: bool = False  # a path or `file:`, `env:` is no secret
    needs: str = ""  # a value is a secret only with this sign in it: `user%password`
    after: str = ""  # the word after which positions are counted; empty: the program
    positions: frozenset[int] = frozenset()  # the words there that are secrets, from 0, options not counted
    valued: frozenset[str] = frozenset()  # options whose value is no position
    has_settings: bool = False  # `NAME VALUE`: the word after the name of a secret is one


def _options(*names: str, **others: object) -> ProgramSecrets:
    return ProgramSecrets(frozenset(names), frozenset(name for name in names if len(name) == 2), **others)  # type: ignore[arg-type]


_P: Final = _options("-p")
_LOGIN: Final = _options("-p", subcommand=frozenset({"login"}))
_LDAP: Final = _options("-w", flags="xWZvnL")
_SETTINGS: Final = ProgramSecrets(has_settings=True)
_SNMP: Final = _options("-A", "-X", "-c")
_SMB: Final = _options("-U", "--user", needs="%")
_ORACLE: Final = ProgramSecrets(positions=frozenset({0}))

PROGRAM_SECRETS: Final[dict[str, ProgramSecrets]] = {
    **dict.fromkeys(("mysql", "mysqldump", "mysqladmin", "mysqlimport", "mysqlsh", "mysqlcheck", "mycli"), _P),
    **dict.fromkeys(("mariadb", "mariadb-dump", "mariadb-admin", "mariadb-import"), _P),
    **dict.fromkeys(("mongosh", "mongo", "mongodump", "mongorestore", "mongoexport", "mongoimport", "mongostat"), _P),
    **dict.fromkeys(("sshpass", "cqlsh", "rdesktop", "rabbitmqadmin", "ncftpput", "ncftpget", "twine"), _P),
    **dict.fromkeys(("docker", "podman", "nerdctl", "buildah", "skopeo", "oras", "crane", "regctl"), _LOGIN),
    **dict.fromkeys(("helm", "az", "cf", "oc", "ibmcloud", "singularity", "apptainer"), _LOGIN),
    **dict.fromkeys(("ldapsearch", "ldapmodify", "ldapadd", "ldapdelete", "ldapwhoami", "ldapcompare"), _LDAP),
    **dict.fromkeys(("snmpwalk", "snmpget", "snmpset", "snmpbulkwalk"), _SNMP),
    **dict.fromkeys(("smbclient", "smbget", "rpcclient", "winexe", "net"), _SMB),
    **dict.fromkeys(("sqlcmd", "bcp", "mosquitto_pub", "mosquitto_sub", "ipmitool"), _options("-P")),
    **dict.fromkeys(("zip", "unzip"), _options("-P", flags="qojrnul")),
    **dict.fromkeys(("7z", "7za", "7zz", "7zr", "rar", "unrar"), ProgramSecrets(glued=frozenset({"-p", "-hp"}))),
    **dict.fromkeys(("http", "https", "xh"), ProgramSecrets(frozenset({"-a", "--auth"}))),
    **dict.fromkeys(("git", "npm", "pnpm", "yarn", "pip", "pip3", "poetry", "gcloud", "conda", "composer"), _SETTINGS),
    **dict.fromkeys(("aws", "nmcli", "pdftk", "dvc", "bundle", "nuget", "snap"), _SETTINGS),
    **dict.fromkeys(("sqlplus", "rman", "expdp", "impdp", "sqlldr"), _ORACLE._replace(needs="/")),
    "restic": _options("-p", allows_path=True),
    "ldappasswd": _options("-w", "-s", "-a"),
    "redis-cli": ProgramSecrets(frozenset({"-a"}), after="AUTH", positions=frozenset({0, 1})),
    "curl": _options("-u", "--user", "-U", "--proxy-user", flags="fgiIkLnNOqRsSvZ46#"),
    "openssl": ProgramSecrets(
        frozenset({"-passin", "-passout", "-pass", "-password", "-k", "-K", "-passcerts"}), allows_path=True
    ),
    "lftp": _options("-u"),
    "etcdctl": ProgramSecrets(frozenset({"--user"}), needs=":"),
    "ssh-keygen": ProgramSecrets(frozenset({"-N", "-P"})),
    "doctl": ProgramSecrets(frozenset({"-t"})),
    "swaks": ProgramSecrets(frozenset({"-ap"})),
    "sendemail": ProgramSecrets(frozenset({"-xp"})),
    "kubectl": ProgramSecrets(frozenset({"--from-literal"})),
    "gh": ProgramSecrets(frozenset({"-b", "--body"}), subcommand=frozenset({"secret"})),
    "htpasswd": ProgramSecrets(positions=frozenset({2}), valued=frozenset({"-C", "-r"})),
    "vault": ProgramSecrets(after="login", positions=frozenset({0})),
    "pulumi": ProgramSecrets(after="set", positions=frozenset({1}), has_settings=True),
    "rabbitmqctl": ProgramSecrets(after="add_user", positions=frozenset({1})),
    "wpa_passphrase": ProgramSecrets(positions=frozenset({1})),
    "mc": ProgramSecrets(after="set", positions=frozenset({2, 3})),
}
"""By the name of the program. psql, ssh, scp, nmap, tar and others where `-p` is something else are not here."""

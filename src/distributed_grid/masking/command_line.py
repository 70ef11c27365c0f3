"""Command lines as they are shown: secrets are `***`, the other words stay as they are.

Better one word too many than one too few: the command runs as it was given, only the shown text differs, and a process
that seems to hold a secret is only not moved. Four rules, for the words of a command and for code in them (`sh -c`):

1. the value of an option, a variable or a key with the name of a secret (`is_secret_name`);
2. the options and words of well-known programs;
3. passwords in addresses, headers, queries, and SQL;
4. tokens and private keys that are known by their form.

A value that only says where the secret is (`$TOKEN`, `/run/secrets/db`) is shown. Time is linear in the length.

A name is compared in lower case with `_` between its parts: `--db-password`, `dbPassword` and `DB_PASSWORD` are one.
"""

from __future__ import annotations

import math
import re
import shlex
from collections import Counter
from collections.abc import Sequence
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


CUT_MARGIN_CHARS = 400
"""Of a text that is cut, so much more is kept until it is masked: no secret is cut where it begins."""
MAX_CODE_CHARS = 100_000
"""A longer word is not taken apart into commands, which takes ten times as long: only names and patterns count."""
MAX_DEPTH = 3  # code within code that is looked into
MAX_DECIDING_CHARS = 300  # of a value, to decide whether it is a secret
_SIGNS = re.compile(r"[=:@?\s]")  # a short word without one of these holds a secret only if it is one
_OPTION = re.compile(r"--?[A-Za-z][A-Za-z-]*(?:=.*)?", re.DOTALL)
_OPTION_NAME = re.compile(r"--?[A-Za-z][\w.-]{0,100}")
_ASSIGNED = re.compile(r"(?P<name>[A-Za-z0-9_./:@-]{1,120}?)(?P<sep>[=:])(?P<value>.+)", re.DOTALL)
_CODE_OPTION = re.compile(r"-[a-z]{0,6}c|--command|--eval")
_SETTING_WORDS = frozenset({"set", "config", "configure", "connect", "modify", "input_pw", "output"})
_RESET = re.compile(r"[;|&()`\n]")
_SHELL_WORD = re.compile(r"""(?:'[^']*+'|"(?:[^"\\]|\\.)*+"|\\.|[^\s'"\\;|&()<>`])++""", re.DOTALL)
_QUOTED = re.compile(r"""'[^']*+'|"(?:[^"\\]|\\.)*+\"""", re.DOTALL)
_SPACE = re.compile(r"\s")
_VERSION = re.compile(r"latest|stable|[0-9]{1,6}\.[0-9.]{1,12}")
_PIPED = re.compile(
    r"(?P<kept>\b(?:echo|printf)\s{1,4}(?:-n\s{1,4}|'?\"?%s[^\s]{0,4}\s{1,4})?)(?P<secret>'[^']{1,400}'|\"[^\"]{1,400}\"|[^\s'\"|]{1,400})"
    r"(?=\s{0,4}\|[^|]{0,200}(?:--password-stdin|--with-token|sudo\s{1,3}-S|chpasswd|passwd\s|--passphrase-fd|--stdin))"
)

# ----------------------------------------------------------------------- patterns for texts
_USERINFO = re.compile(r"://(?P<user>[^/\s:@'\"]{0,200}):(?![0-9]{1,5}(?:/|$))(?P<secret>[^\s'\"?#]{1,300})@")
_USER = re.compile(r"://(?P<secret>[^/\s:@'\"]{20,300})@")
_PROXY = re.compile(r"^(?P<user>[^/\s:@]{1,100}):(?P<secret>[^\s]{1,300})@")
_HEADER = re.compile(
    r"(?P<quote>['\"]?)(?<![a-z0-9-])(?P<name>(?:proxy-)?authorization|(?:set-)?cookie2?|x-[a-z0-9-]{0,40}?(?:key|token|secret|auth|password)"
    r"|(?:private|job|deploy|auth|access)-token|(?:[a-z]{2,20}-){0,3}api-?key|ocp-apim-subscription-key)"
    r"[ \t]{0,3}:[ \t]{0,3}(?P<scheme>(?:bearer|basic|token|digest|apikey|negotiate|aws4-hmac-sha256)[ \t]{1,3})?",
    re.IGNORECASE,
)
_BEARER = re.compile(r"(?P<kept>\bbearer[ \t+]{1,3}|\bbearer%20)(?P<secret>[A-Za-z0-9_.~+/=-]{8,})", re.IGNORECASE)
_QUERY = re.compile(
    r"(?P<kept>[?&](?:sig|signature|key|x-(?:amz|goog)-(?:signature|credential|security-token))=)(?P<secret>[^&\s'\"#]+)",
    re.IGNORECASE,
)
_NAMED = re.compile(r"(?<![\w.$-])(?P<name>[\w.-]++)\\?['\"]?\]?\s{0,3}(?P<sep>=>|:=|=(?!=)|:(?![:/]))\s{0,3}")
_UNQUOTED = re.compile(r"[^\s'\"&;,)}\]|<>`\\]{1,300}")
_UNQUOTED_REST = re.compile(r"[^\s'\"&;,)}\]|<>`\\]*")
_SQL = re.compile(
    r"(?P<kept>\b(?:password|identified\s{1,3}(?:with\s{1,3}\S{1,40}\s{1,3})?by)\s{1,3})(?P<secret>'[^']{1,400}'|\"[^\"]{1,400}\")",
    re.IGNORECASE,
)
_XML = re.compile(r"<(?P<name>[\w:.-]{1,60})>(?P<secret>[^<>]{1,400})(?=</)")
_WINDOWS_OPTION = re.compile(r"(?P<kept>^/(?:p|pass|password):)(?P<secret>.+)", re.IGNORECASE | re.DOTALL)


def mask_secrets(argv: Sequence[str]) -> tuple[tuple[str, ...], bool]:
    """The words of a command with secrets masked, and whether any was."""
    mask = _CommandMask(depth=0)
    is_title = len(argv) == 1  # a program that set its own title has one word with spaces
    masked = tuple(mask.word(word, is_code=is_title) for word in argv)
    return masked, masked != tuple(argv)


def mask_text(text: str) -> str:
    """A text (code, JSON, a log line) with secrets masked."""
    return _mask_code(text, 1)


def shown_command(argv: Sequence[str], max_chars: int = 0) -> str:
    """A command in one line for a person: quoted for a shell, masked, cut where it is longer than `max_chars`."""
    words = mask_secrets(argv)[0]
    needs_no_quotes = (
        MASK in word and shlex.quote(word.replace(MASK, "x")) == word.replace(MASK, "x") for word in words
    )
    text = " ".join(word if plain else shlex.quote(word) for word, plain in zip(words, needs_no_quotes, strict=True))
    return text if not max_chars or len(text) <= max_chars else text[: max_chars - 1] + "…"


class _CommandMask:
    """Masks the words of one command in order: earlier words decide about later ones."""

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self.reset()

    def reset(self) -> None:
        """Begin another command of the same code."""
        self._previous = ""
        self._secrets = _NOTHING
        self._program = ""
        self._flags = ""
        self._has_subcommand = False
        self._position = -1  # words since `after`; negative before it

    def word(self, word: str, *, is_code: bool = False) -> str:
        """The next word, masked."""
        previous, self._previous = self._previous, word
        masked = self._by_place(word, previous)
        if masked is None:
            is_code = is_code or bool(previous and _CODE_OPTION.fullmatch(previous))
            masked = self._by_form(word, is_code=is_code)
            if "proxy" in previous or previous == "-x":
                masked = _PROXY.sub(lambda found: _with_mask(found, "secret"), masked)
        return masked

    def _by_place(self, word: str, previous: str) -> str | None:
        """The word masked because of the words before it; None if they decide nothing."""
        secrets, value = self._secrets, _unquoted(word)
        is_option = word.startswith("-") and len(word) > 1
        if previous.startswith("-") and _OPTION_NAME.fullmatch(previous):
            # The next word is a secret because of the program.
            has_options = bool(secrets.options) and (self._has_subcommand or not secrets.subcommand)
            is_flagged = (
                bool(secrets.flags)
                and not previous.startswith("--")
                and f"-{previous[-1:]}" in secrets.options
                and all(flag in secrets.flags for flag in previous[1:-1])
            )
            takes_secret = has_options and (previous in secrets.options or is_flagged)
            if takes_secret and not _OPTION.fullmatch(word):
                return word if self._is_shown(value) else MASK
            if not _OPTION.fullmatch(word) and holds_secret(previous, value, in_code=self._depth > 0):
                return MASK
        if is_option:
            self._flags += word[1:20] if not word.startswith("--") else ""
            if secrets.subcommand and not self._has_subcommand:
                return None
            # An option of the program with its secret in the same word: `-pX` or `--user=X`.
            name, equals, value = word.partition("=")
            if equals and len(name) > 2 and name in secrets.options:
                return word if self._is_shown(_unquoted(value)) else f"{name}={MASK}"
            if word.startswith("--"):
                return None
            for option in secrets.glued:
                at = word.find(option[1:], 1)
                is_glued = at == 1 or (at > 1 and secrets.flags and all(flag in secrets.flags for flag in word[1:at]))
                end = at + len(option) - 1
                if is_glued and len(word) > end and not self._is_shown(_unquoted(word[end:])):
                    return word[:end] + MASK
            return None
        is_setting = secrets.has_settings and self._has_subcommand and not previous.startswith("-")
        if is_setting and holds_secret(previous, value, in_code=self._depth > 0):
            return MASK
        # A word that is no option: the program, a subcommand, or one at the place of a secret.
        name = value.rpartition("/")[2]
        follows_long_option = previous.startswith("--") and len(previous) > 2 and "=" not in previous
        if name in PROGRAM_SECRETS and not follows_long_option and (not self._program or self._position < 0):
            self._program, self._secrets = name, PROGRAM_SECRETS[name]
            self._has_subcommand, self._flags = False, ""
            self._position = 0 if not self._secrets.after and self._secrets.positions else -1
            return None
        if value in (_SETTING_WORDS if secrets.has_settings else secrets.subcommand):
            self._has_subcommand = True
        if secrets.after and value == secrets.after and self._position < 0:
            self._position = 0
            return None
        if self._program == "vault" and value == "unseal":
            self._position = 0
            return None
        if self._position >= 0 and previous not in secrets.valued:
            self._position += 1
            at, is_secret = self._position - 1, self._position - 1 in secrets.positions
            if self._program == "htpasswd":  # htpasswd -b FILE USER PASSWORD, htpasswd -nb USER PASSWORD
                is_secret = "b" in self._flags and at == (1 if "n" in self._flags else 2)
            if is_secret and "=" not in word and not is_reference(value):
                if self._program not in ("sqlplus", "rman", "expdp", "impdp", "sqlldr"):
                    return MASK
                user, slash, rest = value.partition("/")
                host = rest.rfind("@")
                return f"{user}/{MASK}{rest[host:] if host >= 0 else ''}" if slash and rest else None
        if self._program in ("smbclient", "smbget") and previous.startswith(("//", "\\\\")):
            return MASK
        return None

    def _is_shown(self, value: str) -> bool:
        secrets = self._secrets
        if secrets.needs and secrets.needs not in value:
            return True
        if value in ("", MASK, "stdin"):
            return True
        if secrets.allows_path:
            return is_reference(value, in_code=self._depth > 0)
        return value.startswith("$") and is_reference(value, in_code=self._depth > 0)

    def _by_form(self, word: str, *, is_code: bool) -> str:
        """The word masked by its own form."""
        if len(word) < MIN_TOKEN_CHARS and not _SIGNS.search(word):
            return word
        if not is_code:
            assigned = _masked_assignment(word, in_code=self._depth > 0)
            if assigned is not None:
                return assigned
            word = _WINDOWS_OPTION.sub(rf"\g<kept>{MASK}", word)
        if self._depth < MAX_DEPTH:
            if self._depth:  # a word of code has spaces only within quotes
                depth = self._depth + 1
                masked = _QUOTED.sub(
                    lambda quoted: (
                        f"{quoted[0][0]}{_mask_code(quoted[0][1:-1], depth)}{quoted[0][0]}"
                        if _SPACE.search(quoted[0])
                        else quoted[0]
                    ),
                    word,
                )
                return _mask_patterns(masked)
            if len(word) <= MAX_CODE_CHARS and _SPACE.search(word):
                return _mask_code(word, 1)
        return _mask_patterns(word)


_NOTHING = ProgramSecrets()


def _mask_code(text: str, depth: int) -> str:
    """Code or other text with spaces in it: its words as those of commands, then the patterns of the whole."""
    text = _PIPED.sub(lambda found: _with_mask(found, "secret", in_code=True), text)
    mask = _CommandMask(depth)
    parts: list[str] = []
    end = 0
    for found in _SHELL_WORD.finditer(text):
        between = text[end : found.start()]
        if _RESET.search(between):
            mask.reset()
        parts += (between, mask.word(found[0]))
        end = found.end()
    parts.append(text[end:])
    return _mask_patterns("".join(parts))


def _masked_assignment(word: str, *, in_code: bool, depth: int = 0) -> str | None:
    """`NAME=VALUE`, `--name=VALUE`, `name:VALUE` with the value masked; None where it holds no secret by its name."""
    match = _ASSIGNED.fullmatch(word)
    if match is None or "://" in match["name"] + match["sep"] + match["value"][:2]:
        return None
    name, sep, value = match["name"], match["sep"], match["value"]
    if sep == ":" and ("/" in name or _VERSION.fullmatch(value) or value[0].isspace()):
        return None
    if holds_secret(name, _unquoted(value), in_code=in_code):
        return f"{name}{sep}{MASK}"
    nested = _masked_assignment(value, in_code=in_code, depth=depth + 1) if sep == "=" and depth < MAX_DEPTH else None
    return f"{name}{sep}{nested}" if nested is not None else None


def _mask_patterns(text: str) -> str:
    """A text without secrets in addresses, headers, queries, SQL, and after names; without known tokens."""
    if "://" in text:
        text = _USERINFO.sub(lambda found: _with_mask(found, "secret", in_code=True), text)
        text = _USER.sub(lambda found: _with_mask(found, "secret") if is_random(found["secret"]) else found[0], text)
    if ":" in text or "=" in text:
        text = _mask_headers(text)
        text = _mask_named(text)
        text = _QUERY.sub(lambda found: _with_mask(found, "secret", in_code=True), text)
    if _SPACE.search(text):
        text = _BEARER.sub(lambda found: _with_mask(found, "secret", in_code=True), text)
        text = _SQL.sub(lambda found: _with_mask(found, "secret", in_code=True), text)
    if "</" in text:
        text = _XML.sub(
            lambda found: _with_mask(found, "secret") if holds_secret(found["name"], found["secret"]) else found[0],
            text,
        )
    return mask_tokens(text)


def _mask_headers(text: str) -> str:
    """`Authorization: …` and its like: masked to the closing quote, or else to the end of the line."""
    parts: list[str] = []
    end = 0
    while (match := _HEADER.search(text, end)) is not None:
        stop = text.find(match["quote"], match.end()) if match["quote"] else -1
        line = text.find("\n", match.end())
        stops = [at for at in (stop, line, len(text)) if at >= 0]
        value_end = min(stops)
        value = text[match.end() : value_end].strip()
        parts.append(text[end : match.end()])
        if value and not is_reference(value, in_code=True):
            parts.append(MASK)
        else:
            parts.append(text[match.end() : value_end])
        end = value_end
    parts.append(text[end:])
    return "".join(parts)


def _mask_named(text: str) -> str:
    """`name=value`, `name: value`, `"name": "value"` anywhere in a text."""
    parts: list[str] = []
    end = at = 0
    while (match := _NAMED.search(text, at)) is not None:
        at = match.end()
        if not is_secret_name(match["name"]) and not match["name"].lower().endswith(("key", "sas", "hash", "salt")):
            continue
        for opening in ('\\"', "\\'", '"', "'"):  # the value without its quotes
            if text.startswith(opening, at):
                start = at + len(opening)
                stop = text.find(opening, start)
                stop = stop if stop >= 0 else len(text)
                break
        else:
            start, closing = at, text.find("]", at)
            if text.startswith("[", at):
                stop = closing + 1 if closing >= 0 else len(text)
            else:
                unquoted = _UNQUOTED.match(text, at)
                stop = unquoted.end() if unquoted is not None else at
        value = text[start : min(stop, start + MAX_DECIDING_CHARS)]
        if match["sep"] == ":" and _VERSION.fullmatch(value):
            continue
        if not value or not holds_secret(match["name"], value, in_code=True):
            continue
        parts += (text[end:start], MASK)
        end = at = stop if stop - start < MAX_DECIDING_CHARS else _UNQUOTED_REST.match(text, stop).end()  # type: ignore[union-attr]
    parts.append(text[end:])
    return "".join(parts)


def _with_mask(found: re.Match[str], group: str, *, in_code: bool = False) -> str:
    """The match, with one group masked unless it is a reference to the secret."""
    secret = found[group]
    if secret == MASK or is_reference(_unquoted(secret), in_code=in_code):
        return found[0]
    start = found.start(group) - found.start()
    return found[0][:start] + MASK + found[0][start + len(secret) :]


def _unquoted(word: str) -> str:
    return word[1:-1] if len(word) > 1 and word[0] == word[-1] and word[0] in "'\"" else word

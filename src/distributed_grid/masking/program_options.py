"""Options and words of well-known programs that are secrets and do not say so: `mysql -pX`, `vault login X`."""

from __future__ import annotations

from typing import Final, NamedTuple


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

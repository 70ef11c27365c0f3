"""Shown command lines: one case per common form of a secret, and one per word that only resembles one."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distributed_grid.masking.command_line import (
    MASK,
    PROGRAM_SECRETS,
    holds_secret,
    is_random,
    is_reference,
    is_secret_name,
    mask_secrets,
    mask_text,
    mask_tokens,
    normal_name,
    shown_command,
)

SECRET = "xK9" + "vQ2mT7pLs4WzR8bN1"  # put together, so that nobody takes it for a real one
WORD = "hunter" + "two"  # a secret that does not look random

FORMS = [  # § is the secret; the second is a text that stays visible
    # variables, before a command and in code
    (["env", "PGPASSWORD=§", "psql", "-h", "db1"], "db1"),
    (["env", "MYSQL_PWD=§", "mysqldump", "work"], "work"),
    (["env", "AWS_SECRET_ACCESS_KEY=§", "aws", "s3", "ls"], "s3"),
    (["env", "AWS_SESSION_TOKEN=§", "aws", "s3", "ls"], "s3"),
    (["env", "GITHUB_TOKEN=§", "gh", "pr", "list"], "list"),
    (["env", "HF_TOKEN=§", "python", "train.py"], "train.py"),
    (["env", "OPENAI_API_KEY=§", "python", "train.py"], "train.py"),
    (["env", "SSHPASS=§", "sshpass", "-e", "ssh", "gpu1"], "gpu1"),
    (["env", "RESTIC_PASSWORD=§", "restic", "backup", "data"], "backup"),
    (["env", "VAULT_TOKEN=§", "vault", "status"], "status"),
    (["env", "DJANGO_SECRET=§", "gunicorn", "app"], "gunicorn"),
    (["env", "DJANGO_SECRET_KEY=§", "gunicorn", "app"], "gunicorn"),
    (["env", "DB_PASSWORD=with spaces §;", "app", "run"], "run"),
    (["env", "BORG_PASSPHRASE=§", "borg", "create", "repo"], "create"),
    (["env", "DATABASE_URL=postgres://ada:§@db1/work", "app"], "db1/work"),
    (["env", "REDIS_URL=redis://:§@cache/0", "app"], "cache/0"),
    (["docker", "run", "-e", "POSTGRES_PASSWORD=§", "postgres"], "postgres"),
    (["docker", "run", "-eAPI_TOKEN=§", "image"], "image"),
    (["docker", "run", "--env=API_TOKEN=§", "image"], "image"),
    (["docker", "build", "--build-arg", "NPM_TOKEN=§", "."], "build"),
    (["sh", "-c", "PGPASSWORD=§ psql -h db1 work"], "db1"),
    (["sh", "-c", "export MYSQL_PWD='§'; mysqldump work"], "mysqldump work"),
    (["bash", "-lc", "cd data && TOKEN=§ python train.py --epochs 3"], "--epochs 3"),
    # options by their name
    (["app", "--password", "§", "--verbose"], "--verbose"),
    (["app", "--password=§", "--verbose"], "--verbose"),
    (["app", "--passwd", "§", "run"], "run"),
    (["app", "--pass", "§", "run"], "run"),
    (["app", "--pwd", "§", "run"], "run"),
    (["app", "-password", "§", "run"], "run"),
    (["app", "--db-password", "1234§", "run"], "run"),
    (["app", "--dbPassword=§", "run"], "run"),
    (["app", "--api-key", "§", "run"], "run"),
    (["app", "--api_key=§", "run"], "run"),
    (["app", "--secret", "§", "run"], "run"),
    (["app", "--access-key", "§", "run"], "run"),
    (["app", "--client-secret", "§", "run"], "run"),
    (["app", "--auth-token", "§", "run"], "run"),
    (["app", "--private-key", "-----BEGIN RSA PRIVATE KEY-----\n§\n-----END RSA PRIVATE KEY-----", "run"], "run"),
    (["app", "--passphrase", "§", "run"], "run"),
    (["app", "--credentials", "ada:§", "run"], "run"),
    (["gpg", "--batch", "--passphrase", "§", "-d", "file.gpg"], "file.gpg"),
    (["kubectl", "--token", "§", "get", "pods"], "pods"),
    (["helm", "install", "--password", "§", "chart"], "chart"),
    (["helm", "install", "--set", "replicas=3,auth.password=§", "chart"], "replicas=3"),
    (["wget", "--http-password", "§", "http://host/file"], "http://host/file"),
    (["wget", "--user=ada", "--password=§", "http://host/file"], "--user=ada"),
    (["java", "-Dpassword=§", "-jar", "app.jar"], "app.jar"),
    (["java", "-Djavax.net.ssl.keyStorePassword=§", "-jar", "app.jar"], "app.jar"),
    (["keytool", "-storepass", "§", "-alias", "web"], "web"),
    (["terraform", "apply", "-var", "db_password=§", "-auto-approve"], "-auto-approve"),
    (["terraform", "apply", "-var=db_password=§", "-auto-approve"], "-auto-approve"),
    (["plink", "-pw", "§", "host"], "host"),
    (["sh", "-c", "app --password § --verbose"], "--verbose"),
    (["sh", "-c", "app --password='§' --verbose"], "--verbose"),
    # options and words of well-known programs
    (["docker", "login", "-u", "ada", "-p", "§", "registry"], "registry"),
    (["sudo", "docker", "login", "-u", "ada", "-p§", "registry"], "registry"),
    (["podman", "login", "-p", "§", "registry"], "registry"),
    (["restic", "-r", "repo", "-p", "§", "backup"], "backup"),
    (["mysql", "-u", "root", "-p§", "work"], "work"),
    (["docker", "exec", "db", "mysqldump", "-p§", "work"], "work"),
    (["timeout", "60", "mysql", "-p§", "work"], "work"),
    (["sshpass", "-p", "§", "ssh", "gpu1"], "gpu1"),
    (["sshpass", "-p§", "ssh", "gpu1"], "gpu1"),
    (["ldapsearch", "-x", "-D", "cn=admin", "-w", "§", "-b", "dc=org"], "dc=org"),
    (["redis-cli", "-h", "cache", "-a", "§", "ping"], "ping"),
    (["redis-cli", "AUTH", "§"], "AUTH"),
    (["curl", "-u", "ada:§", "http://host"], "http://host"),
    (["curl", "-uada:§", "http://host"], "http://host"),
    (["curl", "-su", "ada:§", "http://host"], "http://host"),
    (["curl", "--user", "ada:§", "http://host"], "http://host"),
    (["curl", "--user=ada:§", "http://host"], "http://host"),
    (["curl", "-x", "ada:§@proxy:3128", "http://host"], "proxy:3128"),
    (["curl", "--oauth2-bearer", "§", "http://host"], "http://host"),
    (["http", "-a", "ada:§", "GET", "http://host"], "http://host"),
    (["htpasswd", "-b", "users", "ada", "§"], "ada"),
    (["htpasswd", "-b", "-c", "users", "ada", "§"], "ada"),
    (["htpasswd", "-nb", "ada", "§"], "ada"),
    (["mongosh", "-u", "ada", "-p", "§", "work"], "work"),
    (["openssl", "rsa", "-in", "key.pem", "-passin", "pass:§"], "key.pem"),
    (["openssl", "pkcs12", "-passout", "pass:§", "-out", "x.p12"], "x.p12"),
    (["openssl", "enc", "-aes-256-cbc", "-k", "§", "-in", "data"], "data"),
    (["smbclient", "//host/share", "-U", "ada%§"], "//host/share"),
    (["smbclient", "//host/share", "§"], "//host/share"),
    (["vault", "login", "§"], "login"),
    (["vault", "operator", "unseal", "§"], "unseal"),
    (["vault", "kv", "put", "secret/db", "password=§", "user=ada"], "user=ada"),
    (["aws", "configure", "set", "aws_secret_access_key", "§", "--profile", "work"], "work"),
    (["git", "config", "--global", "github.token", "§"], "config"),
    (["npm", "config", "set", "//registry/:_authToken", "§"], "config"),
    (["npm", "config", "set", "//registry/:_authToken=§"], "config"),
    (["npm", "publish", "--otp=§"], "publish"),
    (["az", "login", "--service-principal", "-u", "app", "-p", "§", "--tenant", "t1"], "t1"),
    (["twine", "upload", "-u", "ada", "-p", "§", "dist"], "dist"),
    (["gh", "secret", "set", "NAME", "--body", "§"], "NAME"),
    (["kubectl", "create", "secret", "generic", "db", "--from-literal=value=§"], "generic"),
    (["sqlplus", "scott/§@orcl"], "scott"),
    (["7z", "a", "-p§", "out.7z"], "out.7z"),
    (["zip", "-P", "§", "out.zip", "data"], "out.zip"),
    (["mosquitto_pub", "-u", "ada", "-P", "§", "-t", "topic"], "topic"),
    (["xfreerdp", "/u:ada", "/p:§", "/v:host"], "/v:host"),
    (["nmcli", "device", "wifi", "connect", "home", "password", "§"], "home"),
    (["mount", "-t", "cifs", "-o", "username=ada,password=§,ro", "//host/share"], "//host/share"),
    (["rclone", "copy", ":sftp,host=h1,pass=§:", "out"], "out"),
    (["sh", "-c", "docker login -u ada -p § registry"], "registry"),
    (["sh", "-c", "echo § | docker login -u ada --password-stdin registry"], "registry"),
    (["ssh", "gpu1", "mysql -u root -p§ work"], "work"),
    (["sh", "-c", "ssh gpu1 \"mysql -u root -p'§' work\""], "work"),
    (["psql", "-c", "ALTER USER ada PASSWORD '§'"], "ALTER USER ada"),
    (["mysql", "-e", "CREATE USER ada IDENTIFIED BY '§'"], "CREATE USER ada"),
    # addresses, headers, queries, structured texts
    (["psql", "postgres://ada:§@db1/work"], "db1/work"),
    (["psql", "postgres://ada:p@§@db1/work"], "db1/work"),
    (["psql", "host=db1 password=§ dbname=work"], "dbname=work"),
    (["mongosh", "mongodb+srv://ada:§@db1/work"], "db1/work"),
    (["git", "clone", "https://ada:§@host/repo.git"], "host/repo.git"),
    (["git", "clone", "https://§@host/repo.git"], "host/repo.git"),
    (["pip", "install", "--index-url", "https://ada:§@host/simple", "numpy"], "numpy"),
    (["curl", "-H", "Authorization: Bearer §", "http://host"], "http://host"),
    (["curl", "-H", "Authorization: Basic §", "http://host"], "http://host"),
    (["curl", "-H", "Authorization: token §", "http://host"], "http://host"),
    (["curl", "--header=Authorization: Bearer §", "http://host"], "http://host"),
    (["curl", "-H", "X-Api-Key: §", "http://host"], "http://host"),
    (["curl", "-H", "X-Vault-Token: §", "http://host"], "http://host"),
    (["curl", "-H", "PRIVATE-TOKEN: §", "http://host"], "http://host"),
    (["curl", "-H", "Cookie: session=§; theme=dark", "http://host"], "http://host"),
    (["curl", "-HAuthorization: Bearer §", "http://host"], "http://host"),
    (["sh", "-c", "curl -H 'Authorization: Bearer §' http://host/x"], "http://host/x"),
    (["curl", "http://host/x?page=2&token=§"], "page=2"),
    (["curl", "http://host/x?api_key=§&page=2"], "page=2"),
    (["curl", "http://host/x?sig=§&page=2"], "page=2"),
    (["curl", "-d", "user=ada&password=§", "http://host"], "user=ada"),
    (["curl", "-d", '{"user": "ada", "password": "§"}', "http://host"], '"user": "ada"'),
    (["app", "--config", '{"password":"§","size":3}'], '"size":3'),
    (["app", "--config", '{\\"password\\": \\"§\\", \\"size\\": 3}'], "size"),
    (["app", "--config", '{"tokens": ["§"], "size": 3}'], '"size": 3'),
    (["app", "--config", "db: {password: §, size: 3}"], "size: 3"),
    (["python", "-c", "login(user='ada', password='§')"], "user='ada'"),
    (["app", "--data", "<user>ada</user><password>§</password>"], "<user>ada</user>"),
    (["az", "storage", "list", "--connection-string", "AccountName=a;AccountKey=§;"], "storage"),
    (["app", "AccountName=ada;AccountKey=§;"], "AccountName=ada"),
]


RANDOM_ONLY = [["git", "clone", "https://§@host/repo.git"]]
"""Elsewhere that is the name of a user."""


@pytest.mark.parametrize(("words", "neighbour"), FORMS, ids=[" ".join(words)[:60] for words, _ in FORMS])
def test_a_secret_is_masked_and_its_neighbour_is_shown(words: list[str], neighbour: str) -> None:
    for secret in (SECRET, WORD) if words not in RANDOM_ONLY else (SECRET,):
        masked, is_masked = mask_secrets([word.replace("§", secret) for word in words])
        shown = " ".join(masked)
        assert is_masked
        assert secret not in shown
        assert MASK in shown
        assert neighbour in shown
        assert mask_secrets(masked)[0] == masked


TOKENS = {
    "hvs": "hvs." + SECRET,
    "hvb": "hvb." + SECRET,
    "vault": "s." + SECRET + "abcd",
    "ghp": "ghp_" + SECRET,
    "gho": "gho_" + SECRET,
    "ghu": "ghu_" + SECRET,
    "ghs": "ghs_" + SECRET,
    "ghr": "ghr_" + SECRET,
    "github_pat": "github_pat_" + SECRET,
    "glpat": "glpat-" + SECRET,
    "xoxb": "xoxb-" + SECRET,
    "xoxp": "xoxp-" + SECRET,
    "xapp": "xapp-1-" + SECRET,
    "sk": "sk-" + SECRET,
    "sk-ant": "sk-ant-" + SECRET,
    "sk-proj": "sk-proj-" + SECRET,
    "sk_live": "sk_live_" + SECRET,
    "AKIA": "AKIA" + "IOSFODNN7EXAMPLE",
    "ASIA": "ASIA" + "IOSFODNN7EXAMPLE",
    "AIza": "AIza" + SECRET * 2,
    "ya29": "ya29." + SECRET,
    "jwt": "eyJ" + SECRET + ".eyJ" + SECRET + "." + SECRET,
    "hf": "hf_" + SECRET,
    "npm": "npm_" + SECRET,
    "pypi": "pypi-AgE" + SECRET,
    "dop": "dop_v1_" + SECRET,
    "sendgrid": "SG." + SECRET + "." + SECRET,
    "age": "AGE-SECRET-KEY-1" + SECRET.upper(),
    "dckr": "dckr_pat_" + SECRET,
    "pem": "-----BEGIN OPENSSH PRIVATE KEY-----\n" + SECRET + "\n-----END OPENSSH PRIVATE KEY-----",
    "slack hook": "https://hooks.slack.com/services/" + SECRET,
}


@pytest.mark.parametrize("token", TOKENS.values(), ids=TOKENS.keys())
def test_a_known_token_is_masked_wherever_it_is(token: str) -> None:
    tail = token[-12:]
    for words in (["app", token, "run"], ["app", f"--x={token}", "run"], ["sh", "-c", f"app {token} | run"]):
        shown = " ".join(mask_secrets(words)[0])
        assert tail not in shown
        assert SECRET not in shown
        assert shown.endswith("run")


@pytest.mark.parametrize(
    "command",
    [
        "tar -xpf data.tar -p",
        "mkdir -p out/logs",
        "ssh -p 22 gpu1",
        "scp -P 2222 file gpu1:",
        "ps -p 1234",
        "cp -p a b",
        "nmap -p 80,443 host",
        "docker run -p 8080:80 image",
        "docker run --user 1000:1000 -p 80:80 nginx",
        "docker compose -p project up",
        "psql -h db1 -p 5432 -U ada work",
        "pg_dump -p 5432 -U ada -w work",
        "redis-cli -p 6379 ping",
        "mysql -u ada work",
        "mysql -P 3306 -h db1 work",
        "mosquitto_pub -p 1883 -t topic",
        "sed -n -e 1p file",
        "patch -p 1 -i fix.diff",
        "npm run build -p",
        "netstat -p -a -u",
        "curl -o out -L http://host/x?page=2",
        "git clone https://host/repo.git",
        "git clone git@host:ada/repo.git",
        "git commit -m tokens",
        "app --password-file /run/secrets/db",
        "app --password-file pw.txt",
        "app --password-stdin",
        "app --api-key $KEY --token ${TOKEN}",
        "app --token-limit 5",
        "app --tokenizer bert --max-tokens 5120 --pad-token x",
        "app --num-tokens=300 --next-token page2",
        "aws s3api list-objects --starting-token abc --max-items 5",
        "aws secretsmanager get-secret-value --secret-id prod/db",
        "app --token-env HF_TOKEN --auth none",
        "app --auth basic --auth-type digest",
        "app --key short --keypoints 17 --passes 3 --sort-key name",
        "ffmpeg -i in.mp4 -pass 2 -passlogfile log out.mp4",
        "app --private-key key.pem --credentials service.json",
        "kubectl --client-key client.key get secrets",
        "docker build --secret id=npm,src=npmrc .",
        "openssl req -newkey rsa:2048 -keyout key.pem -out req.pem",
        "openssl rsa -passin file:pw.txt -in key.pem",
        "openssl rsa -passin env:KEYPASS -in key.pem",
        "restic -r repo -p /run/secrets/restic backup",
        "env OMP_NUM_THREADS=4 CUDA_VISIBLE_DEVICES=0,1 python train.py",
        "env KEY=value MODE=fast app",
        "python train.py --epochs 3 --lr 0.1 --data s3://bucket/set:v2/x",
        "python -m http.server 8000 --bind 127.0.0.1:80",
        "ssh -i /srv/alice/.ssh/id_ed25519 host",
        "rsync -a a/ b/ --exclude=.git",
        "make -j8 all",
        "psql postgres://ada@db/work",
        "app registry/auth:2.8 auth:latest",
        "app host:8080 10.0.0.1:5432 12:30:00",
        "openssl s_client -connect host:443 -key key.pem",
        "sha256sum -c 9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
        "smbclient //host/share -U ada",
        "vault login -method=oidc",
        "docker login --username ada registry",
        "sk-learn task-runner hf_model npm_config pypi-server",
        "java -Xmx4g -Dfile.encoding=UTF-8 -jar app.jar",
        "7z x data.7z -y",
        "bypass --compass north",
    ],
)
def test_an_ordinary_command_stays_as_it_is(command: str) -> None:
    assert mask_secrets(command.split()) == (tuple(command.split()), False)


@pytest.mark.parametrize(
    "code",
    [
        "PGPASSWORD=$PGPASSWORD psql work",
        'app --password "$password" && mkdir -p out',
        "curl -H 'Authorization: Bearer $TOKEN' http://host",
        "export TOKEN=$(cat token.txt); python train.py",
        "ssh -p 22 gpu1 'tar -p -xf data.tar'",
        "for i in 1 2 3; do python train.py --seed $i > out/$i.log; done",
        "cd /srv/work && python3 -m pytest -k 'token or password' -p no:cacheprovider",
    ],
)
def test_code_that_only_names_a_secret_stays_as_it_is(code: str) -> None:
    assert mask_secrets(["sh", "-c", code]) == (("sh", "-c", code), False)


def test_a_private_key_without_an_end_is_masked() -> None:
    assert mask_secrets(["app", f"-----BEGIN PRIVATE KEY-----\n{SECRET}", "run"])[0] == ("app", MASK, "run")


def test_control_characters_do_not_hide_a_secret() -> None:
    for sign in ("\n", "\r", "\t", "\x00", "\x1b[2K", "\u202e"):
        shown = " ".join(
            mask_secrets(["app", f"--password={SECRET[:5]}{sign}{SECRET[5:]}", f"x{sign}--token={SECRET}"])[0]
        )
        assert SECRET[:5] not in shown
        assert SECRET[5:] not in shown


def test_a_title_that_a_program_gave_itself_is_masked() -> None:
    (shown,), is_masked = mask_secrets([f"worker --name w1 --password {SECRET} --port 80"])
    assert is_masked
    assert shown == f"worker --name w1 --password {MASK} --port 80"


def test_text_is_masked_like_a_command() -> None:
    assert mask_text('{"command": "app --password ' + SECRET + ' run"}') == '{"command": "app --password *** run"}'
    assert mask_text('{"type": "shown"}') == '{"type": "shown"}'


def test_a_shown_command_is_quoted_masked_and_cut() -> None:
    assert shown_command(["app", "--password", SECRET, "a b"]) == "app --password *** 'a b'"
    assert shown_command(["app", f"--password={SECRET}", "x;y"]) == "app --password=*** 'x;y'"
    assert shown_command(["echo", "x" * 100], 20) == "echo " + "x" * 14 + "…"
    assert shown_command([]) == ""


WORDS = st.one_of(
    st.text(max_size=40),
    st.text(alphabet="ab-_=:/@.'\"\\ ;|$*?&{}[]()1\n", max_size=40),
    st.sampled_from(
        ["-p", "-c", "--password", "mysql", "docker", "login", "vault", "curl", "-u", "Authorization: x y"]
    ),
    st.sampled_from(["token=", "password: ", "aws", "set", "htpasswd", "-b", "x://a:b@c", "<password>x</password>"]),
)


@given(st.lists(WORDS, max_size=8))
def test_any_words_are_masked_without_an_error_and_keep_their_number(words: list[str]) -> None:
    masked, is_masked = mask_secrets(words)
    assert len(masked) == len(words)
    assert is_masked == (masked != tuple(words))
    shown_command(words, 80)


@pytest.mark.parametrize(
    "part",
    ["-", "a_", "a=", "key:", "a.b-", "sk-", "eyJ-", "://a:", "'\"", "\\\"", "password=", "password='", "x-a-", '{"a":',
     "Authorization:", "-----BEGIN PRIVATE KEY-----", "echo a | ", "bearer ", "<a>", "=" , " -p ", "mysql -p", "SG.a.",
     "https://", "password ", "identified by ", "api-", "?key=&", "hf_", "s.", "\n", "a b ", "(", "$(", "'\\'\""],
)  # fmt: skip
def test_masking_takes_linear_time(part: str) -> None:
    def cpu_seconds(size: int) -> float:
        long = part * (size // len(part))
        started = time.process_time()
        mask_secrets(["app", long, "x" + long, long + "!"])
        mask_secrets(["sh", "-c", long])
        return time.process_time() - started

    short = max(cpu_seconds(2_000) for _ in range(3))
    assert min(cpu_seconds(16_000) for _ in range(2)) < 24 * short + 0.05  # 8 if linear, 64 if quadratic


@pytest.mark.parametrize(
    "name",
    [
        "--db-password",
        "dbPassword",
        "DB_PASSWORD",
        "PGPASSWORD",
        "SSHPASS",
        "-Dpassword",
        "-eAPI_TOKEN",
        "X-Auth-Token",
        "-pw",
        "--otp",
        "MYSQL_PWD",
        "aws_secret_access_key",
        "clientsecret",
        "//registry/:_authToken",
        "STORAGE_KEY",
    ],
)
def test_names_of_secrets(name: str) -> None:
    assert is_secret_name(name)
    assert holds_secret(name, "hunter2x")


@pytest.mark.parametrize(
    "name",
    [
        "--password-file",
        "--tokenizer",
        "--token-limit",
        "--pad-token",
        "--next-token",
        "--secret-id",
        "PATH",
        "KEY",
        "--",
        "bypass",
        "compass",
        "--two-pass",
        "--keypoints",
        "--author",
        "--pin-memory",
        "PASSWORD_STORE_DIR",
    ],
)
def test_names_that_only_resemble_one(name: str) -> None:
    assert not is_secret_name(name)
    assert not holds_secret(name, "hunter2x")


def test_a_key_is_a_secret_if_it_looks_random() -> None:
    assert holds_secret("--key", "xK9vQ2mT7p" + "Ls4WzR8bN1")
    assert not holds_secret("--key", "name-of-a-column-that-is-long")
    assert not is_random("a" * 50)


def test_a_variable_or_a_path_only_says_where_a_secret_is() -> None:
    for value in ("$TOKEN", "${TOKEN}", "$(cat f)", "/run/secrets/db", "~/.token", "@dir/file", "env:NAME", "op://a/b"):
        assert is_reference(value), value
    for value in ("$ecret1", "hunter2", "@Dm1n", "/" + "aB3dE5gH7jK9mN1pQ3sT5"):
        assert not is_reference(value), value
    assert is_reference("$token", in_code=True)
    assert is_reference("key.pem", "private_key")
    assert not is_reference("key.pem", "password")


def test_the_parts_of_a_name_are_separated_in_one_way() -> None:
    assert {normal_name(name) for name in ("--db-password", "dbPassword", "DB_PASSWORD", "db.password")} == {
        "db_password"
    }


BODY = "xK9" + "vQ2mT7pLs4WzR8bN1"


def test_a_token_is_masked_and_the_text_around_it_is_kept() -> None:
    assert mask_tokens(f"a ghp_{BODY}, b") == "a ***, b"
    assert mask_tokens(f"x=hvs.{BODY}&y") == "x=***&y"


def test_all_three_parts_of_a_json_web_token_are_masked() -> None:
    assert mask_tokens(f"eyJ{BODY}.eyJ{BODY}.{BODY} x") == "*** x"


def test_words_that_begin_like_a_token_are_kept() -> None:
    for text in ("sk-learn-contrib-preprocessing", "pypi-publish-to-the-index", "hf_model", "s.method", "task-runner"):
        assert mask_tokens(text) == text


def test_a_private_key_is_masked_to_its_end() -> None:
    key = f"-----BEGIN EC PRIVATE KEY-----\n{BODY}\n-----END EC PRIVATE KEY-----"
    assert mask_tokens(f"a {key} b {key} c") == "a *** b *** c"
    assert mask_tokens(f"a -----BEGIN PRIVATE KEY-----\n{BODY}") == "a ***"


def test_programs_where_p_is_a_port_or_a_path_are_not_listed() -> None:
    assert not {"psql", "pg_dump", "ssh", "scp", "nmap", "tar", "mkdir", "cp", "ps", "patch"} & PROGRAM_SECRETS.keys()


def test_glued_options_have_one_dash() -> None:
    for name, secrets in PROGRAM_SECRETS.items():
        assert all(option.startswith("-") for option in secrets.options | secrets.glued), name
        assert not any(option.startswith("--") for option in secrets.glued), name

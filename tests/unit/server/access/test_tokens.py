"""Tokens: one-time where they say so, durable before they count, and never a secret on disk."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from distributed_grid.errors import Conflict, GridError, NotFound, Refused, StoreFailed
from distributed_grid.server.access.tokens import (
    HISTORY_MS,
    MAX_EXPIRED,
    Forbidden,
    JoinGrant,
    TokenStore,
    UserToken,
    bearer_text,
    hash_of,
    new_secret,
    new_token_id,
    split_token,
)

KEY, OTHER_KEY = hash_of("a key"), hash_of("another key")


class Wall:
    """A wall clock that tests turn."""

    def __init__(self) -> None:
        self.ms = 1_700_000_000_000

    def __call__(self) -> int:
        return self.ms


@pytest.fixture
def wall() -> Wall:
    return Wall()


@pytest.fixture
def tokens(tmp_path: Path, wall: Wall) -> TokenStore:
    return TokenStore(tmp_path, wall)


def a_grant(tokens: TokenStore, *, node: str = "", minutes: int = 60) -> tuple[str, str]:
    token_id, secret = new_token_id(), new_secret()
    tokens.add_grant(
        JoinGrant(id=token_id, hash=hash_of(secret), node=node, expires_ms=tokens.now_ms() + minutes * 60_000)
    )
    return token_id, secret


def a_token(tokens: TokenStore, user: str = "ana", expires_ms: int = 0) -> str:
    token_id, secret = new_token_id(), new_secret()
    tokens.add(UserToken(id=token_id, hash=hash_of(secret), user=user, expires_ms=expires_ms))
    return bearer_text(token_id, secret)


def join(tokens: TokenStore, grant: tuple[str, str], node: str = "gpu1", key: str = KEY) -> JoinGrant:
    return tokens.exchange(*grant, node=node, hostname="", key_hash=key)


def test_the_owner_gets_a_token_once_and_it_opens_the_door_as_admin(
    tokens: TokenStore, tmp_path: Path, wall: Wall
) -> None:
    tokens.ensure_owner("ana")
    text = (tmp_path / "token").read_text().strip()
    found = tokens.user_of(text)
    assert found is not None
    assert (found.user, found.admin) == ("ana", True)
    again = TokenStore(tmp_path, wall)
    again.ensure_owner("ana")
    assert (tmp_path / "token").read_text().strip() == text
    assert again.user_of(text) == found


def test_deleting_the_owners_token_replaces_it(tokens: TokenStore, tmp_path: Path) -> None:
    tokens.ensure_owner("ana")
    old = (tmp_path / "token").read_text().strip()
    (tmp_path / "token").unlink()
    tokens.ensure_owner("ana")
    new = (tmp_path / "token").read_text().strip()
    assert tokens.user_of(new) is not None
    assert tokens.user_of(old) is None


def test_a_crash_between_the_two_files_of_the_owner_leaves_a_token_that_works(tmp_path: Path, wall: Wall) -> None:
    (tmp_path / "token").write_text(bearer_text(new_token_id(), new_secret()))  # its hash was never stored
    tokens = TokenStore(tmp_path, wall)
    tokens.ensure_owner("ana")
    assert tokens.user_of((tmp_path / "token").read_text().strip()) is not None


def test_files_are_for_their_owner_only_and_hold_no_secret(tokens: TokenStore, tmp_path: Path) -> None:
    tokens.ensure_owner("ana")
    text, grant = a_token(tokens), a_grant(tokens)
    join(tokens, grant)
    stored = (tmp_path / "tokens.json").read_text()
    assert split_token(text)[1] not in stored
    assert grant[1] not in stored
    assert [oct(path.stat().st_mode & 0o777) for path in sorted(tmp_path.iterdir())] == ["0o600", "0o600"]


@pytest.mark.parametrize("text", ["", "grid_", "grid__", "grid_x_y", "Bearer x", "grid_" + "0" * 12 + "_", "ü"])
def test_what_is_no_token_opens_nothing(tokens: TokenStore, text: str) -> None:
    a_token(tokens)
    assert tokens.user_of(text) is None


def test_a_token_with_another_secret_opens_nothing(tokens: TokenStore) -> None:
    text = a_token(tokens)
    assert tokens.user_of(text) is not None
    assert tokens.user_of(text[:-1] + ("A" if text[-1] != "A" else "B")) is None


def test_a_token_opens_nothing_from_its_end_on(tokens: TokenStore, wall: Wall) -> None:
    text = a_token(tokens, expires_ms=wall.ms + 1000)
    wall.ms += 999
    assert tokens.user_of(text) is not None
    wall.ms += 1
    assert tokens.user_of(text) is None


def test_a_revoked_token_opens_nothing_and_revoking_twice_is_harmless(tokens: TokenStore) -> None:
    text = a_token(tokens)
    token_id = tokens.tokens()[0].id
    first = tokens.revoke(token_id[:6])
    assert tokens.user_of(text) is None
    assert tokens.revoke(token_id) == first


def test_the_owners_own_token_is_not_revoked_by_accident(tokens: TokenStore) -> None:
    tokens.ensure_owner("ana")
    with pytest.raises(Refused, match="owner's own"):
        tokens.revoke(tokens.tokens()[0].id)


@pytest.mark.parametrize("name", ["", "nope"])
def test_a_token_that_is_not_there_cannot_be_revoked(tokens: TokenStore, name: str) -> None:
    a_token(tokens)
    a_grant(tokens)
    for revoke in (tokens.revoke, tokens.revoke_grant):
        with pytest.raises(NotFound):
            revoke(name)
    for revoke, token_id in ((tokens.revoke, tokens.tokens()[0].id), (tokens.revoke_grant, tokens.grants()[0].id)):
        with pytest.raises(NotFound, match="needs 4 characters"):
            revoke(token_id[:3])


def test_making_the_same_token_twice_makes_one_and_another_under_its_id_is_refused(tokens: TokenStore) -> None:
    token = UserToken(id=new_token_id(), hash=hash_of("s"), user="ana")
    assert tokens.add(token) == tokens.add(token)
    assert len(tokens.tokens()) == 1
    with pytest.raises(Conflict):
        tokens.add(UserToken(id=token.id, hash=hash_of("t"), user="ana"))


def test_a_join_token_is_good_for_one_key_and_its_lost_answer_is_had_again(tokens: TokenStore) -> None:
    grant = a_grant(tokens)
    first = join(tokens, grant)
    assert join(tokens, grant) == first
    with pytest.raises(Forbidden, match="used already"):
        join(tokens, grant, key=OTHER_KEY)
    with pytest.raises(Forbidden, match="used already"):
        join(tokens, grant, node="gpu2")
    assert tokens.node_of("gpu1", "a key") == "gpu1"
    assert tokens.node_of("gpu1", "another key") is None
    assert tokens.node_of("gpu2", "a key") is None


def test_using_a_join_token_survives_a_crash_right_after_the_answer(
    tokens: TokenStore, tmp_path: Path, wall: Wall
) -> None:
    grant = a_grant(tokens)
    join(tokens, grant)
    after = TokenStore(tmp_path, wall)
    assert after.node_of("gpu1", "a key") == "gpu1"
    with pytest.raises(Forbidden, match="used already"):
        join(after, grant, key=OTHER_KEY)


def test_a_write_that_fails_uses_nothing_up(
    tokens: TokenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grant = a_grant(tokens)

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StoreFailed, match="No space left"):
        join(tokens, grant)
    assert tokens.node_of("gpu1", "a key") is None
    monkeypatch.undo()
    assert join(tokens, grant, key=OTHER_KEY).key_hash == OTHER_KEY


def test_a_half_written_file_of_a_crash_changes_nothing(tokens: TokenStore, tmp_path: Path, wall: Wall) -> None:
    text = a_token(tokens)
    (tmp_path / "tokens.json.new").write_bytes(b'{"tokens"')
    again = TokenStore(tmp_path, wall)
    assert again.user_of(text) is not None
    assert again.user_of(a_token(again)) is not None


def test_a_file_that_is_no_book_of_tokens_is_told_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "tokens.json").write_text("{")
    with pytest.raises(GridError, match="move it away"):
        TokenStore(tmp_path)
    assert (tmp_path / "tokens.json").read_text() == "{"


@pytest.mark.parametrize(
    ("spoil", "why"),
    [("expire", "has expired"), ("revoke", "was revoked"), ("secret", "unknown"), ("id", "unknown")],
)
def test_a_join_token_that_is_no_good_is_refused_with_the_reason(
    tokens: TokenStore, wall: Wall, spoil: str, why: str
) -> None:
    token_id, secret = a_grant(tokens, minutes=1)
    if spoil == "expire":
        wall.ms += 60_000
    elif spoil == "revoke":
        tokens.revoke_grant(token_id)
    elif spoil == "secret":
        secret = new_secret()
    else:
        token_id = new_token_id()
    with pytest.raises(Forbidden, match=why):
        join(tokens, (token_id, secret))


def test_a_node_stays_in_after_the_time_of_its_token_is_over(tokens: TokenStore, wall: Wall) -> None:
    grant = a_grant(tokens, minutes=1)
    join(tokens, grant)
    wall.ms += HISTORY_MS * 2
    a_token(tokens)  # what is over for long is swept when something is written
    assert tokens.node_of("gpu1", "a key") == "gpu1"
    assert join(tokens, grant).used_by == "gpu1"


def test_revoking_a_join_token_shuts_out_who_joined_with_it(tokens: TokenStore) -> None:
    grant = a_grant(tokens)
    join(tokens, grant)
    assert tokens.revoke_grant(grant[0]).used_by == "gpu1"
    assert tokens.node_of("gpu1", "a key") is None
    with pytest.raises(Forbidden, match="was revoked"):
        join(tokens, grant)


def test_a_name_that_is_taken_is_only_taken_over_with_a_token_for_that_name(tokens: TokenStore) -> None:
    join(tokens, a_grant(tokens))
    with pytest.raises(Forbidden, match="taken by a node"):
        join(tokens, a_grant(tokens), key=OTHER_KEY)
    join(tokens, a_grant(tokens, node="gpu1"), key=OTHER_KEY)
    assert tokens.node_of("gpu1", "another key") == "gpu1"
    assert tokens.node_of("gpu1", "a key") is None


def test_a_token_for_one_name_is_good_for_no_other(tokens: TokenStore) -> None:
    grant = a_grant(tokens, node="gpu1")
    with pytest.raises(Forbidden, match="is for the node gpu1"):
        join(tokens, grant, node="gpu2")
    assert tokens.exchange(*grant, node="", hostname="box", key_hash=KEY).used_by == "gpu1"


def test_a_node_without_a_name_gets_that_of_its_machine(tokens: TokenStore) -> None:
    assert tokens.exchange(*a_grant(tokens), node="", hostname="box", key_hash=KEY).used_by == "box"


def test_of_many_who_use_one_token_at_once_one_gets_in(tokens: TokenStore) -> None:
    grant = a_grant(tokens)
    got_in: list[str] = []
    start = threading.Barrier(8)

    def try_it(number: int) -> None:
        start.wait()
        try:
            got_in.append(join(tokens, grant, key=hash_of(str(number))).key_hash)
        except Forbidden:
            pass

    threads = [threading.Thread(target=try_it, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got_in) == 1


def test_what_is_of_no_use_for_long_is_forgotten(tokens: TokenStore, wall: Wall) -> None:
    tokens.revoke_grant(a_grant(tokens)[0])
    tokens.revoke(split_token(a_token(tokens, "cy"))[0])
    kept = a_token(tokens)
    wall.ms += HISTORY_MS + 120_000
    a_token(tokens, "bo")
    assert tokens.grants() == []
    assert [token.user for token in tokens.tokens()] == ["ana", "bo"]
    assert tokens.user_of(kept) is not None


@pytest.mark.parametrize("days", [40, 365])
def test_a_wall_clock_that_was_ahead_has_cost_no_token(tokens: TokenStore, wall: Wall, days: int) -> None:
    short = a_token(tokens, expires_ms=wall.ms + 3_600_000)
    grant = a_grant(tokens)
    wall.ms += days * 86_400_000
    assert tokens.user_of(short) is None
    a_token(tokens, "bo")  # written under that clock
    wall.ms -= days * 86_400_000
    assert tokens.user_of(short) is not None
    assert join(tokens, grant).used_by == "gpu1"


def test_of_many_expired_tokens_the_last_are_kept(tokens: TokenStore, wall: Wall) -> None:
    for _ in range(MAX_EXPIRED + 5):
        a_grant(tokens, minutes=1)
        wall.ms += 1
    wall.ms += 120_000
    a_token(tokens)
    assert len(tokens.grants()) == MAX_EXPIRED

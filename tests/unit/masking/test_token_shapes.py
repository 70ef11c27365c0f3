"""Tokens that are known by their form."""

from __future__ import annotations

from distributed_grid.masking.token_shapes import mask_tokens

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

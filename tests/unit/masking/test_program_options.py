"""Options of well-known programs."""

from __future__ import annotations

from distributed_grid.masking.program_options import PROGRAM_SECRETS


def test_programs_where_p_is_a_port_or_a_path_are_not_listed() -> None:
    assert not {"psql", "pg_dump", "ssh", "scp", "nmap", "tar", "mkdir", "cp", "ps", "patch"} & PROGRAM_SECRETS.keys()


def test_glued_options_have_one_dash() -> None:
    for name, secrets in PROGRAM_SECRETS.items():
        assert all(option.startswith("-") for option in secrets.options | secrets.glued), name
        assert not any(option.startswith("--") for option in secrets.glued), name

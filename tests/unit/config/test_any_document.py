"""Laws for any document at all: it loads or is refused, and what loads can be shown and loaded again."""

import json

import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from distributed_grid.config import ClusterConfig, ConfigProblems
from distributed_grid.config.key_aliases import CLUSTER
from distributed_grid.config.kinds.containers import KeyTable, ListOf, MapOf
from tests.support.project import PROJECT

ROOT = PROJECT
SOUND = [path.read_text() for folder in ("config", "tests/fixtures/seeds") for path in (ROOT / folder).iterdir()]


def names_in(kind: object) -> set[str]:
    """Every name that means something somewhere in a cluster file."""
    if isinstance(kind, KeyTable):
        names = {part for entry in kind.keys for spelling in entry.spellings for part in spelling.split(".")}
        return names.union(*(names_in(entry.kind) for entry in kind.keys))
    return names_in(kind.kind) if isinstance(kind, ListOf | MapOf) else set()


NAMES = sorted(names_in(CLUSTER) | {"aws", "gcp", "docker_local", "region", "credentials", "memory_limit"})
WORDS = st.sampled_from(["local", "a", "head", "balanced", "throttle", "16g", "${X}", "${", "no", "json", "tpu"])
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | WORDS | st.text(max_size=8)
TREES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES) | WORDS, inner, max_size=5),
    max_leaves=25,
)
DOCUMENTS = st.dictionaries(st.sampled_from(NAMES), TREES, max_size=6)


def load_or_refuse(text: str) -> ClusterConfig | None:
    try:
        return ClusterConfig.from_text(text, "c.yaml", env={"X": "1"})
    except ConfigProblems as refused:
        lines = [str(problem) for problem in refused.problems]
    assert lines
    assert all(line.isprintable() for line in lines)
    return None


def assert_shows_and_loads_again(config: ClusterConfig) -> None:
    shown = json.loads(json.dumps(config.as_dict(), allow_nan=False))
    plain = config.model_copy(update={"warnings": (), "alerts": config.alerts.model_copy(update={"webhook": None})})
    shown.get("alerts", {}).pop("webhook", None)
    again = ClusterConfig.from_mapping(shown, env={"X": "1"})
    if not config.providers:
        assert again.model_copy(update={"warnings": ()}) == plain


@settings(max_examples=150, deadline=None)
@given(st.text(max_size=200) | st.binary(max_size=200).map(lambda raw: raw.decode("latin-1")))
def test_any_text_loads_or_is_refused(text):
    load_or_refuse(text)


@settings(max_examples=200, deadline=None)
@given(DOCUMENTS)
def test_any_tree_of_known_words_loads_or_is_refused_and_shows_what_it_loaded(tree):
    text = yaml.safe_dump(tree, allow_unicode=True)
    if config := load_or_refuse(text):
        assert_shows_and_loads_again(config)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_sound_file_with_any_piece_changed_loads_or_is_refused(data):
    text = data.draw(st.sampled_from(SOUND))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(text)))
        cut = data.draw(st.integers(0, 12))
        piece = st.sampled_from(["\n", ": ", "- ", "[", "}", "&a ", "*a", "'", "!x ", "${", "  ", "0", "-1", "<<: "])
        text = text[:at] + data.draw(piece | st.text(max_size=3)) + text[at + cut :]
    if config := load_or_refuse(text):
        assert_shows_and_loads_again(config)

"""The pages that come out of the code are what the code says, and nothing is missing from them."""

import fnmatch
import json
import re
from pathlib import Path
from typing import Any

import click
import msgspec
import pytest
from click.testing import CliRunner
from shown import DOCS, PROJECT, headings

from snapd import wire as w
from snapd.cli.settings import settings_options
from snapd.config import COMMAND_LINE, Loaded, environment_name, load
from snapd.core.events import State
from snapd.core.fsm import STATE_TIMER_REASON, TRANSITIONS, VOTE_NO_REASONS
from snapd.errors import REASON_HELP, ConfigError, Reason
from snapd.eventlog import LINE_TYPES
from tools import doc_config, doc_diagram, doc_messages, doc_reasons
from tools.doc_structs import (
    attributes_of,
    field_rows,
    markdown,
    sentence,
    structs_in,
    summary_of,
    type_words,
)
from tools.make_docs import pages, stale

SCHEMAS = PROJECT / "schemas"


def _sections(page: str) -> dict[str, str]:
    """Return the text under each heading of the third level."""
    parts = re.split(r"^#{2,3} (.+)$", (DOCS / page).read_text(), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def _definitions(name: str) -> dict[str, Any]:
    return dict(json.loads((SCHEMAS / name).read_text())["$defs"])


def test_every_page_is_current() -> None:
    """A change of a setting, a message, a record, a reason or the table without `make docs` fails here."""
    assert list(stale()) == []


def test_a_page_that_differs_or_is_missing_is_stale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tools.make_docs.DIRECTORY", tmp_path)
    for name, text in pages().items():
        (tmp_path / name).write_text(text)
    assert list(stale()) == []
    (tmp_path / "reasons.md").unlink()
    (tmp_path / "reference-log.md").write_text("old")
    assert list(stale()) == ["reference-log.md", "reasons.md"]


# --- what structs say ----------------------------------------------------------------------------


class _Base(msgspec.Struct, kw_only=True):
    """A base.

    Attributes:
        one: the first,
            which goes on.
    """

    one: int


class _Example(_Base, kw_only=True):
    """An ``example``.

    With more to say.

    Attributes:
        two, three: are said *together*.
    """

    two: tuple[Reason, ...] = ()
    three: dict[str, State] | None = None
    four: bool = True


def test_docstrings_become_meanings_those_of_bases_and_of_several_at_once_too() -> None:
    assert summary_of(_Example) == "An `example`.\n\nWith more to say."
    assert attributes_of(_Example) == {
        "one": "the first, which goes on.", "two": "are said *together*.", "three": "are said *together*.",
    }  # fmt: skip
    assert field_rows(_Example, {"four": "said elsewhere"}) == [
        ("`one`", "integer", "", "The first, which goes on."),
        ("`two`", "list of [reason](reasons.md)", "`[]`", "Are said *together*."),
        ("`three`", "map of text to [state](state-machine.md) or null", "`null`", "Are said *together*."),
        ("`four`", "true or false", "`true`", "Said elsewhere."),
    ]


def test_a_type_without_words_is_an_error() -> None:
    with pytest.raises(TypeError, match="no word"):
        type_words(complex)


# --- wire and log --------------------------------------------------------------------------------

ALL_STRUCTS = [
    *doc_messages.messages(), *LINE_TYPES.values(),
    *doc_messages.structures([*doc_messages.messages(), *LINE_TYPES.values()]),
]  # fmt: skip


@pytest.mark.parametrize("struct", ALL_STRUCTS, ids=lambda struct: struct.__name__)
def test_every_struct_and_every_field_says_what_it_is(struct: type[msgspec.Struct]) -> None:
    """A new field needs a word in its docstring, or in ``COMMON`` when its name says nearly all."""
    assert summary_of(struct)
    silent = [name for name, _, _, meaning in field_rows(struct, doc_messages.COMMON) if not meaning]
    assert not silent, "say in the docstring's Attributes what these are"


def test_no_common_meaning_is_for_a_field_that_does_not_exist() -> None:
    names = {
        f"{struct.__name__}.{field.name}"
        for struct in ALL_STRUCTS
        for field in msgspec.structs.fields(struct)
    }
    known = names | {name.partition(".")[2] for name in names}
    assert set(doc_messages.COMMON) <= known


def test_every_request_has_the_answer_that_is_written_down() -> None:
    assert set(doc_messages.ANSWERS) == set(doc_messages.REQUESTS)
    assert set(doc_messages.ANSWERS.values()) | {w.ErrorRep} == set(doc_messages.REPLIES)


@pytest.mark.parametrize(
    ("page", "schema"),
    [
        ("reference-wire.md", "request.schema.json"),
        ("reference-wire.md", "reply.schema.json"),
        ("reference-wire.md", "push.schema.json"),
        ("reference-wire.md", "finalize.schema.json"),
        ("reference-wire.md", "notification.schema.json"),
        ("reference-log.md", "log-line.schema.json"),
    ],
)
def test_every_message_and_field_of_a_schema_is_on_the_page(page: str, schema: str) -> None:
    sections = _sections(page)
    written_as_list = {"Extent", "Reason", "State"}
    for name, definition in _definitions(schema).items():
        if name not in written_as_list and "enum" not in definition:
            event = definition["properties"].get("event", {}).get("const", name)
            common = {"ts", "at_ns", "seq", "epoch", "event", "cause_id"} if event != name else {"type", "id"}
            shown = set(re.findall(r"^\| `(\w+)` \|", sections[event], re.MULTILINE))
            assert set(definition["properties"]) - common == shown - common, name


def test_structs_that_are_written_as_a_list_have_no_section() -> None:
    assert list(structs_in(tuple[w.Extent, ...])) == []
    assert "Extent" not in _sections("reference-wire.md")


# --- configuration -------------------------------------------------------------------------------


def test_every_setting_of_the_schema_is_on_the_page_once() -> None:
    definitions = _definitions("config.schema.json")
    wanted = [key for key in definitions["Config"]["properties"] if key not in doc_config.TABLES]
    for name, struct in doc_config.TABLES.items():
        wanted += [f"{name}.{key}" for key in definitions[struct.__name__]["properties"]]
    wanted += [f"{key} in [[arena]]" for key in definitions["ArenaConfig"]["properties"]]
    wanted += [f"{key} in [[access]]" for key in definitions.get("AccessRule", {}).get("properties", ())]
    shown = [text for level, text in headings((DOCS / "reference-config.md").read_text()) if level == 3]
    assert sorted(shown) == sorted(wanted)


def test_every_setting_is_in_one_part_and_every_part_has_some() -> None:
    placed = [key for keys in doc_config.parts().values() for key in keys]
    assert sorted(placed) == sorted(doc_config.settings())
    for title, patterns in doc_config.PARTS.items():
        for pattern in patterns:
            assert fnmatch.filter(placed, pattern), f"{title}: {pattern} is no setting"


def test_every_setting_says_what_it_is() -> None:
    for title, text in _sections("reference-config.md").items():
        if "| type |" in text:
            assert re.match(r"\n\n\S.*\.\n\n\| type", text), title


@pytest.mark.parametrize("key", sorted(doc_config.FLAGS))
def test_every_flag_sets_its_setting(key: str) -> None:
    value = {"ranks": "2", "size": "1MiB", "device": "cpu", "transport": "shm", "mooncake.protocol": "tcp"}
    found: list[Loaded] = []
    command = click.command()(settings_options(found.append))
    result = CliRunner().invoke(
        command, [doc_config.FLAGS[key], value.get(key, "/tmp/x")], env={"SNAPD_CONFIG": None}
    )
    assert result.exit_code == 0, result.output
    attribute = "arenas" if key in ("ranks", "size", "device") else key
    assert found[0].origin[attribute] == COMMAND_LINE


def test_every_variable_that_is_shown_is_taken_and_no_other() -> None:
    page = (DOCS / "reference-config.md").read_text()
    shown = set(re.findall(r"\| `(SNAPD_\w+)` \|", page))
    known = doc_config.settings()
    for name in doc_config.TABLES:
        known |= doc_config.settings_of_table(name)
    assert shown == {environment_name(key) for key, setting in known.items() if not setting.is_file_only}
    for variable in shown:
        # Whatever it is that is wrong with the value: the name is known.
        try:
            load(None, {variable: "1"}, {})
        except ConfigError as error:
            assert "is no setting" not in str(error)
    for key in ("arena", "mooncake.settings"):
        with pytest.raises(ConfigError):
            load(None, {environment_name(key): "1"}, {})


@pytest.mark.parametrize("relation", doc_config.RELATIONS, ids=lambda relation: relation.text)
def test_every_relation_that_is_written_down_is_checked(relation: doc_config.Relation) -> None:
    with pytest.raises(ConfigError) as refused:
        load(None, {}, relation.broken)
    assert any(key in str(refused.value) for key in relation.broken)


# --- reasons -------------------------------------------------------------------------------------


def test_every_reason_has_its_entry_and_no_entry_is_for_another() -> None:
    assert sorted(doc_reasons.told()) == sorted(reason.value for reason in Reason)
    shown = [text for level, text in headings((DOCS / "reasons.md").read_text()) if level == 3]
    assert sorted(shown) == sorted(reason.value for reason in Reason)


@pytest.mark.parametrize("reason", Reason)
def test_an_entry_says_what_a_reason_means_who_sees_it_where_and_what_to_do(reason: Reason) -> None:
    text = _sections("reasons.md")[reason]
    assert sentence(REASON_HELP[reason]) in text
    assert re.search(r"^\| seen by \| \S.*[^{}]\|$", text, re.MULTILINE)
    assert "| lines of the log |" in text
    for step in doc_reasons.told()[reason].steps:
        assert markdown(step) in text


@pytest.mark.parametrize("reason", set(Reason) - {Reason.ALLOC_FAILED})
def test_every_reason_can_be_seen_somewhere(reason: Reason) -> None:
    assert doc_reasons.records_of(reason) or reason in doc_reasons.IN_ERROR_REPLIES


def test_states_are_those_in_which_the_machine_ends_attempts() -> None:
    for state, reason in STATE_TIMER_REASON.items():
        assert doc_reasons.states_of(reason) == [state]
    for reason in VOTE_NO_REASONS:
        assert doc_reasons.states_of(reason) == [State.READY]
    assert doc_reasons.states_of(Reason.OK) == [State.READY]


def test_entries_of_one_part_stand_together() -> None:
    parts = [what.part for what in doc_reasons.told().values()]
    runs = [part for index, part in enumerate(parts) if index == 0 or parts[index - 1] != part]
    assert len(runs) == len(set(runs))


# --- the drawing ---------------------------------------------------------------------------------


def test_the_drawing_has_every_state_and_every_event_that_leads_to_another() -> None:
    drawn = re.findall(r"<text [^>]*>([^<]+)</text>", (DOCS / "state-machine.svg").read_text())
    events = [
        event.__name__
        for state, row in TRANSITIONS.items()
        for event, cell in row.items()
        for successor in cell.successors
        if successor is not state
    ]
    assert sorted(drawn) == sorted([*State, *events, "PrepareAsked"])


def test_an_arrow_of_which_nobody_has_said_where_it_runs_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doc_diagram, "edges", lambda: {(State.READY, State.RESERVED): ["Undone"]})
    with pytest.raises(KeyError):
        doc_diagram.page()

"""``stagelink plan`` says what a configuration means, to a person and to a program."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from stagelink.cli import assumed
from stagelink.plan import Plan
from stagelink.schedule import pairs, verify
from tests.support.pipedream import configuration

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from click.testing import Result

    from tests.cli.conftest import Invoke, Write
    from tests.support.site import Site

FAST = '[[links]]\ntransport = "fast"\n'
DECLARED = 'dtype = "float32"\nshape = [2]\n'
TARGET = """
[[tensors]]
name = "target"
from = "a"
to = "b"
dtype = "int64"
shape = [16]
grad = false
"""
DEADLOCK = "deadlock: the ranks wait for each other in a cycle: rank 0 (stage 'a') waits in F2"


@pytest.fixture(autouse=True)
def _fast(site: Site) -> None:
    site.transport("fast")


def said(result: Result) -> str:
    """What was printed, without line breaks and the spaces of tables."""
    return " ".join(result.stdout.split())


def values(result: Result) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(result.stdout)
    return found


# For a person


def test_the_tables_show_stages_links_and_the_verdict(invoke: Invoke, write: Write) -> None:
    result = invoke("plan", write((2, 1), FAST))
    assert result.exit_code == 0
    assert said(result).startswith("line: schedule 1f1b, 4 microbatches, 3 ranks ")
    assert " a 0-1 cpu 1 unknown b 2 cpu 0 unknown " in said(result)
    assert " a → b 0→2, 1→2 ab fast 2 links[0] " in said(result)
    assert said(result).endswith("Verified: 4 microbatches run through, no deadlock.")


def test_the_links_are_said_to_be_assumed(invoke: Invoke, write: Write) -> None:
    assumed = "assumed: every rank is a process of its own on "
    one = invoke("plan", write((1, 1), FAST))
    assert f"{assumed}one server" in said(one)
    several = invoke("plan", write((1, 1), FAST, servers=[[0], [1]]))
    assert f"{assumed}the servers of the plan" in said(several)


def test_what_was_passed_over_is_shown_with_its_reason(invoke: Invoke, write: Write) -> None:
    rule = '[[links]]\ntransport = ["absent", "fast"]\n'
    result = invoke("plan", write((1, 1), rule))
    assert "fast 2 links[0] not absent: not installed on rank 0" in said(result)


def test_a_rule_that_leaves_it_to_the_transports_is_told(invoke: Invoke, write: Write) -> None:
    rule = '[[links]]\ntransport = "auto"\n'
    assert " fast 2 links[0], auto " in said(invoke("plan", write((1, 1), rule)))
    assert " fast 2 auto " in said(invoke("plan", write((1, 1))))


def test_what_auto_could_have_taken_as_well_is_told(
    invoke: Invoke, write: Write, site: Site
) -> None:
    site.auto_rank = 1
    site.transport("slow")
    path = write((1, 1))
    lower = next(
        reason
        for reason in values(invoke("plan", "--json", path))["links"][0]["reasons"]
        if reason.startswith("ranked lower: ")
    )
    assert lower.endswith("'slow'")
    assert f" fast 2 auto {lower.replace(chr(39), '')} " in said(invoke("plan", path))


def test_like_links_of_many_ranks_share_a_row(invoke: Invoke, write: Write) -> None:
    # The reason names the rank it was found on, a different one for each link.
    rule = '[[links]]\ntransport = ["absent", "fast"]\n'
    result = invoke("plan", write((12, 6), rule, microbatches=24))
    assert " a → b 0-11 → 12-17 (12 links) ab fast " in said(result)
    assert said(result).count("a → b") == 1


def test_links_that_differ_have_rows_of_their_own(invoke: Invoke, write: Write) -> None:
    rules = '[[links]]\nsame_server = true\ntransport = ["absent", "fast"]\n' + FAST
    result = invoke("plan", write((2, 1), rules, servers=[[0], [1, 2]]))
    assert "0→2 ab fast 2 links[1]" in said(result)
    assert "1→2 ab fast 2 links[0] not absent" in said(result)


def test_memory_is_shown_where_shapes_are_declared(invoke: Invoke, write: Write) -> None:
    path = write((2, 1), TARGET + FAST, tensor=DECLARED)
    found = verify(Plan.load(path)).receive_bytes
    assert found[2] is not None
    assert f" b 2 cpu 0 {found[2]} bytes " in said(invoke("plan", path))


def test_replicas_that_receive_unequal_amounts_are_told_apart(
    invoke: Invoke, write: Write
) -> None:
    path = write((1, 2), FAST, microbatches=5, schedule="gpipe", tensor=DECLARED)
    found = verify(Plan.load(path)).receive_bytes
    assert found[1] != found[2]
    text = said(invoke("plan", path))
    assert f" b 1-2 cpu - {found[1]} bytes (1) {found[2]} bytes (2) " in text


@pytest.mark.parametrize("columns", [1, 7, 20, 40, 80])
def test_a_narrow_terminal_is_no_problem(invoke: Invoke, write: Write, columns: int) -> None:
    assert invoke("plan", write((2, 1), FAST), columns=columns).exit_code == 0


def test_a_window_by_hand_is_held_against_the_schedules_own(invoke: Invoke, write: Write) -> None:
    text = said(invoke("plan", write((1, 1, 1), FAST, tensor=DECLARED, window=4)))
    assert (
        "window = 4 by hand: the schedule's own windows are 2, 3; all 4 microbatches take 12 "
        "rounds, as without; rank 0 may have to hold 32 bytes instead of 24 bytes; "
    ) in text
    forward = write((1, 1, 1), FAST, schedule="forward", microbatches=9, window=1)
    text = said(invoke("plan", forward))
    assert "own windows are 2; all 9 microbatches take 19 rounds, instead of 11" in text
    refused = said(invoke("plan", write((1, 1, 1), FAST, window=1)))
    assert "window = 1 by hand: the schedule's own windows are 2, 3 Refused:" in refused
    assert "by hand" not in said(invoke("plan", write((1, 1), FAST)))


def test_names_are_shown_as_they_are(invoke: Invoke, write: Write) -> None:
    path = write((1, 1), FAST)
    path.write_text(path.read_text().replace('"a"', '"a[red]:bug:"'))
    assert "a[red]:bug: → b" in said(invoke("plan", path))


# For a program


def test_the_json_has_the_promised_form(invoke: Invoke, write: Write) -> None:
    result = invoke("plan", "--json", write((2, 1), TARGET + FAST))
    assert result.exit_code == 0
    found = values(result)
    reasons = [link.pop("reasons") for link in found["links"]]
    assert ["by fast" in why for [why] in reasons] == [True, True]
    link = {"dst": 2, "tensors": ["ab", "target"], "transport": "fast", "window": 2}
    assert found == {
        "verified": True,
        "problem": None,
        "schedule": "1f1b",
        "stages": [
            {"name": "a", "ranks": [0, 1], "warm_up": 1, "arguments": {}},
            {"name": "b", "ranks": [2], "warm_up": 0, "arguments": {}},
        ],
        "links": [
            {"src": 0, **link},
            {"src": 1, **link},
        ],
        "shared_memory": [],
        "receive_bytes": {"0": None, "1": None, "2": None},
        "notes": [],
    }


@pytest.mark.parametrize("servers", [None, [[0], [1], [2]]])
def test_rules_of_a_plan_without_links_are_no_problem(
    invoke: Invoke, write: Write, servers: list[list[int]] | None
) -> None:
    pipeline = {} if servers is None else {"servers": servers}
    result = invoke("plan", "--json", write((3,), FAST, **pipeline))
    assert result.exit_code == 0
    found = values(result)
    assert (found["verified"], found["links"]) == (True, [])


def test_more_microbatches_than_can_be_listed_are_refused(invoke: Invoke, write: Write) -> None:
    said = "must be at most 500000 with 2 stages"
    path = write((1, 1), FAST)
    for count in (10**7, 10**12):
        result = invoke("plan", "--microbatches", count, path)
        assert (result.exit_code, result.stderr.count(said)) == (1, 1)
    path = write((1, 1), FAST, microbatches=10**12)
    for asked in (("plan", path), ("plan", "--json", path), ("run", path, __file__)):
        result = invoke(*asked)
        assert (result.exit_code, result.stderr.count(said)) == (1, 1)


def test_arguments_of_modules_are_told(invoke: Invoke, write: Write) -> None:
    path = write((1, 1), FAST)
    path.write_text(path.read_text().replace('"b"', '"b"\narguments = { ab = "input" }', 1))
    assert values(invoke("plan", "--json", path))["stages"][1]["arguments"] == {"ab": "input"}
    assert " b: its module is given ab as input " in said(invoke("plan", path))


SHM = '[[links]]\ntransport = "shm"\n[transports.shm]\nlink_bytes = 1048576\n'


def test_shared_memory_is_told(invoke: Invoke, write: Write) -> None:
    path = write((1, 1), SHM, tensor=DECLARED)
    found = values(invoke("plan", "--json", path))["shared_memory"]
    one = {"transport": "shm", "slots": 4, "bytes": 4 * 4096}
    assert found == [{"src": 0, "dst": 1, **one}, {"src": 1, "dst": 0, **one}]
    assert (
        "shared memory for shm, as needed: at most 4 slots and 16.4 kB for a direction of a link, "
        "32.8 kB for all"
    ) in said(invoke("plan", path))


def test_shared_memory_for_what_is_not_declared_is_its_bound(invoke: Invoke, write: Write) -> None:
    found = values(invoke("plan", "--json", write((1, 1), SHM)))["shared_memory"]
    assert [link["bytes"] for link in found] == [1048576, 1048576]


def test_too_little_shared_memory_is_refused(invoke: Invoke, write: Write) -> None:
    result = invoke("plan", write((1, 1), SHM.replace("1048576", "4096")))
    assert result.exit_code != 0
    text = "transports.shm: link_bytes = 4096; a link takes at least 262144 bytes"
    assert text in " ".join(result.output.split())


def test_more_memory_than_there_are_numbers_for_is_refused(invoke: Invoke, write: Write) -> None:
    assert invoke("plan", write((1, 1), SHM.replace("1048576", str(2**63 - 1)))).exit_code == 0
    result = invoke("plan", write((1, 1), SHM.replace("1048576", str(2**63))))
    assert result.exit_code == 1
    assert f"transports.shm: link_bytes = {2**63}; the most is {2**63 - 1}" in result.stderr


def test_more_shared_memory_than_the_machine_has_is_noted(
    invoke: Invoke, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(assumed, "memory_bytes", lambda: 2 * 1048576)
    two = write((1, 1), SHM)
    assert values(invoke("plan", "--json", two))["notes"] == []
    four = write((2, 1), SHM)
    text = (
        "the links of one server may take 4.2 MB of shared memory together, and this machine has "
        "2.1 MB; it is taken only as it is needed"
    )
    result = invoke("plan", "--json", four)
    assert (result.exit_code, values(result)["notes"]) == (0, [text])
    assert f" note: {text} Verified: " in said(invoke("plan", four))
    monkeypatch.setattr(assumed, "memory_bytes", lambda: None)
    assert values(invoke("plan", "--json", four))["notes"] == []


def test_memory_is_counted_by_server(
    invoke: Invoke, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(assumed, "memory_bytes", lambda: 2 * 1048576)
    path = write((2, 2), SHM, servers=[[0, 2], [1, 3]], microbatches=2)
    assert values(invoke("plan", "--json", path))["notes"] == []


def test_options_of_a_transport_that_nobody_has_are_noted(invoke: Invoke, write: Write) -> None:
    path = write((1, 1), "[transports.shmm]\nlink_bytes = 1\n")
    text = (
        "transports.shmm is not used here: no transport of that name is installed on this "
        "machine, and no rule names it (did you mean 'shm'?)"
    )
    result = invoke("plan", "--json", path)
    assert (result.exit_code, values(result)["notes"]) == (0, [text])
    assert f" note: {text} Verified: " in said(invoke("plan", path))


def test_options_that_may_be_used_are_not_noted(
    invoke: Invoke, write: Write, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.transport("off")
    monkeypatch.setenv("STAGELINK_DISABLE_PLUGINS", "off")
    rule = '[[links]]\ntransport = ["elsewhere", "fast"]\n'
    options = "".join(f"[transports.{name}]\n" for name in ("elsewhere", "fast"))
    assert values(invoke("plan", "--json", write((1, 1), rule + options)))["notes"] == []
    off = write((1, 1), "[transports.off]\n")
    assert values(invoke("plan", "--json", off))["notes"] == []


def test_the_json_has_every_link_however_many(invoke: Invoke, write: Write) -> None:
    path = write((6, 4, 3), FAST, microbatches=12)
    plan = Plan.load(path)
    expected = sorted(pair for edge in plan.edges for pair in pairs(plan, edge))
    found = values(invoke("plan", path, "--json"))["links"]
    assert [(link["src"], link["dst"]) for link in found] == expected


def test_tensors_that_take_two_transports_are_two_links(
    invoke: Invoke, write: Write, site: Site
) -> None:
    site.transport("other")
    rule = '[[links]]\ntensor = "target"\ntransport = ["absent", "other"]\n'
    links = values(invoke("plan", "--json", write((1, 1), TARGET + rule + FAST)))["links"]
    assert [(link["tensors"], link["transport"]) for link in links] == [
        (["ab"], "fast"),
        (["target"], "other"),
    ]
    assert links[1]["reasons"][1] == "not 'absent': not installed on rank 0"


def test_the_json_stands_alone_even_where_a_plugin_prints(
    invoke: Invoke, write: Write, site: Site
) -> None:
    site.transport("loud", before="print('hello from the plugin')")
    result = invoke("plan", "--json", write((1, 1), '[[links]]\ntransport = "loud"\n'))
    assert values(result)["links"][0]["transport"] == "loud"
    assert "hello from the plugin" in result.stderr


def test_of_asynchronous_schedules_all_counts_are_proved(invoke: Invoke, write: Write) -> None:
    text = said(invoke("plan", write((2, 1), FAST, schedule="pipedream")))
    assert (
        "Verified: no deadlock, however many microbatches there are; a walk of 8 agrees."
    ) in text


def test_a_broken_transport_does_not_fill_the_table(
    invoke: Invoke, write: Write, site: Site
) -> None:
    site.plugin("far", "raise ImportError('no' * 1000)")
    text = said(invoke("plan", write((1, 1), '[[links]]\ntransport = ["far", "fast"]\n')))
    assert "not far: broken on rank 0" in text
    assert "nono" * 30 not in text


def test_receive_memory_is_by_rank(invoke: Invoke, write: Write) -> None:
    path = write((1, 2), FAST, microbatches=5, schedule="gpipe", tensor=DECLARED)
    found = verify(Plan.load(path)).receive_bytes
    expected = {str(rank): size for rank, size in found.items()}
    assert values(invoke("plan", "--json", path))["receive_bytes"] == expected


def test_another_number_of_microbatches_may_be_asked_for(invoke: Invoke, write: Write) -> None:
    path = write((1, 1), FAST, schedule="gpipe")
    asked = values(invoke("plan", path, "--json", "--microbatches", 9))
    assert [link["window"] for link in asked["links"]] == [9]
    assert "9 microbatches" in invoke("plan", path, "--microbatches", 9).stdout


# What is refused


def test_a_schedule_that_would_wait_for_ever_is_refused(invoke: Invoke, write: Write) -> None:
    path = write((2, 1), FAST, window=1)
    result = invoke("plan", path, columns=40)  # narrower than the text, which stays whole
    assert result.exit_code == 1
    assert f"Refused: {DEADLOCK}" in result.stdout
    assert "Verified" not in result.stdout
    as_json = invoke("plan", path, "--json")
    assert as_json.exit_code == 1
    assert values(as_json)["verified"] is False
    assert values(as_json)["problem"].startswith(DEADLOCK)


def test_a_link_without_a_transport_is_shown_and_refused(invoke: Invoke, write: Write) -> None:
    path = write((2, 1), '[[links]]\ntransport = ["absent", "missing"]\n')
    result = invoke("plan", path)
    assert result.exit_code == 1
    assert " 0→2, 1→2 ab none 2 see below " in said(result)
    assert "Verified: " in result.stdout
    assert "Refused: nothing can carry tensor 'ab' from rank 0 to rank 2" in result.stdout
    assert "- 'missing': not installed on rank 0" in result.stdout
    assert "(2 links have none)" in result.stdout


def test_a_link_without_a_transport_has_null_in_the_json(invoke: Invoke, write: Write) -> None:
    result = invoke("plan", "--json", write((1, 1), '[[links]]\ntransport = "absent"\n'))
    found = values(result)
    assert result.exit_code == 1
    assert found["verified"] is False
    assert [link["transport"] for link in found["links"]] == [None]
    assert "nothing can carry tensor 'ab'" in found["problem"]
    assert found["links"][0]["reasons"] == [found["problem"]]


def test_ranks_on_two_servers_are_judged_so(invoke: Invoke, write: Write, site: Site) -> None:
    site.transport(
        "near",
        """
        capabilities = Capabilities(
            devices=frozenset({"cpu"}), auto_rank=90, same_server=True, distinct_processes=True
        )
        """,
    )
    rule = '[[links]]\ntransport = ["near", "fast"]\n'
    links = values(invoke("plan", "--json", write((2, 1), rule, servers=[[0], [1, 2]])))["links"]
    assert [link["transport"] for link in links] == ["fast", "near"]
    assert links[0]["reasons"][1] == "not 'near': needs both ranks on one server"


def test_a_plan_that_is_wrong_ends_in_its_text(invoke: Invoke, write: Write) -> None:
    path = write((1, 1))
    path.write_text(path.read_text().replace("[1]", "[0]"))
    for options in ([], ["--json"]):
        result = invoke("plan", path, *options)
        assert result.exit_code == 1
        assert result.stdout == ""
        assert result.stderr.startswith(f"Error: {path}: stages[1].ranks[0]: rank 0 ")


@pytest.mark.parametrize(
    ("more", "pipeline", "text"),
    [
        (FAST + "[transports.fast]\nspeed = 9\n", {}, "transports.fast.speed"),
        (FAST, {"observers": ["nobody"]}, "unknown observer 'nobody'"),
    ],
)
def test_options_and_observers_are_checked(
    invoke: Invoke, write: Write, more: str, pipeline: dict[str, Any], text: str
) -> None:
    result = invoke("plan", write((1, 1), more, **pipeline))
    assert result.exit_code == 1
    assert text in result.stderr


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["nowhere.toml"], "'nowhere.toml' does not exist"),
        ([], "Missing argument 'CONFIG'"),
        (["--micro", "2"], "--micro"),
        (["--microbatches", "0"], "'--microbatches'"),
        (["--microbatches", "many"], "'--microbatches'"),
    ],
)
def test_a_wrong_command_line_is_no_refused_plan(
    invoke: Invoke, arguments: list[str], text: str
) -> None:
    result = invoke("plan", *arguments)
    assert result.exit_code == 2
    assert text in result.stderr
    assert result.stdout == ""


# PipeDream's files


@pytest.fixture
def pipedream(tmp_path: Path) -> Callable[..., Path]:
    """``pipedream((4, 3, 1), (1, 1, 0))``: a configuration with so many ranks and depths."""

    def make(replicas: Sequence[int], depths: Sequence[int] | None = None) -> Path:
        path = tmp_path / "conf.json"
        path.write_text(json.dumps(configuration(replicas, depths)), encoding="utf-8")
        return path

    return make


def test_a_pipedream_file(invoke: Invoke, pipedream: Callable[..., Path]) -> None:
    found = values(invoke("plan", pipedream((8, 4, 4)), "--json"))
    assert (found["verified"], found["schedule"]) == (True, "pipedream")
    assert [stage["warm_up"] for stage in found["stages"]] == [1, 1, 0]


def test_a_depth_map_that_hangs(invoke: Invoke, pipedream: Callable[..., Path]) -> None:
    result = invoke("plan", pipedream((4, 3, 1), (1, 1, 0)), "--json")
    assert result.exit_code == 1
    found = values(result)
    assert not found["verified"]
    assert (
        "deadlock: the ranks wait for each other in a cycle: rank 0 (stage 'stage0')"
        in found["problem"]
    )
    assert found["problem"].endswith(
        'in this file: "stage_to_depth_map": {"0": 2, "1": 1, "2": 0}'
    )
    assert "2, 1, 0 is safe" in found["problem"]


def test_the_plan_is_written_as_toml(
    invoke: Invoke, pipedream: Callable[..., Path], tmp_path: Path
) -> None:
    source, target = pipedream((4, 3, 1), (2, 1, 0)), tmp_path / "pipeline.toml"
    assert invoke("plan", source, "--write-toml", target).exit_code == 0
    written = Plan.load(target)
    assert written == Plan.load(source)
    again = invoke("plan", source, "--write-toml", target)
    assert again.exit_code == 2
    assert "is there already" in again.stderr
    nowhere = invoke("plan", source, "--write-toml", tmp_path / "no" / "where.toml")
    assert nowhere.exit_code == 1
    assert "No such file or directory" in nowhere.stderr


# Time slots

ONE_BY_ONE = "0: F0 B0 F2 B2\n1: F1 B1 F3 B3\n2: F0 B0 F1 B1 F2 B2 F3 B3\n"
HANGS = ONE_BY_ONE.replace("2: F0 B0 F1", "2: F0 F1 F3 F2 B0").replace("F2 B2 F3 B3\n", "B2 B3")


def grid_of(result: Result) -> list[str]:
    """The lines of the grid's parts."""
    return [line for line in result.stdout.splitlines() if line.startswith(("slot", "a ", "b "))]


def test_the_grid_shows_who_does_what_in_which_time_slot(invoke: Invoke, write: Write) -> None:
    result = invoke("plan", write((2, 1), FAST), "--grid")
    assert result.exit_code == 0
    assert grid_of(result)[-4:] == [
        "slot  0  1  2  3  4  5  6  7  8  9",
        "a 0  F0 F2  . B0  .  .  . B2  .  .",
        "a 1  F1 F3  .  .  . B1  .  .  . B3",
        "b 2   . F0 B0 F1 B1 F2 B2 F3 B3  .",
    ]
    assert "Verified" in result.stdout.splitlines()[-1]


def test_a_grid_too_wide_is_shown_in_parts(invoke: Invoke, write: Write) -> None:
    narrow = invoke("plan", write((2, 1), FAST), "--grid", columns=22)
    assert all(len(line) <= 22 for line in grid_of(narrow) if line.startswith("slot"))
    parts = [line.split()[1:] for line in grid_of(narrow) if line.startswith("slot")]
    assert [int(slot) for part in parts for slot in part] == list(range(10))


def test_of_a_long_grid_both_ends_are_shown(invoke: Invoke, write: Write) -> None:
    path = write((1, 1), FAST)
    long = invoke("plan", path, "--grid", "--microbatches", "1000")
    left_out = "1602 slots in the middle are left out; --json has them"
    assert left_out in said(long)
    assert "F0" in long.stdout
    assert "B999" in long.stdout
    slots = values(invoke("plan", path, "--grid", "--microbatches", "1000", "--json"))["grid"]
    assert [len(row) for row in slots["slots"]] == [2002, 2002]


def test_own_lists_of_actions_are_verified_and_shown(
    invoke: Invoke, write: Write, tmp_path: Path
) -> None:
    lists = tmp_path / "lists.txt"
    lists.write_text(ONE_BY_ONE)
    arguments = ["plan", write((2, 1), FAST), "--actions", lists, "--grid"]
    result = invoke(*arguments)
    assert result.exit_code == 0
    assert grid_of(result)[-3:] == [
        "a 0  F0  .  . B0 F2  .  . B2  .  .",
        "a 1  F1  .  .  .  . B1 F3  .  . B3",
        "b 2   . F0 B0 F1 B1 F2 B2 F3 B3  .",
    ]
    found = values(invoke(*arguments, "--json"))
    assert (found["verified"], found["grid"]["deadlock"]) == (True, [])
    assert found["grid"]["slots"][0][:4] == ["F0", None, None, "B0"]


def test_a_deadlock_is_marked_where_it_is(invoke: Invoke, write: Write, tmp_path: Path) -> None:
    lists = tmp_path / "lists.txt"
    lists.write_text(HANGS)
    arguments = ["plan", write((2, 1), FAST), "--actions", lists, "--grid"]
    result = invoke(*arguments)
    assert result.exit_code == 1
    assert "! waits in the cycle, ? for one that does" in said(result)
    assert grid_of(result)[-4:] == [
        "slot   0   1   2   3",
        "a 0   F0 B0?   .   .",
        "a 1   F1 B1!   .   .",
        "b 2    .  F0  F1 F3!",
    ]
    found = values(invoke(*arguments, "--json"))
    assert found["grid"]["deadlock"] == [1, 2]
    assert found["grid"]["waits"] == {"0": "B0", "1": "B1", "2": "F3"}


def test_lists_that_cannot_be_read_are_told_by_line(
    invoke: Invoke, write: Write, tmp_path: Path
) -> None:
    lists = tmp_path / "lists.txt"
    lists.write_text("0: F0\n1: G1\n")
    result = invoke("plan", write((2, 1), FAST), "--actions", lists)
    assert result.exit_code == 1
    assert f"Error: {lists}: line 2: 'G1' is no action" in result.stderr
    lists.write_bytes(b"\xff")
    result = invoke("plan", write((2, 1), FAST), "--actions", lists)
    assert "line 1 is not UTF-8 text, as a list must be" in result.stderr


def test_wrong_lists_are_refused(invoke: Invoke, write: Write, tmp_path: Path) -> None:
    lists = tmp_path / "lists.txt"
    lists.write_text(ONE_BY_ONE.replace("B3", ""))
    result = invoke("plan", write((2, 1), FAST), "--actions", lists, "--grid")
    assert result.exit_code == 1
    assert "Refused: actions of rank 1: B3 is missing" in result.stdout

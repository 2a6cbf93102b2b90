"""What a rank can use is found out without harm, and reaches its peers unchanged."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from stagelink.errors import PlanError, PluginError, ProtocolError
from stagelink.plugins.offers import End, Offer, survey
from stagelink.plugins.plugins import Plugins
from stagelink.transport.contract import Capabilities, Endpoint, Link, Verdict

if TYPE_CHECKING:
    from tests.support.site import Site

CAPABILITIES = Capabilities(devices=frozenset({"cpu"}), auto_rank=5)
LINK = Link(0, 1, "fast", "cpu")


def offer_of(name: str) -> Offer:
    found = survey(Plugins(), [name], {})
    assert name not in found.transports
    return found.offers[name]


def test_a_usable_transport_is_made_with_its_options_and_described(site: Site) -> None:
    site.transport(
        "fast",
        """
        from dataclasses import dataclass

        @dataclass
        class Options:
            lanes: int = 1

        def describe(self):
            return {"lanes": (self.options.lanes,)}
        """,
    )
    found = survey(Plugins(), ["fast"], {"fast": {"lanes": 4}})
    assert found.transports["fast"].options.lanes == 4
    assert found.offers == {"fast": Offer("usable", "", CAPABILITIES, {"lanes": [4]})}


def test_only_what_is_asked_for_is_looked_at(site: Site) -> None:
    site.transport("fast")
    site.plugin("other", "raise OSError")
    assert set(survey(Plugins(), ["fast"], {}).offers) == {"fast"}


def test_all_are_looked_at_where_no_name_is_given(site: Site) -> None:
    site.transport("fast")
    site.plugin("other", "raise OSError")
    offers = survey(Plugins(), None, {}).offers
    assert offers["fast"].state == "usable"
    assert offers["other"].state == "broken"


def test_c092_a_transport_that_cannot_be_used_here_says_why(site: Site) -> None:
    refusal = """
        @classmethod
        def probe(cls, options):
            return Verdict(False, "this torch was built without NCCL")
        """
    site.transport("nickel", refusal)
    assert offer_of("nickel") == Offer(
        "unusable", "this torch was built without NCCL", CAPABILITIES
    )


def test_a_transport_for_other_devices_is_not_asked_to_describe_itself(site: Site) -> None:
    describes = """
        def describe(self):
            return {"set up": True}
        """
    site.transport("fast", describes)
    for device, description in ("cpu", {"set up": True}), ("cuda", {}):
        assert survey(Plugins(), ["fast"], {}, [device]).offers["fast"].description == description


def test_c054_a_broken_one_has_its_distribution_and_cause(site: Site) -> None:
    site.plugin("fast", "import nowhere_to_be_found")
    offer = offer_of("fast")
    assert offer.state == "broken"
    assert "'fast-dist'" in offer.reason
    assert "nowhere_to_be_found" in offer.reason


def test_c058_one_that_is_not_installed_is_absent() -> None:
    offer = offer_of("not-here")
    assert offer.state == "absent"
    assert "registered in code exists only in the process" in offer.reason


def test_c120_a_disabled_one_says_so(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.transport("fast")
    monkeypatch.setenv("STAGELINK_DISABLE_PLUGINS", "fast")
    assert survey(Plugins(), None, {}).offers["fast"].state == "disabled"
    assert offer_of("fast").state == "disabled"
    assert "STAGELINK_DISABLE_PLUGINS" in offer_of("fast").reason


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (
            "@classmethod\ndef probe(cls, options): raise OSError('no bus')",
            "probe raised OSError: no bus",
        ),
        (
            "@classmethod\ndef probe(cls, options): return True",
            "probe returned True, not a Verdict",
        ),
        (
            "def __init__(self, options): raise OSError('no memory')",
            "its constructor raised OSError: no memory",
        ),
        ("def describe(self): raise OSError('no uuid')", "describe raised OSError: no uuid"),
        ("def describe(self): return 7", "describe raised TypeError: "),
        ("def describe(self): return {'id': b'7'}", "describe raised TypeError: .*bytes"),
    ],
)
def test_a_transport_that_fails_when_asked_is_broken(
    site: Site, changes: str, problem: str
) -> None:
    site.transport("fast", changes)
    offer = offer_of("fast")
    assert offer.state == "broken"
    with pytest.raises(PluginError, match=f"'fast-dist' .* cannot be used: {problem}"):
        raise PluginError(offer.reason)


def test_wrong_options_are_the_plan_s_mistake(site: Site) -> None:
    site.transport("fast")
    with pytest.raises(PlanError, match=r"transports\.fast\.lanes: unknown option 'lanes'"):
        survey(Plugins(), ["fast"], {"fast": {"lanes": 4}})


# can_connect


PLACES = Endpoint(0, "a", "a", {}), Endpoint(1, "a", "b", {})


def test_a_transport_judges_a_pair(site: Site) -> None:
    reason = "f'{link} {local.rank} {remote.rank}'"
    site.transport(
        "fast", f"def can_connect(self, link, local, remote): return Verdict(0, {reason})"
    )
    verdict = survey(Plugins(), ["fast"], {}).can_connect(LINK, *PLACES)
    assert verdict == Verdict(False, "0→1 by fast 0 1")


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("raise KeyError('uuid')", "can_connect raised KeyError: 'uuid'"),
        ("return None", "can_connect returned None, not a Verdict"),
    ],
)
def test_a_transport_that_fails_to_judge_is_named(site: Site, body: str, problem: str) -> None:
    site.transport("fast", f"def can_connect(self, link, local, remote): {body}")
    with pytest.raises(PluginError, match=f"transport 'fast' cannot be used: {problem}"):
        survey(Plugins(), ["fast"], {}).can_connect(LINK, *PLACES)


# On the way to a peer


def test_an_end_reaches_a_peer_unchanged() -> None:
    capabilities = Capabilities(
        devices=frozenset({"cpu", "cuda"}),
        auto_rank=7,
        same_server=True,
        in_flight=3,
        dtypes=frozenset({"float32"}),
    )
    end = End(
        2,
        "server",
        "process",
        {
            "fast": Offer(
                "usable", "", capabilities, {"uuid": "GPU-1", "lanes": [1, {"a": None}]}
            ),
            "gone": Offer("absent", "not there"),
        },
    )
    assert End.from_json(json.loads(json.dumps(end.to_json()))) == end


@pytest.mark.parametrize(
    "values",
    [None, {}, {"rank": 0, "server": "a", "process": "b", "offers": {"fast": {"state": "fine"}}}],
)
def test_what_is_no_end_is_a_protocol_error(values: object) -> None:
    with pytest.raises(ProtocolError, match="a peer's transports cannot be read"):
        End.from_json(values)


def test_a_place_has_the_description_of_its_transport() -> None:
    end = End(2, "server", "process", {"fast": Offer("usable", "", CAPABILITIES, {"uuid": 1})})
    assert end.place("fast") == Endpoint(2, "server", "process", {"uuid": 1})

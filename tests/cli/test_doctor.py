"""``stagelink doctor`` lists what is installed, and what is wrong with it."""

from __future__ import annotations

import json
import platform
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import pytest
import torch

if TYPE_CHECKING:
    from tests.cli.conftest import Invoke
    from tests.support.site import Site


def finding(invoke: Invoke, name: str, kind: str = "transports") -> dict[str, Any]:
    """The one entry of that name; the JSON must be alone on stdout and the exit code 0."""
    found = findings(invoke, name, kind)
    assert len(found) == 1
    return found[0]


def findings(invoke: Invoke, name: str, kind: str = "transports") -> list[dict[str, Any]]:
    result = invoke("doctor", "--json")
    assert result.exit_code == 0
    return [one for one in json.loads(result.stdout)[kind] if one["name"] == name]


def test_core_s_own_transport_is_usable_with_its_options(invoke: Invoke) -> None:
    assert finding(invoke, "loopback") == {
        "name": "loopback",
        "distribution": "stagelink",
        "version": version("stagelink"),
        "state": "usable",
        "reason": "",
        "options": {},
    }


def test_the_table_has_versions_states_and_options(invoke: Invoke, site: Site) -> None:
    site.plugin("broken", "raise ImportError('no libfast')")
    result = invoke("doctor")
    assert result.exit_code == 0
    text = " ".join(result.stdout.split())
    own, python = version("stagelink"), platform.python_version()
    assert text.startswith(f"stagelink {own}, torch {torch.__version__}, Python {python} ")
    assert f"loopback stagelink {own} usable" in text
    assert "broken broken-dist 1.0 broken: distribution 'broken-dist' 1.0" in text
    assert "(in " in text
    assert "broken_module.py, line 1)" in text.replace(" ", "").replace(",line", ", line ")
    assert "Observers" in text
    assert f"prometheus stagelink-prometheus {own} usable" in text


def test_versions_are_in_the_json(invoke: Invoke) -> None:
    found = json.loads(invoke("doctor", "--json").stdout)
    assert found["stagelink"] == version("stagelink")
    assert found["torch"] == torch.__version__
    assert found["python"] == platform.python_version()
    assert found["disabled_plugins"] is None


def test_what_cannot_be_used_here_has_the_probe_s_reason(invoke: Invoke, site: Site) -> None:
    site.transport(
        "fast",
        """
        @classmethod
        def probe(cls, options):
            return Verdict(False, "no such card here")
        """,
    )
    found = finding(invoke, "fast")
    assert (found["state"], found["reason"]) == ("unusable", "no such card here")
    assert "fast fast-dist 1.0 unusable: no such card here" in " ".join(
        invoke("doctor").stdout.split()
    )


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("raise ImportError('no libfast')", "its import raised ImportError: no libfast"),
        (
            """
            from stagelink.transport.hooks import hookimpl
            @hookimpl
            def stagelink_register_transport():
                raise OSError("no card")
            """,
            "its stagelink_register_transport raised OSError: no card",
        ),
    ],
)
def test_a_broken_plugin_is_listed_and_harms_no_other(
    invoke: Invoke, site: Site, source: str, reason: str
) -> None:
    site.plugin("broken", source)
    found = finding(invoke, "broken")
    assert (found["distribution"], found["version"]) == ("broken-dist", "1.0")
    assert found["state"] == "broken"
    assert reason in found["reason"]
    assert finding(invoke, "loopback")["state"] == "usable"


def test_a_probe_that_raises_is_a_broken_plugin(invoke: Invoke, site: Site) -> None:
    site.transport("fast", "probe = classmethod(lambda cls, options: 1 / 0)")
    found = finding(invoke, "fast")
    assert found["state"] == "broken"
    assert "probe raised ZeroDivisionError: division by zero (in " in found["reason"]
    assert "fast_module.py, line " in found["reason"]


def test_defaults_that_are_refused_are_a_broken_plugin(invoke: Invoke, site: Site) -> None:
    site.transport(
        "fast",
        """
        @dataclasses.dataclass
        class Options:
            speed: int = 1

            def __post_init__(self):
                raise ValueError("never fast enough")
        """,
        before="import dataclasses",
    )
    found = finding(invoke, "fast")
    assert found["state"] == "broken"
    assert "never fast enough" in found["reason"]


def test_options_that_raise_anything_else_are_a_broken_plugin(invoke: Invoke, site: Site) -> None:
    site.transport(
        "fast",
        """
        @dataclasses.dataclass
        class Options:
            def __post_init__(self):
                raise OSError("no file")
        """,
        before="import dataclasses",
    )
    found = finding(invoke, "fast")
    assert found["state"] == "broken"
    assert "Fake.Options, raised OSError: no file (in " in found["reason"]


def test_two_that_provide_one_name_are_both_listed(invoke: Invoke, site: Site) -> None:
    site.transport("fast")
    site.distribution("rival-dist", "fast = fast_module")
    found = findings(invoke, "fast")
    assert sorted(one["distribution"] for one in found) == ["fast-dist", "rival-dist"]
    assert {one["state"] for one in found} == {"broken"}
    assert "provided more than once" in found[0]["reason"]


def test_another_s_plugin_under_core_s_name_is_broken(invoke: Invoke, site: Site) -> None:
    site.distribution("usurper-dist", "loopback = usurper_module")
    states = {one["distribution"]: one["state"] for one in findings(invoke, "loopback")}
    assert states == {"stagelink": "usable", "usurper-dist": "broken"}


def test_what_is_disabled_is_listed_and_not_loaded(
    invoke: Invoke, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.plugin("broken", "raise ImportError('no libfast')")
    site.plugin("watcher", "raise ImportError('no display')", group="stagelink.observers")
    monkeypatch.setenv("STAGELINK_DISABLE_PLUGINS", "broken,watcher")
    for name, kind in (("broken", "transports"), ("watcher", "observers")):
        found = finding(invoke, name, kind)
        assert found["state"] == "disabled"
        assert "STAGELINK_DISABLE_PLUGINS" in found["reason"]
    assert json.loads(invoke("doctor", "--json").stdout)["disabled_plugins"] == "broken,watcher"
    assert "STAGELINK_DISABLE_PLUGINS=broken,watcher" in invoke("doctor").stdout


def test_observers_are_loaded_and_judged_too(invoke: Invoke, site: Site) -> None:
    source = """
    from stagelink.transport.hooks import hookimpl
    @hookimpl
    def stagelink_event(event): ...
    """
    site.plugin("watcher", source, group="stagelink.observers")
    site.plugin("blind", "raise ImportError('no eyes')", group="stagelink.observers")
    assert finding(invoke, "watcher", "observers")["state"] == "usable"
    blind = finding(invoke, "blind", "observers")
    assert blind["state"] == "broken"
    assert "no eyes" in blind["reason"]
    assert "watcher watcher-dist 1.0 usable" in " ".join(invoke("doctor").stdout.split())


def test_the_json_stands_alone_even_where_a_plugin_prints(invoke: Invoke, site: Site) -> None:
    site.transport("fast", before="print('hello from the plugin')")
    assert finding(invoke, "fast")["state"] == "usable"


def test_options_that_json_cannot_carry_are_text(invoke: Invoke, site: Site) -> None:
    site.transport(
        "fast",
        """
        @dataclasses.dataclass
        class Options:
            folder: pathlib.Path = pathlib.Path("here")
        """,
        before="import dataclasses, pathlib",
    )
    assert finding(invoke, "fast")["options"] == {"folder": "here"}


def test_doctor_takes_no_arguments(invoke: Invoke) -> None:
    assert invoke("doctor", "gloo").exit_code == 2

"""Plugins are found without being imported, loaded when asked for, and refused with a reason."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import stagelink.transport
from stagelink.errors import PluginError, UnknownTransportError
from stagelink.plugins.plugins import Plugins
from tests.support.minimal import Minimal, changed

if TYPE_CHECKING:
    from tests.support.site import Site

WHO = r"distribution 'fast-dist' 1\.0 \(entry point 'fast = fast_module'\) cannot be used: "


# Found and loaded


def test_a_transport_is_found_without_being_imported(site: Site) -> None:
    site.transport("fast")
    plugins = Plugins()
    assert "fast" in plugins.known
    assert "fast_module" not in sys.modules


def test_loading_one_transport_imports_no_other(site: Site) -> None:
    site.transport("fast")
    site.transport("other")
    assert Plugins().load("fast").name == "fast"
    assert "other_module" not in sys.modules


def test_a_transport_is_loaded_once(site: Site) -> None:
    site.transport("fast", returned="type('Fresh', (Fake,), {})")
    plugins = Plugins()
    assert plugins.load("fast") is plugins.load("fast")


def test_core_s_own_transport_comes_through_an_entry_point(site: Site) -> None:
    site.distribution("stagelink", "loopback = stagelink.transport.loopback")
    plugins = Plugins()
    assert plugins.load("loopback").name == "loopback"
    assert plugins.provider("loopback").startswith("distribution 'stagelink'")


def test_one_module_may_serve_two_entry_points(site: Site) -> None:
    site.transport("fast", returned="[Fake, type('Second', (Fake,), {'name': 'second'})]")
    site.distribution("second-dist", "second = fast_module")
    plugins = Plugins()
    assert plugins.load("fast").name == "fast"
    assert plugins.load("second").name == "second"


def test_a_transport_registered_in_code_is_known_to_this_object_only() -> None:
    plugins = Plugins(transports=[Minimal])
    assert plugins.load("minimal") is Minimal
    assert "minimal" in plugins.known
    assert plugins.provider("minimal").endswith("minimal.Minimal, registered in code")
    assert "minimal" not in Plugins().known


def test_the_same_class_may_be_registered_twice() -> None:
    plugins = Plugins(transports=[Minimal])
    plugins.register(Minimal)
    assert plugins.load("minimal") is Minimal


def test_a_wrong_class_is_refused_at_registration() -> None:
    with pytest.raises(PluginError, match=r"registered in code cannot be used: .* is not a class"):
        Plugins(transports=["minimal"])  # type: ignore[list-item]


# C054: a broken plugin


def test_c054_a_broken_plugin_harms_only_who_asks_for_it(site: Site) -> None:
    site.plugin("fast", "import a_library_that_is_not_there")
    site.transport("fine")
    plugins = Plugins()
    assert plugins.load("fine").name == "fine"
    usable, broken = plugins.load_all()
    assert "fine" in usable
    assert "fast" not in usable
    (report,) = [entry for entry in broken if entry.name == "fast"]
    assert [found.distribution for found in report.found] == ["fast-dist"]
    assert "a_library_that_is_not_there" in str(report.error)
    with pytest.raises(
        PluginError,
        match=WHO + "its import raised ModuleNotFoundError: .*a_library_that_is_not_there.*; "
        "repair or uninstall 'fast-dist', or put 'fast' into .* STAGELINK_DISABLE_PLUGINS",
    ) as caught:
        plugins.load("fast")
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)


def test_c054_a_module_that_ends_the_process_is_a_broken_plugin(site: Site) -> None:
    site.plugin("fast", "raise SystemExit('no licence')")
    with pytest.raises(PluginError, match=WHO + "its import raised SystemExit: no licence"):
        Plugins().load("fast")


def test_c054_an_interrupt_is_not_taken_for_a_broken_plugin(site: Site) -> None:
    site.plugin("fast", "raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        Plugins().load_all()


def test_c054_nothing_is_half_registered_when_registration_raises(site: Site) -> None:
    site.plugin(
        "fast",
        """
        from stagelink.transport.hooks import hookimpl

        @hookimpl
        def stagelink_register_transport():
            raise RuntimeError("no driver")

        @hookimpl
        def stagelink_event(event):
            pass
        """,
    )
    plugins = Plugins()
    with pytest.raises(
        PluginError, match=WHO + "its stagelink_register_transport raised RuntimeError: no driver"
    ):
        plugins.load("fast")
    assert not plugins.hooks.wants_events
    assert "fast" not in plugins.load_all()[0]


def test_c054_damaged_metadata_harms_nobody(site: Site) -> None:
    site.transport("fast")
    (site.path / "fast_dist-1.0.dist-info" / "METADATA").unlink()
    site.module("fast_module", "raise OSError('gone')")
    with pytest.raises(PluginError, match=r"'\(without a name\)' \(without a version\)"):
        Plugins().load("fast")


# C056: hooks that would never be called


def hook_module(mark: str, name: str) -> str:
    return f"""
        import pluggy
        from stagelink.transport.hooks import hookimpl
        foreign = pluggy.HookimplMarker("pytest")

        {mark}
        def {name}():
            return None
        """


@pytest.mark.parametrize(
    ("mark", "name", "problem"),
    [
        (
            "@hookimpl",
            "make_transprot",
            "'make_transprot' is marked as a hook implementation, but stagelink has no hook of "
            r"that name \(did you mean .*'stagelink_register_transport'\?\)",
        ),
        (
            "@hookimpl(specname='stagelink_events')",
            "watch",
            r"'watch' is marked .* no hook of that name \(did you mean 'stagelink_event'\?\)",
        ),
        (
            "@hookimpl",
            "zzz",
            "'zzz' is marked .* no hook of that name; it has .*'stagelink_register_transport'",
        ),
        (
            "",
            "stagelink_regster_transport",
            "'stagelink_regster_transport' looks like a hook, but stagelink has no hook of that "
            r"name \(did you mean 'stagelink_register_transport'",
        ),
        (
            "",
            "stagelink_register_transport",
            "'stagelink_register_transport' has no mark of stagelink's; put @hookimpl from "
            "stagelink.transport.hooks on it",
        ),
        (
            "@foreign",
            "stagelink_register_transport",
            "'stagelink_register_transport' has no mark of stagelink's but that of 'pytest'; put",
        ),
        (
            "",
            "make_transport",
            "it has no hook implementation; define one of .*'stagelink_register_transport'",
        ),
    ],
)
def test_c056_a_hook_that_would_never_be_called_is_refused(
    site: Site, mark: str, name: str, problem: str
) -> None:
    site.plugin("fast", hook_module(mark, name))
    with pytest.raises(PluginError, match=WHO + problem):
        Plugins().load("fast")


def test_c056_every_wrong_hook_of_a_plugin_is_told(site: Site) -> None:
    site.plugin(
        "fast",
        """
        from stagelink.transport.hooks import hookimpl

        @hookimpl
        def stagelink_evnt(event): ...

        @hookimpl
        def stagelink_link_open(link): ...
        """,
    )
    with pytest.raises(PluginError, match=r"(?s)\n  - 'stagelink_evnt' .*\n  - 'stagelink_link_o"):
        Plugins().load("fast")


def test_c056_an_argument_that_the_hook_does_not_have_is_refused(site: Site) -> None:
    site.plugin(
        "fast",
        """
        from stagelink.transport.hooks import hookimpl

        @hookimpl
        def stagelink_link_opened(lnik): ...
        """,
    )
    with pytest.raises(PluginError, match=r"Argument\(s\) \{'lnik'\} are declared"):
        Plugins().load("fast")


def test_c056_a_hook_of_a_newer_stagelink_may_be_declared_optional(site: Site) -> None:
    site.transport("fast")
    with (site.path / "fast_module.py").open("a") as module:
        module.write("@hookimpl(optionalhook=True)\ndef stagelink_link_dreamt_of(link): ...\n")
    assert Plugins().load("fast").name == "fast"


def test_c056_a_plugin_may_be_one_of_pytest_too_and_import_what_it_likes(site: Site) -> None:
    site.module("elsewhere", "def stagelink_version(): ...")
    site.transport("fast")
    with (site.path / "fast_module.py").open("a") as module:
        module.write(
            "import pluggy\n"
            "from elsewhere import stagelink_version\n"
            "from stagelink.transport.hooks import stagelink_event\n"
            "@pluggy.HookimplMarker('pytest')\ndef pytest_configure(config): ...\n"
        )
    assert Plugins().load("fast").name == "fast"


# C057: one name, several providers


def test_c057_two_distributions_of_one_name_conflict_only_for_who_asks(site: Site) -> None:
    site.transport("fast")
    site.distribution("speedy", "fast = fast_module", version="2.0")
    site.transport("fine")
    plugins = Plugins()
    assert plugins.load("fine").name == "fine"
    conflict = r"(?s)'fast' is provided more than once.*'speedy' 2\.0.*Rename or uninstall"
    with pytest.raises(PluginError, match=conflict) as caught:
        plugins.load("fast")
    assert "'fast-dist' 1.0" in str(caught.value)
    usable, broken = plugins.load_all()
    assert "fine" in usable
    (report,) = [entry for entry in broken if entry.name == "fast"]
    assert {found.distribution for found in report.found} == {"fast-dist", "speedy"}


def test_c057_core_s_own_is_never_replaced_and_who_tries_is_told(site: Site) -> None:
    site.distribution("stagelink", "loopback = stagelink.transport.loopback")
    site.transport("loopback")
    plugins = Plugins()
    assert plugins.load("loopback").__module__ == "stagelink.transport.loopback"
    usable, broken = plugins.load_all()
    assert usable["loopback"].__module__ == "stagelink.transport.loopback"
    (report,) = [entry for entry in broken if entry.name == "loopback"]
    assert "'loopback-dist' 1.0" in str(report.error)
    assert "'loopback' is the name of core's own transport" in str(report.error)
    assert "loopback_module" not in sys.modules


def test_c057_code_cannot_take_the_name_of_core_s_own(site: Site) -> None:
    site.distribution("stagelink", "loopback = stagelink.transport.loopback")
    with pytest.raises(PluginError, match="'loopback' is the name of core's own transport"):
        Plugins(transports=[changed(name="loopback")])


def test_c057_an_installed_plugin_and_one_in_code_conflict(site: Site) -> None:
    site.transport("fast")
    plugins = Plugins(transports=[changed(name="fast"), Minimal])
    with pytest.raises(PluginError, match=r"(?s)'fast' is provided more.*Changed.*'fast-dist' 1"):
        plugins.load("fast")
    usable, broken = plugins.load_all()
    assert usable["minimal"] is Minimal
    assert "fast" in [entry.name for entry in broken]


def test_the_class_that_is_installed_may_be_given_in_code_as_well(site: Site) -> None:
    site.transport("fast")
    installed = Plugins().load("fast")
    assert Plugins(transports=[installed]).load("fast") is installed


def test_c057_two_classes_of_one_name_conflict_at_registration() -> None:
    with pytest.raises(
        PluginError, match=r"(?s)'minimal' is provided more than once.*Minimal.*Changed"
    ):
        Plugins(transports=[Minimal, changed(name="minimal")])


# C058: processes


LOAD = """
from stagelink.plugins.plugins import Plugins
print("LOADED", Plugins().load("faster").__name__)
try:
    Plugins().load("fast")
except LookupError as error:
    print(error)
"""


def test_c058_another_process_knows_what_has_an_entry_point_and_no_more(site: Site) -> None:
    site.transport("faster")
    assert Plugins(transports=[changed(name="fast")]).load("fast")
    sources = Path(next(iter(stagelink.transport.__path__))).parents[1]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(site.path), str(sources)])}
    command = [sys.executable, "-c", LOAD]
    worker = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    text = worker.stdout
    assert text.startswith("LOADED Fake\n")
    assert "unknown transport 'fast' (did you mean 'faster'?); this process has" in text
    assert "an entry point 'fast' in the group 'stagelink.transports'" in text
    assert "registered in code exists only in the process that registered it" in text


def test_an_unknown_transport_is_a_lookup_error_and_a_plugin_error() -> None:
    with pytest.raises(UnknownTransportError, match="unknown transport 'nothing-like-it'"):
        Plugins().load("nothing-like-it")
    assert issubclass(UnknownTransportError, PluginError)


# C095: classes and instances


def test_c095_an_entry_point_that_names_the_class_is_told_what_to_name(site: Site) -> None:
    site.transport("fast")
    site.distribution("direct", "direct = fast_module:Fake")
    remedy = "it is the class 'Fake'; an entry point names the module, and the module's"
    with pytest.raises(PluginError, match=remedy):
        Plugins().load("direct")


@pytest.mark.parametrize(
    ("returned", "problem"),
    [
        ("Fake(None)", "is an instance; return the class 'Fake' itself"),
        ("'fast'", "'fast' is not a class; return a subclass of stagelink's Transport"),
        ("dict", "class 'dict' is not a subclass of stagelink's Transport"),
        ("None", "it registers no class; return one from stagelink_register_transport"),
        ("[]", "it registers no class"),
        ("[Fake, type('Twin', (Fake,), {})]", "it registers 2 classes of the name 'fast'"),
        (
            "type('Slow', (Fake,), {'name': 'slow'})",
            "its class is named 'slow', its entry point 'f",
        ),
        ("type('Nameless', (Fake,), {'name': ''})", "class 'Nameless' has no name; set the class"),
    ],
)
def test_c095_what_is_no_class_of_that_name_is_refused(
    site: Site, returned: str, problem: str
) -> None:
    site.transport("fast", returned=returned)
    with pytest.raises(PluginError, match=f"{WHO}.*{problem}"):
        Plugins().load("fast")


# C120: switched off


def test_c120_a_named_plugin_is_kept_out(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.transport("fast")
    site.transport("fine")
    monkeypatch.setenv("STAGELINK_DISABLE_PLUGINS", "slow, fast")
    plugins = Plugins()
    assert "fast" not in plugins.known
    assert plugins.load("fine").name == "fine"
    with pytest.raises(
        UnknownTransportError,
        match=r"transport 'fast' of distribution 'fast-dist' 1\.0 .* is disabled: take 'fast' "
        r"\(or 'all'\) out of the environment variable STAGELINK_DISABLE_PLUGINS",
    ):
        plugins.load("fast")
    assert "fast_module" not in sys.modules


def test_c120_all_leaves_what_core_ships_and_what_is_in_code(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.distribution("stagelink", "loopback = stagelink.transport.loopback")
    site.transport("fast")
    monkeypatch.setenv("STAGELINK_DISABLE_PLUGINS", "all")
    assert Plugins(transports=[Minimal]).known == ["loopback", "minimal"]


def test_c120_the_switch_is_read_at_each_open(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.transport("fast")
    monkeypatch.setenv("STAGELINK_DISABLE_PLUGINS", "fast")
    assert "fast" not in Plugins().known
    monkeypatch.delenv("STAGELINK_DISABLE_PLUGINS")
    assert "fast" in Plugins().known


def test_c120_a_disabled_plugin_leaves_its_name_to_code(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.transport("fast")
    monkeypatch.setenv("STAGELINK_DISABLE_PLUGINS", "fast")
    own = changed(name="fast")
    assert Plugins(transports=[own]).load("fast") is own

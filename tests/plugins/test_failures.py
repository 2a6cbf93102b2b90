"""What a plugin raises keeps its causes, and the text says where it broke."""

from __future__ import annotations

import re
import traceback
from typing import TYPE_CHECKING, Any

import pytest

import stagelink
from stagelink import Plan
from stagelink.errors import NoTransportError, PluginError, StagelinkError
from stagelink.plugins.offers import survey
from stagelink.plugins.plugins import Plugins
from stagelink.testing import run_threads
from stagelink.transport.contract import Endpoint, Link
from tests.support.pipelines import LOOPBACK, document

if TYPE_CHECKING:
    from torch.distributed import Store

    from tests.support.site import Site

LINK = Link(0, 1, "fast", "cpu")
WHO = r"distribution 'fast-dist' 1\.0 \(entry point 'fast = fast_module'\) cannot be used: "


def line_of(site: Site, module: str, text: str) -> str:
    """The place of the line with this text, as errors name it."""
    file = site.path / f"{module}.py"
    number = 1 + next(i for i, line in enumerate(file.read_text().splitlines()) if text in line)
    return f"{file}, line {number}"


def failure(name: str = "fast") -> PluginError:
    with pytest.raises(PluginError) as caught:
        Plugins().load(name)
    return caught.value


def shown(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


def test_an_import_that_raises(site: Site) -> None:
    site.plugin("fast", "import os\n\nraise ImportError('no libfast')  # here\n")
    error = failure()
    place = line_of(site, "fast_module", "# here")
    want = f"{WHO}its import raised ImportError: no libfast \\(in {re.escape(place)}\\); repair or"
    assert re.match(want, str(error))
    assert isinstance(error.__cause__, ImportError)
    assert "raise ImportError('no libfast')  # here" in shown(error)


def test_an_import_that_breaks_deep_inside_of_another(site: Site) -> None:
    site.module("fast_inner", "def load():\n    raise OSError('libfast.so: no such file')\n")
    source = """
    import fast_inner
    try:
        fast_inner.load()  # the plugin's own line
    except OSError as error:
        raise ImportError("no libfast") from error  # what it makes of it
    """
    site.plugin("fast", source)
    error = failure()
    inner = line_of(site, "fast_inner", "raise OSError")
    outer = line_of(site, "fast_module", "what it makes of it")
    assert (
        "its import raised ImportError: no libfast, because of OSError: libfast.so: no such file "
        f"(in {inner}, reached from {outer})"
    ) in str(error)
    assert isinstance(error.__cause__, ImportError)
    assert isinstance(error.__cause__.__cause__, OSError)
    assert "the plugin's own line" in shown(error)


def test_a_dependency_that_is_not_there(site: Site) -> None:
    site.module("fast_inner", "import no_such_library  # here")
    site.plugin("fast", "import fast_inner  # from there")
    text = str(failure())
    inner = line_of(site, "fast_inner", "# here")
    outer = line_of(site, "fast_module", "# from there")
    assert "ModuleNotFoundError: No module named 'no_such_library'" in text
    assert f"(in {inner}, reached from {outer})" in text


def test_a_module_that_is_no_python(site: Site) -> None:
    site.plugin("fast", "import os\nthis is no python\n")
    text = str(failure())
    assert "its import raised SyntaxError: invalid syntax" in text
    assert f"(in {line_of(site, 'fast_module', 'this is')})" in text


def test_an_entry_point_that_leads_nowhere(site: Site) -> None:
    site.distribution("fast-dist", "fast = no_such_module")
    site.distribution("other-dist", "other = tests.plugins.test_failures:nothing")
    for name, said in (
        ("fast", "ModuleNotFoundError: No module named 'no_such_module'; repair or"),
        ("other", "has no attribute 'nothing'; repair or"),
    ):
        assert said in str(failure(name))


def test_a_registration_that_raises(site: Site) -> None:
    site.transport("fast", returned="1 / 0")
    error = failure()
    place = line_of(site, "fast_module", "return 1 / 0")
    assert "its stagelink_register_transport raised ZeroDivisionError: division by zero (in " in (
        str(error)
    )
    assert f"(in {place})" in str(error)
    assert isinstance(error.__cause__, ZeroDivisionError)


BREAKS = {
    "probe": "@classmethod\ndef probe(cls, options): raise OSError('no card')  # here",
    "its constructor": "def __init__(self, options): raise OSError('no card')  # here",
    "describe": "def describe(self): raise OSError('no card')  # here",
    "can_connect": (
        "def can_connect(self, link, local, remote): raise OSError('no card')  # here"
    ),
}


@pytest.mark.parametrize("raised", ["OSError", "SystemExit"])
@pytest.mark.parametrize("what", BREAKS)
def test_a_transport_that_raises_when_it_is_asked(site: Site, what: str, raised: str) -> None:
    site.transport("fast", BREAKS[what].replace("OSError", raised))
    place = line_of(site, "fast_module", "# here")
    found = survey(Plugins(), ["fast"], {})
    if what == "can_connect":
        here = Endpoint(0, "s", "p", {})
        with pytest.raises(PluginError) as caught:
            found.can_connect(LINK, here, here)
        error: BaseException = caught.value
    else:
        error = found.errors["fast"]
        assert found.offers["fast"].reason == str(error)
    assert f"{what} raised {raised}: no card (in {place})" in str(error)
    assert type(error.__cause__).__name__ == raised
    assert "# here" in shown(error)


def test_options_that_raise_what_is_no_value_error(site: Site) -> None:
    changes = """
    @dataclasses.dataclass
    class Options:
        lanes: int = 1

        def __post_init__(self):
            raise OSError("no lanes file")  # here
    """
    site.transport("fast", changes, before="import dataclasses")
    found = survey(Plugins(), ["fast"], {})
    place = line_of(site, "fast_module", "# here")
    assert found.offers["fast"].state == "broken"
    assert f"Fake.Options, raised OSError: no lanes file (in {place})" in str(found.errors["fast"])


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("1 / 0  # here", "footprint raised ZeroDivisionError: division by zero (in "),
        ("return 4096  # here", "footprint returned 4096, neither a Footprint nor None"),
    ],
)
def test_a_footprint_that_cannot_be_told(site: Site, body: str, said: str) -> None:
    site.transport("fast", f"def footprint(self, window, message_bytes):\n    {body}")
    found = survey(Plugins(), ["fast"], {})
    with pytest.raises(PluginError) as caught:
        found.footprint("fast", 2, None)
    assert f"transport 'fast' cannot be used: {said}" in str(caught.value)


# -- through connect


def connect(rank: int, world_size: int, store: Store, plan: Any) -> tuple[BaseException, str]:
    with pytest.raises(StagelinkError) as caught:
        stagelink.connect(Plan.from_dict(plan), rank=rank, world_size=world_size, store=store)
    return caught.value, shown(caught.value)


@pytest.mark.parametrize(
    ("rule", "kind"), [("fast", PluginError), (["fast", "absent"], NoTransportError)], ids=str
)
def test_a_link_without_a_transport_shows_why(
    site: Site, rule: Any, kind: type[StagelinkError]
) -> None:
    site.plugin("fast", "raise ImportError('no libfast')  # here\n")
    plan = document(LOOPBACK) | {"links": [{"transport": rule}]}
    ends = run_threads(connect, 2, plan)
    for error, _ in ends:
        assert f"no libfast (in {line_of(site, 'fast_module', '# here')})" in str(error)
    own = [text for error, text in ends if type(error) is kind]
    assert own  # the other may have been told before it came to it itself
    assert all("raise ImportError('no libfast')  # here" in text for text in own)


def test_a_hook_that_raises_is_told_with_its_place(site: Site) -> None:
    source = """
    from stagelink.transport.hooks import hookimpl
    @hookimpl
    def stagelink_select_transport(link, candidates):
        return candidates[99]  # here
    """
    site.plugin("chooser", source, group="stagelink.observers")
    plugins = Plugins()
    plugins.load_observers(["chooser"])
    with pytest.raises(PluginError) as caught:
        plugins.hooks.select_transport(LINK, ("a", "b"))
    place = line_of(site, "chooser_module", "# here")
    assert str(caught.value).endswith(f"raised IndexError: tuple index out of range (in {place})")

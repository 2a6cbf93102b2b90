"""The guide for authors of transports: its code runs, and its reference is up to date."""

from __future__ import annotations

import importlib.util
import re
import sys
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from stagelink.plugins.problems import transport_problems
from stagelink.testing import closing, drivers, run_threads
from stagelink.testing.subject import Subject
from stagelink.transport.contract import API_VERSION
from tests.support import rail
from tests.support.docs import blocks

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

    from stagelink.testing import LeakCheck, RankPool

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "writing-a-transport.md").read_text()
EXAMPLE = Path(__file__).parents[2] / "examples" / "third_party_transport"


TRANSPORT = [block for block in blocks(PAGE, "python") if not re.search("testing|rail", block)]
(RAIL,) = [block for block in blocks(PAGE, "python") if "rail" in block]
(CONFORMANCE,) = [block for block in blocks(PAGE, "python") if "testing.conformance" in block]
(OWN_TESTS,) = [block for block in blocks(PAGE, "python") if "testing.faults" in block]


@pytest.fixture(scope="module")
def modules(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, ModuleType]]:
    """The guide's code as modules that rank processes find, too."""
    folder = tmp_path_factory.mktemp("guide")
    sources = {
        "stagelink_spool": "".join(TRANSPORT),
        "stagelink_rail": RAIL,
        "guide_conformance": CONFORMANCE,
        "guide_tests": OWN_TESTS,
    }
    for name, source in sources.items():
        (folder / f"{name}.py").write_text(source)
    sys.modules["rail"] = rail
    yield {name: _import(name, folder / f"{name}.py") for name in sources}
    for name in ("rail", *sources):
        del sys.modules[name]


def _import(name: str, file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def spool(modules: dict[str, ModuleType], tmp_path: Path) -> Subject:
    return _subject(modules["stagelink_spool"], {"folder": str(tmp_path)})


def _subject(module: ModuleType, options: dict[str, Any]) -> Subject:
    cls = module.stagelink_register_transport()
    assert transport_problems(cls) == []
    return Subject(cls.name, (cls,), options)


def test_all_of_the_code_is_run_here() -> None:
    assert len(blocks(PAGE, "python")) == len(TRANSPORT) + 3
    assert len(TRANSPORT) == 4


USES = [
    (drivers.sends_values, ()),
    (drivers.keeps_sizes, ((1, 0, 4_000_000, 64),)),
    (drivers.holds_what_it_received, (300_000,)),
    (closing.unread_at_close, ()),
]


@pytest.mark.parametrize(("driver", "args"), USES)
def test_its_transport_works_and_leaves_no_file(
    spool: Subject, tmp_path: Path, driver: Any, args: tuple[Any, ...]
) -> None:
    run_threads(driver, 2, spool, *args)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("driver", "args"), USES)
def test_its_transport_with_a_descriptor_works_and_leaves_nothing(
    modules: dict[str, ModuleType], leak_check: LeakCheck, driver: Any, args: tuple[Any, ...]
) -> None:
    run_threads(driver, 2, _subject(modules["stagelink_rail"], {}), *args)


@pytest.mark.parametrize("name", ["spool", "rail"])
def test_its_transports_work_between_processes(
    name: str, modules: dict[str, ModuleType], spool: Subject, rank_pool: RankPool, tmp_path: Path
) -> None:
    folder = str(Path(str(modules["stagelink_spool"].__file__)).parent)
    rank_pool.run(
        _unpack_and_echo, 2, folder, name, dict(spool.options) if name == "spool" else {}
    )
    assert list(tmp_path.iterdir()) == []


def _unpack_and_echo(
    rank: int, world_size: int, store: Any, folder: str, name: str, options: dict[str, Any]
) -> None:
    sys.modules["rail"] = rail
    module = _import(f"stagelink_{name}", Path(folder, f"stagelink_{name}.py"))
    subject = _subject(module, options)
    drivers.sends_both_ways_at_once(rank, world_size, store, subject, 400_000)


def test_a_folder_that_is_not_there_is_a_reason(modules: dict[str, ModuleType]) -> None:
    module = modules["stagelink_spool"]
    verdict = module.Spool.probe(module.SpoolOptions("/nowhere"))
    assert not verdict.ok
    assert "/nowhere" in verdict.reason


def test_its_conformance_test_names_the_transport(modules: dict[str, ModuleType]) -> None:
    assert modules["guide_conformance"].TestSpool.transport == "spool"


@pytest.mark.parametrize("test", ["test_a_torn_cable_is_told", "test_nothing_relies_on_buffers"])
def test_its_tests_pass(modules: dict[str, ModuleType], test: str) -> None:
    getattr(modules["guide_tests"], test)()


def test_its_distribution_has_the_right_entry_point() -> None:
    (text,) = blocks(PAGE, "toml")
    project = tomllib.loads(text)["project"]
    assert project["entry-points"] == {"stagelink.transports": {"spool": "stagelink_spool"}}


def test_it_states_the_contract_s_version() -> None:
    assert f"`API_VERSION`, now {API_VERSION[0]}.{API_VERSION[1]}." in PAGE


def test_its_reference_is_up_to_date() -> None:
    script = _import("contract_reference", DOCS / "contract_reference.py")
    assert script.render(PAGE) == PAGE, "run: python docs/contract_reference.py"


def test_its_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\((?!http)([^)#]+)", PAGE):
        assert (DOCS / target).exists(), target


def test_the_example_is_made_as_the_guide_says() -> None:
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]
    assert project["name"] == "stagelink-socketpair"
    points = {"stagelink.transports": {"socketpair": "stagelink_socketpair"}}
    assert project["entry-points"] == points


def test_the_example_uses_public_names_of_the_contract_only() -> None:
    source = (EXAMPLE / "src" / "stagelink_socketpair" / "__init__.py").read_text()
    found = set(re.findall(r"from (stagelink\S*) import", source))
    assert found == {
        "stagelink.transport.contract",
        "stagelink.transport.header",
        "stagelink.transport.hooks",
    }

"""A probe says why not: no UCX, one that is too old, a wire or a device that is not there."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from stagelink.transport.contract import Endpoint, Link, Verdict
from stagelink_ucx import Ucx, UcxOptions, library, stagelink_register_transport
from tests.ucx.here import needs_ucx

if TYPE_CHECKING:
    from collections.abc import Iterator

LINK = Link(0, 1, "ucx", "cpu")


@pytest.fixture
def nothing_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that has not loaded UCX yet."""
    monkeypatch.setattr(library, "_loaded", {})


def reason(**options: str) -> str:
    verdict = Ucx.probe(UcxOptions(**options))
    assert not verdict
    return verdict.reason


def test_the_hook_returns_the_class() -> None:
    assert stagelink_register_transport() is Ucx


@pytest.mark.usefixtures("nothing_loaded")
def test_no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "_NAME", "libucp-that-nobody-has.so.0")
    found = reason()
    assert found.startswith("UCX cannot be loaded: libucp-that-nobody-has.so.0: ")
    assert "pip install 'stagelink-ucx[cuda12]'" in found


def test_a_library_that_is_named_and_not_there() -> None:
    assert reason(library="/nowhere/libucp.so.0").startswith(
        "UCX cannot be loaded: /nowhere/libucp.so.0: "
    )


def test_a_library_that_is_another() -> None:
    assert reason(library="libc.so.6").startswith("libc.so.6 is no UCX, or one that is too old: ")


@needs_ucx
@pytest.mark.usefixtures("nothing_loaded")
def test_a_library_that_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    found = ".".join(map(str, library.load().version))
    library._loaded.clear()
    monkeypatch.setattr(library, "_LEAST", (99, 1))
    assert f" is UCX {found}, it takes 99.1; pip install 'stagelink-ucx[cuda12]'" in reason()


@needs_ucx
@pytest.mark.parametrize("wires", [None, "tcp", "sm", "tcp,sm", "^sm", "all"])
def test_usable(wires: str | None) -> None:
    assert Ucx.probe(UcxOptions(wires=wires)) == Verdict(True)


@needs_ucx
@pytest.mark.parametrize("wires", ["pigeons", "tcp,pigeons", "sm,pigeons"])
def test_a_wire_that_is_not_there(wires: str) -> None:
    assert reason(wires=wires) == "this UCX has nothing here for the wire 'pigeons'"


@needs_ucx
@pytest.mark.parametrize("devices", ["nosuch0", "lo,nosuch0"])
def test_a_device_that_is_not_there(devices: str) -> None:
    """UCX itself goes on in silence with the devices and the shared memory that are left."""
    nothing = "this UCX has nothing here for the network device 'nosuch0'"
    assert reason(devices=devices) == nothing
    assert reason(devices=devices, wires="tcp,sm") == f"{nothing} by 'tcp,sm'"


@needs_ucx
@pytest.mark.parametrize("wires", ["sm", "^tcp,sm"])
def test_a_device_without_a_wire_for_it(wires: str) -> None:
    nothing = "this UCX has nothing here for the network device 'lo'"
    assert reason(wires=wires, devices="lo") == f"{nothing} by {wires!r}"


@needs_ucx
def test_the_environment_speaks_where_no_option_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "pigeons")
    assert reason().startswith("UCX, looking for devices: ")
    assert Ucx.probe(UcxOptions(wires="tcp"))


def ends(*descriptions: dict[str, object]) -> Iterator[Endpoint]:
    for rank, description in enumerate(descriptions):
        yield Endpoint(rank, f"server {rank}", f"process {rank}", description)


@needs_ucx
@pytest.mark.parametrize(
    ("wires", "leads_out"), [("sm", False), ("posix,cma", False), ("sm,tcp", True), (None, True)]
)
def test_shared_memory_does_not_lead_out_of_a_server(wires: str | None, leads_out: bool) -> None:
    ucx = Ucx(UcxOptions(wires=wires))
    ours = ucx.describe()
    for local, remote in [(ours, {}), ({}, ours)]:
        verdict = ucx.can_connect(LINK, *ends(dict(local), dict(remote)))
        assert bool(verdict) is leads_out
    here = Endpoint(0, "here", "process 0", ours)
    assert ucx.can_connect(LINK, here, Endpoint(1, "here", "process 1", ours))


@needs_ucx
def test_the_environment_s_wires_lead_as_far_as_the_option_s(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("UCX_TLS", "sm")
    assert UcxOptions().within_a_server
    assert not UcxOptions(wires="tcp").within_a_server


@needs_ucx
@pytest.mark.parametrize(("other", "may"), [("1.13.7", True), ("1.14.1", False)])
def test_versions_that_may_not_read_each_other_s_addresses(other: str, may: bool) -> None:
    one, two = ends({"version": "1.13.1"}, {"version": other})
    verdict = Ucx(UcxOptions()).can_connect(LINK, one, two)
    assert bool(verdict) is may
    assert may or verdict.reason == f"UCX 1.13.1 and {other} may not read each other's addresses"

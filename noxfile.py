"""Every task of the project, each in an environment that it sets up itself: ``nox -s demo``."""

from __future__ import annotations

import shutil
from pathlib import Path

import nox

# Not uv, even where it is installed: it ignores the index settings of pip, and torch comes in
# builds of very different sizes.
nox.options.default_venv_backend = "virtualenv"
nox.options.reuse_venv = "yes"
nox.options.sessions = ["lint", "layers", "types", "tests"]

PINNED = ("-c", "constraints.txt")
READ_ONLY = ("--no-compile", *PINNED)
"""Of sessions that read modules and run none: compiling torch's takes as long as all the rest."""
PACKAGES = sorted(str(file.parent) for file in Path("packages").glob("*/pyproject.toml"))
EDITABLE = tuple(f"--editable={package}" for package in PACKAGES)


def _group(name: str) -> list[str]:
    """What a dependency group of pyproject.toml asks for."""
    return list(nox.project.dependency_groups(nox.project.load_toml("pyproject.toml"), name))


def _install(session: nox.Session, *more: str, options: tuple[str, ...] = PINNED) -> None:
    """Install the packages as they are here, and more."""
    # What builds them is installed once, and not again for each of them.
    session.install(*PINNED, "hatchling", "editables")
    session.install(*options, "--no-build-isolation", *EDITABLE, *more)


@nox.session
def demo(session: nox.Session) -> None:
    """Train the digits over four processes and in one, and compare."""
    _install(session, *_group("demo"))
    session.run("python", "examples/digits/train.py", *session.posargs)


@nox.session
def transformer(session: nox.Session) -> None:
    """Train a transformer on bytes with weights that change on the way, then flushed."""
    _install(session)
    session.run("python", "examples/bytes_transformer/compare.py", *session.posargs)


@nox.session
def tests(session: nox.Session) -> None:
    """Run the tests; arguments go to pytest."""
    _install(session, *_group("tests"))
    # Three at a time, also on two cores: most tests wait more than they compute.
    session.run("python", "-m", "pytest", *(session.posargs or ("-n", "3", "--dist", "loadscope")))


@nox.session
def torchs_own(session: nox.Session) -> None:
    """Run torch's tests of pipelining over the c10d backend: ``nox -s torchs_own -- TORCH``.

    TORCH is a source tree of the torch that is installed; a word after it chooses by name.
    """
    _install(session, *_group("tests"))
    session.run("python", "-m", "tests.interop.c10d_torchs_pipelining", *session.posargs)


@nox.session
def lint(session: nox.Session) -> None:
    """Check style and format."""
    session.install(*PINNED, *_group("lint"))
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")


@nox.session
def layers(session: nox.Session) -> None:
    """Check that every module imports only what its layer may."""
    _install(session, "--no-deps")  # imports are read, not run
    session.install(*PINNED, *_group("layers"))
    session.run("lint-imports")


@nox.session
def types(session: nox.Session) -> None:
    """Check types, strictly, in everything."""
    _install(session, *_group("types"), options=READ_ONLY)
    session.run("mypy", "--num-workers", "2")


@nox.session
def build(session: nox.Session) -> None:
    """Build every package and the example of a transport, install the wheels, and try them."""
    session.install(*PINNED, *_group("build"))
    shutil.rmtree("dist", ignore_errors=True)
    for package in PACKAGES:  # the wheel is made from the sdist, so both are tried
        session.run("python", "-m", "build", "--no-isolation", "--outdir=dist", package)
    example = "examples/third_party_transport"
    session.run("python", "-m", "build", "--no-isolation", "--wheel", "--outdir=dist", example)
    clean = Path(session.create_tmp(), "clean")
    session.run("python", "-m", "venv", "--clear", str(clean))
    wheels = map(str, Path("dist").glob("*.whl"))
    python = [str(clean / "bin" / "python"), "-I"]  # isolated: not from this folder
    install = ["-m", "pip", "install", "--quiet", *PINNED]
    session.run(*python, *install, *wheels, "pytest", external=True)
    session.run(*python, ".ci/try_installed.py", external=True)


@nox.session
def bench(session: nox.Session) -> None:
    """Run benchmarks: ``nox -s bench -- NAME``, or all; ``links`` is ``stagelink bench``."""
    _install(session, *_group("bench"))
    scripts = {file.stem for file in Path("benchmarks").glob("*.py")} - {"measuring", "soak"}
    for name in session.posargs or ["links", *sorted(scripts)]:
        if name == "links":
            results = ("--json", "benchmarks/results/links.json", "--plot", "benchmarks/links.svg")
            session.run("stagelink", "bench", *results)
        else:
            session.run("python", f"benchmarks/{name}.py")

"""Write the generated parts of ``writing-a-transport.md`` anew, from the docstrings.

``python docs/contract_reference.py`` after a change of the contract, of a hook or of the
conformance tests; a test says when it was forgotten.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

from stagelink.testing.conformance import TransportConformance
from stagelink.transport import blocking, contract, hooks

PAGE = Path(__file__).with_name("writing-a-transport.md")
CLASSES = (
    contract.Transport,
    contract.Sender,
    contract.Receiver,
    contract.Done,
    contract.Announce,
    contract.Port,
    blocking.Finisher,
    contract.Message,
    contract.Link,
    contract.Endpoint,
    contract.Capabilities,
    contract.Verdict,
    contract.Footprint,
    contract.Deadline,
)
"""In the order in which an author meets them."""

_SECTION = re.compile(r"^(Args|Attributes|Class attributes|Returns|Raises):$")


def render(page: str) -> str:
    """The page with its generated parts as they should be."""
    for name, text in (("reference", _reference()), ("hooks", _hooks()), ("tests", _tests())):
        begin, end = f"<!-- generated: {name} -->", "<!-- end -->"
        before, _, rest = page.partition(begin)
        page = f"{before}{begin}\n\n{text}\n\n{end}{rest.partition(end)[2]}"
    return page


def _reference() -> str:
    return "\n\n".join(part for cls in CLASSES for part in _class(cls))


def _class(cls: type[Any]) -> list[str]:
    parts = [f"### {cls.__name__}", _prose(cls)]
    for name, member in vars(cls).items():
        function = member.__func__ if isinstance(member, classmethod | staticmethod) else member
        if name == "__call__" or not name.startswith("_"):
            if isinstance(function, property):
                parts.append(f"#### {name}\n\n{_prose(function)}")
            elif inspect.isfunction(function):
                parts.append(f"#### {name}{_signature(function)}\n\n{_prose(function)}")
    return parts


def _hooks() -> str:
    names = sorted(name for name in vars(hooks) if name.startswith("stagelink_"))
    specs = [getattr(hooks, name) for name in names]
    return "\n\n".join(
        f"### {spec.__name__}{_signature(spec)}\n\n{_prose(spec)}" for spec in specs
    )


def _tests() -> str:
    rows = [
        f"| `{name}` | {inspect.getdoc(test)} |"
        for name, test in vars(TransportConformance).items()
        if name.startswith("test_")
    ]
    return "\n".join(["| test | what must hold |", "|---|---|", *rows])


def _signature(function: Any) -> str:
    names = []
    for parameter in inspect.signature(function).parameters.values():
        default = "" if parameter.default is parameter.empty else f"={parameter.default!r}"
        names.append(f"{parameter.name}{default}")
    return f"({', '.join(name for name in names if name not in {'self', 'cls'})})"


def _prose(documented: Any) -> str:
    """A docstring as Markdown: its sections become lists, or for one thing a paragraph."""
    lines: list[str] = []
    section = ""
    for line in (inspect.getdoc(documented) or "").splitlines():
        heading = _SECTION.match(line)
        if heading:
            section = heading[1]
            lines += [f"*{section}:*", ""]
        elif section and line.startswith("    "):
            lines.append(line[4:] if section == "Returns" else _entry(line[4:]))
        else:
            section = "" if line else section
            lines.append(line)
    return "\n".join(lines).replace("``", "`").strip()


def _entry(line: str) -> str:
    if line.startswith(" "):
        return f"  {line.strip()}"
    name, colon, rest = line.partition(": ")
    return f"- `{name}`: {rest}" if colon and " " not in name else f"- {line}"


if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text()))

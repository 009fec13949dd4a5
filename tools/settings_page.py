"""Writes docs/settings.md from the settings in trireme/config.py. Run it after a change there: python tools/settings_page.py"""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

from trireme.config import GROUPS, kind_of, settings

PAGE = pathlib.Path(__file__).resolve().parent.parent / "docs" / "settings.md"
HEAD = """# Settings

Every setting can be given in three ways: as a flag, as an environment variable, or in a TOML file that `--config FILE` (or
`TRIREME_CONFIG`) names. A flag wins over a variable, a variable over the file, the file over the default. In Python they are
arguments by name: `LLM("smollm2", page_size=1)`. An unknown name is an error, with the nearest known ones.

```toml
[cache]
page_size = 16

[serve]
port = 9000
api_key = ["key-of-alice", "key-of-bob"]
```

A setting that is on or off is `--NAME` or `--no-NAME` as a flag, `true` or `false` elsewhere. Whole numbers may end in `k`, `K`,
`m` or `M` (thousand, 1024, million, 1024²). This page is written by `tools/settings_page.py` from `trireme/config.py`.
"""


def page() -> str:
    parts = [HEAD]
    for group in GROUPS:
        parts.append(f"## [{group}]\n\n| flag | variable | default | what it says |\n|---|---|---|---|")
        parts += [_row(group, name, field) for name, (_, field) in settings([group]).items()]
        parts.append("")
    return "\n".join(parts)


def _row(group: str, name: str, field: dataclasses.Field[Any]) -> str:
    text, choices = str(field.metadata["help"]), field.metadata["choices"]
    if choices:
        text += f" ({', '.join(choices)})"
    text = text.replace("|", "\\|")
    return f"| `{_flag(group, name)}` | `TRIREME_{name.upper()}` | {_default(field.default)} | {text} |"


def _flag(group: str, name: str) -> str:
    flag = "--" + name.replace("_", "-")
    return flag if kind_of(group, name) is bool else f"{flag} {name.upper()}"


def _default(value: Any) -> str:
    if value is None or value == ():
        return ""
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


if __name__ == "__main__":
    PAGE.write_text(page())
    print(PAGE)

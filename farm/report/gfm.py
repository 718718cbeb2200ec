"""Text for GitHub-flavoured Markdown: escaped, as code, fenced.  Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence


def text(value: str) -> str:
    """Plain text, on one line, that Markdown and HTML leave alone."""
    flat = " ".join(str(value).split()).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_\[\]|~@#])", lambda found: f"&#{ord(found[1])};", flat)


def code(value: str) -> str:
    """A code span; the bar would end a table's cell even inside one."""
    flat = " ".join(str(value).split())
    if "|" in flat or "`" in flat:
        return f"<code>{text(flat)}</code>"
    return f"`{flat}`" if flat else ""


def fenced(lines: Sequence[str]) -> list[str]:
    """A block of code, its fence longer than any in the lines."""
    longest = max((len(run) for line in lines for run in re.findall("`+", line)), default=0)
    fence = "`" * max(3, 1 + longest)
    return [f"{fence}text", *lines, fence]

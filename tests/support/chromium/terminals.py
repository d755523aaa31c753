"""Pictures of what terminals have shown, as drawings."""

from __future__ import annotations

import io

from support.chromium import pictures_folder

# That of rich without its script, and without a font that browsers would fetch from elsewhere.
_FORMAT = """<svg class="rich-terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font-family: ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace;
 font-size: {char_height}px; line-height: {line_height}px; }}
.{unique_id}-title {{ font-family: system-ui, sans-serif; font-size: 18px; }}
{styles}
</style>
<defs>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""


def draw_terminal(name: str, title: str, shown: str) -> None:
    """Write a picture of a terminal, where somebody asked for pictures.

    Args:
        name: Of the file, below the folder of the pictures, without `.svg`.
        title: Of the window.
        shown: What the terminal has shown, escape sequences of colours included.
    """
    folder = pictures_folder()
    if folder is None:
        return
    from rich.console import Console
    from rich.text import Text

    lines = shown.rstrip("\n").split("\n")
    width = max(len(Text.from_ansi(line)) for line in lines)
    console = Console(record=True, width=max(width, 60), file=io.StringIO(), force_terminal=True)
    console.print(Text.from_ansi("\n".join(lines)), soft_wrap=True)
    path = folder / f"{name}.svg"
    path.parent.mkdir(parents=True, exist_ok=True)
    unique_id = name.replace("/", "-")
    console.save_svg(str(path), title=title, code_format=_FORMAT, unique_id=unique_id)

"""The public names of all distributions, as two texts made from the sources, which are read, not imported.

`python3 tools/dev.py reference` writes `docs/signatures.md`, which is in git, so that a review shows each change of a
signature; with `--check` it only compares. `tools/docs_hook.py` adds the pages `reference/*.md`, with the docstrings,
while mkdocs builds the site.

A name is public if `__all__` of a module in `PAGES` lists it. If several modules list it, it is described at the one
that is nearest to its source, and the others link there.
"""

from __future__ import annotations

import argparse
import ast
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import griffe

ROOT = Path(__file__).resolve().parent.parent
SIGNATURES = ROOT / "docs" / "signatures.md"

PAGES: dict[str, tuple[str, ...]] = {
    "triton": ("pytriton.triton", "pytriton.server.errors"),
    "inprocess": ("pytriton.inprocess",),
    "guests": ("pytriton.guests",),
    "ray": ("pytriton.ray",),
    "openai": ("pytriton.openai",),
    "model_config": (
        "pytriton.model_config",
        "pytriton.model_config.tensor",
        "pytriton.model_config.model_config",
        "pytriton.model_config.common",
        "pytriton.model_config.cost",
        "pytriton.model_config.triton_model_config",
        "pytriton.model_config.generator",
        "pytriton.model_config.parser",
    ),
    "decorators": ("pytriton.decorators", "pytriton.decorators.testing"),
    "testing": ("pytriton.testing",),
    "proxy": ("pytriton.proxy.types", "pytriton.proxy.outputs", "pytriton.proxy.telemetry"),
    "exceptions": ("pytriton.exceptions",),
    "client": (
        "pytriton.client",
        "pytriton.client.client",
        "pytriton.client.exceptions",
        "pytriton.client.auth",
        "pytriton.client.utils",
        "pytriton.client.asyncio_utils",
        "pytriton.client.warnings",
    ),
    "proxy_backend": ("pytriton.proxy_backend",),
}
"""Which modules are on which page."""

FIRST = ("Triton", "RemoteTriton", "TritonConfig", "model", "ModelClient")
"""Names that their module begins with."""

SIBLINGS_PAGE = "siblings"
SIBLINGS_HEAD = """# For siblings

What `pytriton-server` takes from the distributions that it is installed with, beside their public names. The versions
are pinned to each other, so these names may change from one release to the next: nobody else should import them.
"""

HEAD = "<!-- tools/reference.py writes this page from the docstrings. Change those, not this file. -->\n\n"

SIGNATURES_HEAD = """<!-- Written by `python3 tools/dev.py reference` from the sources. Change those, not this file. -->

# Signatures

This page is long: it lists every public name with its signature, by the module that it is imported from.
`python3 tools/dev.py docs` builds the site, whose reference has the docstrings, too.
"""
SIGNATURES_SIBLINGS = """## Names that pytriton-server takes from the other distributions

`pytriton-server` imports these names besides the public ones. The versions of the distributions are pinned to each
other, so any of these names may change with a release, together with the code that uses it: nobody else should import
them.
"""
WIDTH = 120


@dataclass(frozen=True)
class Entry:
    """One public name of one module."""

    module: str  # the module that offers it
    name: str  # its name there
    page: str  # the page of that module
    described: griffe.Object  # what is known of it

    @property
    def anchor(self) -> str:
        """Where the name is on its page."""
        return f"{self.module}.{self.name}".replace(".", "").lower()


def load() -> griffe.GriffeLoader:
    """Read the sources of all distributions."""
    found = [str(path) for path in sorted(ROOT.glob("packages/*/src"))]
    loader = griffe.GriffeLoader(search_paths=found, docstring_parser="google", allow_inspection=False)
    loader.load("pytriton", submodules=True, try_relative_path=False)
    loader.resolve_aliases(implicit=True, external=False)
    return loader


def public_names(module: griffe.Object) -> list[str]:
    """Return the names in `__all__` of a module, in its order.

    Raises:
        SystemExit: It has none.
    """
    if module.exports is None:
        raise SystemExit(f"{module.path} has no __all__: a module in PAGES of tools/reference.py says what is public.")
    return [str(getattr(name, "name", name)) for name in module.exports]


def entries(loader: griffe.GriffeLoader) -> Iterator[Entry]:
    """List every public name of every module of `PAGES`."""
    for page, modules in PAGES.items():
        for path in modules:
            module = loader.modules_collection[path]
            found = [Entry(path, name, page, resolved(module, name)) for name in public_names(module)]
            yield from sorted(found, key=rank)


def resolved(module: griffe.Object, name: str) -> griffe.Object:
    """Return what a name of a module stands for, also where it comes from another module of ours.

    Raises:
        SystemExit: It is not there.
    """
    member: Any = module.members.get(name)
    if member is None:
        raise SystemExit(f"{module.path}.__all__ names {name!r}, which the module does not have.")
    if member.is_alias:
        try:
            member = member.final_target
        except griffe.AliasResolutionError as error:
            raise SystemExit(f"{module.path}.{name} cannot be followed to its source: {error}") from error
    found: griffe.Object = member
    return found


def nearness(entry: Entry) -> int:
    """Return how much of the path to a name's source its module shares.

    The description stands where the name belongs.
    """
    shared = 0
    for ours, theirs in zip(entry.module.split("."), entry.described.canonical_path.split("."), strict=False):
        if ours != theirs:
            break
        shared += 1
    return shared


def rank(entry: Entry) -> tuple[int, int]:
    """Return the sort key: what readers come for, then classes before functions, and functions before values."""
    first = FIRST.index(entry.name) if entry.name in FIRST else len(FIRST)
    kind = 0 if isinstance(entry.described, griffe.Class) else 1 if isinstance(entry.described, griffe.Function) else 2
    return first, kind


def homes_of(every: list[Entry]) -> dict[int, Entry]:
    """Return where each object is described, by its identity: at the module that is nearest to its source."""
    homes: dict[int, Entry] = {}
    for entry in sorted(every, key=lambda entry: -nearness(entry)):
        homes.setdefault(id(entry.described), entry)
    return homes


def pages() -> dict[str, str]:
    """Make the text of every page of the site's reference, by file name."""
    loader = load()
    every = list(entries(loader))
    homes = homes_of(every)
    written = {"index.md": index_page(every)}
    for page, modules in PAGES.items():
        parts = [HEAD.rstrip() + f"\n\n# {modules[0]}"]
        for number, path in enumerate(modules):
            mine = [entry for entry in every if entry.module == path]
            parts.append(module_text(path, mine, homes, is_first=number == 0))
        written[f"{page}.md"] = "\n\n".join(parts) + "\n"
    written[f"{SIBLINGS_PAGE}.md"] = siblings_page(loader)
    return written


def signatures() -> str:
    """Make the page of all signatures."""
    loader = load()
    every = list(entries(loader))
    homes = homes_of(every)
    public = {id(entry.described) for entry in every}
    parts = [SIGNATURES_HEAD.rstrip()]
    for modules in PAGES.values():
        for path in modules:
            texts = []
            for entry in every:
                if entry.module == path and homes[id(entry.described)] == entry:
                    texts.append(signature_text(entry.name, entry.described, public))
                elif entry.module == path:
                    texts.append(f"from {homes[id(entry.described)].module} import {entry.name}")
            parts += [f"## {path}", code("\n".join(texts))]
    parts.append(SIGNATURES_SIBLINGS.rstrip())
    for path, names in sorted(sibling_names().items()):
        listed = f"* `{path}`: {', '.join(f'`{name}`' for name in sorted(names, key=str.lower))}"
        parts.append(textwrap.fill(listed, WIDTH, subsequent_indent="  ", break_long_words=False))
    return "\n\n".join(parts) + "\n"


def signature_text(name: str, described: griffe.Object, public: set[int]) -> str:
    """Write a value, a function, or a class with its members; members of a public base class stand there alone."""
    if isinstance(described, griffe.Function):
        return filled(function_signature(name, described))
    if not isinstance(described, griffe.Class):
        return attribute_signature(name, described) if isinstance(described, griffe.Attribute) else name
    head, *call = class_signature(name, described).split("\n\n")
    constructor: Any = described.all_members.get("__init__")
    is_inherited = constructor is not None and constructor.is_alias and id(constructor.final_target.parent) in public
    lines = [head, *(textwrap.indent(filled(text), "    ") for text in call if not is_inherited)]
    for member_name, member in class_members(described):
        if member_name in described.members or id(member.parent) not in public:
            lines.append(textwrap.indent(signature_text(member_name, member, public), "    "))
    return "\n".join(lines)


def filled(signature: str) -> str:
    """Write the parameters of a signature that has one on each line with as many on a line as it holds."""
    head, found, rest = signature.partition("(\n")
    parameters, _, end = rest.rpartition("\n)")
    if not found:
        return signature
    lines = [""]
    for parameter in parameters.strip().split(",\n    "):
        text = f"{parameter.rstrip(',')},"
        if lines[-1] and len(lines[-1]) + len(text) > WIDTH - 10:
            lines.append("")
        lines[-1] += f" {text}" if lines[-1] else text
    return "\n".join([f"{head}(", *(f"    {line}" for line in lines), f"){end}"])


def sibling_names() -> dict[str, set[str]]:
    """Return the names that pytriton-server imports from the inside of the other distributions, by module."""
    public = {path for paths in PAGES.values() for path in paths}
    server = ROOT / "packages" / "pytriton-server" / "src"
    own = {path.name for path in (server / "pytriton").iterdir() if path.is_dir()}
    taken: dict[str, set[str]] = {}
    for file in sorted(server.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            path = node.module or "" if isinstance(node, ast.ImportFrom) and not node.level else ""
            if not path.startswith("pytriton.") or path.split(".")[1] in own or path in public:
                continue
            for alias in node.names if isinstance(node, ast.ImportFrom) else ():
                taken.setdefault(path, set()).add(alias.name)
    return taken


def siblings_page(loader: griffe.GriffeLoader) -> str:
    """Make the page of what one distribution takes from inside of the others.

    Raises:
        SystemExit: A name is not there, or its docstring does not say what it is.
    """
    parts, silent = [HEAD.rstrip(), SIBLINGS_HEAD.rstrip()], []
    for path, found in sorted(sibling_names().items()):
        names = sorted(found, key=str.lower)
        texts = {name: summary(resolved(loader.modules_collection[path], name)) for name in names}
        silent += [f"{path}.{name}" for name, text in texts.items() if not text]
        parts += [f"## {path}", "\n".join(f"* `{name}`: {text}" for name, text in texts.items())]
    if silent:
        raise SystemExit(f"pytriton-server uses names whose docstrings have to say what they are: {', '.join(silent)}")
    return "\n\n".join(parts) + "\n"


def index_page(every: list[Entry]) -> str:
    """Make the page that lists all names by module."""
    lines = [HEAD + "# Reference", "", "Every public name, by the module that it is imported from."]
    for modules in PAGES.values():
        for path in modules:
            mine = [entry for entry in every if entry.module == path]
            lines += ["", f"## {path}", ""]
            lines += [f"* [`{e.name}`]({e.page}.md#{e.anchor}){ending(summary(e.described))}" for e in mine]
    return "\n".join(lines) + "\n"


def module_text(path: str, mine: list[Entry], homes: dict[int, Entry], *, is_first: bool) -> str:
    """Describe the names of one module."""
    parts = [] if is_first else [f"# {path}"]
    for entry in mine:
        home = homes[id(entry.described)]
        title = f"## {path}.{entry.name}"
        if home == entry:
            parts += [title, object_text(entry.name, entry.described, level=3)]
        else:
            parts += [title, f"The same as [`{home.module}.{home.name}`]({home.page}.md#{home.anchor})."]
    return "\n\n".join(parts)


def object_text(name: str, described: griffe.Object, *, level: int) -> str:
    """Describe a class, a function or a value."""
    parts: list[str] = []
    if isinstance(described, griffe.Class):
        parts.append(code(class_signature(name, described)))
    elif isinstance(described, griffe.Function):
        parts.append(code(function_signature(name, described)))
    elif isinstance(described, griffe.Attribute):
        parts.append(code(attribute_signature(name, described)))
    parts += docstring_parts(described)
    if isinstance(described, griffe.Class):
        parts += settings_parts(described)
        for member_name, member in class_members(described):
            parts.append(f"{'#' * level} {name}.{member_name}")
            parts.append(object_text(member_name, member, level=level + 1))
    return "\n\n".join(parts)


def class_members(described: griffe.Class) -> list[tuple[str, griffe.Object]]:
    """List the public members of a class, its own and those that it has from other classes of ours."""
    found: list[tuple[str, griffe.Object]] = []
    for name, member in described.all_members.items():
        if name.startswith("_") and name not in ("__call__", "__enter__", "__aenter__"):
            continue
        target: Any = member.final_target if isinstance(member, griffe.Alias) else member
        if target.is_attribute and not target.has_docstring and "instance-attribute" in target.labels:
            continue  # an attribute that the docstring of the class describes, or nobody
        found.append((name, target))
    own = [pair for pair in found if pair[0] in described.members]
    return own + [pair for pair in found if pair[0] not in described.members]


def class_signature(name: str, described: griffe.Class) -> str:
    """Write a class as its call."""
    bases = ", ".join(str(base) for base in described.bases)
    text = f"class {name}({bases})" if bases else f"class {name}"
    try:
        parameters = list(described.parameters)[1:] if described.parameters else []
    except (AttributeError, KeyError):
        parameters = []
    return text if not parameters else f"{text}\n\n{name}({parameter_list(parameters)})"


def function_signature(name: str, described: griffe.Function) -> str:
    """Write a function or a method as its definition."""
    parameters = [each for each in described.parameters if each.name not in ("self", "cls")]
    marks = [f"@{label}\n" for label in ("classmethod", "staticmethod") if label in described.labels]
    word = "async def" if "async" in described.labels else "def"
    returns = f" -> {described.returns}" if described.returns is not None else ""
    return f"{''.join(marks)}{word} {name}({parameter_list(parameters)}){returns}"


def attribute_signature(name: str, described: griffe.Attribute) -> str:
    """Write a value with its type."""
    if "property" in described.labels:
        return f"{name}: {described.annotation}  # property"
    annotation = f": {described.annotation}" if described.annotation is not None else ""
    if "instance-attribute" in described.labels:
        return f"{name}{annotation}"  # what the constructor assigns is no value to show
    value = str(described.value) if described.value is not None else ""
    return f"{name}{annotation}" + (f" = {value}" if value and len(value) < 60 and "\n" not in value else "")


def parameter_list(parameters: Iterable[griffe.Parameter]) -> str:
    """Write parameters as in a definition; one to a line where there are many."""
    written: list[str] = []
    only_keywords = False
    for each in parameters:
        if each.kind is griffe.ParameterKind.keyword_only and not only_keywords:
            only_keywords = True
            if not any(text.startswith("*") for text in written):
                written.append("*")
        text = {"variadic positional": "*", "variadic keyword": "**"}.get(each.kind.value if each.kind else "", "")
        text += each.name
        if each.annotation is not None:
            text += f": {annotated(each.annotation)[0]}"
        if each.default is not None and not text.startswith("*"):
            text += f" = {each.default}" if each.annotation is not None else f"={each.default}"
        written.append(text)
    line = ", ".join(written)
    return line if len(line) <= 90 else "\n    " + ",\n    ".join(written) + ",\n"


def docstring_parts(described: griffe.Object) -> list[str]:
    """Render a docstring's sections as Markdown."""
    if described.docstring is None:
        return []
    writers: dict[Any, Callable[[Any], str]] = {
        griffe.DocstringSectionKind.text: lambda value: str(value),
        griffe.DocstringSectionKind.parameters: lambda value: "**Arguments**\n\n" + "\n".join(map(named_item, value)),
        griffe.DocstringSectionKind.other_parameters: lambda value: "\n".join(map(named_item, value)),
        griffe.DocstringSectionKind.attributes: lambda value: "**Attributes**\n\n" + "\n".join(map(named_item, value)),
        griffe.DocstringSectionKind.raises: lambda value: "**Raises**\n\n" + "\n".join(map(raised_item, value)),
        griffe.DocstringSectionKind.warns: lambda value: "**Warns**\n\n" + "\n".join(map(raised_item, value)),
        griffe.DocstringSectionKind.returns: lambda value: "**Returns**\n\n" + "\n".join(map(returned_item, value)),
        griffe.DocstringSectionKind.yields: lambda value: "**Yields**\n\n" + "\n".join(map(returned_item, value)),
        griffe.DocstringSectionKind.examples: lambda value: "\n\n".join(text for _, text in value),
        griffe.DocstringSectionKind.admonition: lambda value: f"**{value.kind.capitalize()}**: {value.contents}",
    }
    return [
        writers[section.kind](section.value)
        for section in described.docstring.parsed
        if section.kind in writers and section.value
    ]


def settings_parts(described: griffe.Class) -> list[str]:
    """Render what the fields of a class of settings mean, see `pytriton/proxy_backend/settings.py`."""
    items = []
    for parameter in described.parameters:
        arguments = annotated(parameter.annotation)
        if len(arguments) > 1:
            meaning = ast.literal_eval(str(arguments[1].arguments[0]))
            unset = [ast.literal_eval(str(each.value)) for each in keywords(arguments[1]) if each.name == "unset"]
            meaning += "".join(f"; None is {text}" for text in unset)
            items.append(f"* `{parameter.name}`: {meaning[0].upper()}{meaning[1:]}.")
    return ["**Attributes**\n\n" + "\n".join(items)] if items else []


def keywords(call: griffe.ExprCall) -> list[griffe.ExprKeyword]:
    """Return the arguments of a call that have names."""
    return [each for each in call.arguments if isinstance(each, griffe.ExprKeyword)]


def annotated(annotation: Any) -> list[Any]:
    """Return what is between the brackets of `Annotated[...]`; of any other type itself."""
    if isinstance(annotation, griffe.ExprSubscript) and str(annotation.left) == "Annotated":
        elements: Any = annotation.slice
        return list(elements.elements)
    return [annotation]


def named_item(item: Any) -> str:
    """Return the list item of an argument or attribute."""
    return f"* `{item.name}`: {one_line(item.description)}"


def raised_item(item: Any) -> str:
    """Return the list item of an error."""
    return f"* `{item.annotation}`: {one_line(item.description)}"


def returned_item(item: Any) -> str:
    """Return what is returned or yielded."""
    return one_line(item.description)


def one_line(text: str) -> str:
    """Join the lines of a paragraph; paragraphs after the first are indented below the bullet."""
    paragraphs = [" ".join(paragraph.split()) for paragraph in text.strip().split("\n\n")]
    return "\n\n  ".join(paragraphs)


def code(text: str) -> str:
    """Return a signature as a code block that is not run as an example."""
    return f"```pyi\n{text}\n```"


def summary(described: griffe.Object) -> str:
    """Return the first sentence of a docstring, in one line."""
    if described.docstring is None:
        return ""
    first = described.docstring.value.strip().split("\n\n")[0]
    return " ".join(first.split())


def ending(text: str) -> str:
    """Return what follows a name in a list."""
    return f": {text}" if text else ""


def main(arguments: list[str]) -> int:
    """Write the page of signatures, or with `--check` say whether it is stale."""
    parser = argparse.ArgumentParser(description="Write docs/signatures.md from the sources.")
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 where the page is stale")
    is_check = parser.parse_args(arguments).check
    fresh = signatures()
    is_stale = not SIGNATURES.exists() or SIGNATURES.read_text(encoding="utf-8") != fresh
    if is_check and is_stale:
        print("docs/signatures.md is stale: run `python3 tools/dev.py reference`")
    elif is_stale:
        SIGNATURES.write_text(fresh, encoding="utf-8")
        print("docs/signatures.md written")
    return int(is_check and is_stale)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
